"""Sandboxes for agents: one container per sandbox, one host daemon per node and user.

Imports nothing of the rest of the project and knows nothing of tasks, queues or models.
"""
