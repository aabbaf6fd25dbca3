"""The HTTP of two other projects, ProRL-Agent-Server and NeMo Gym, for clients that were written for those.

A wing of the gateway: `app.register` is its door, and nothing of the core imports the rest.
"""
