"""LLM servers as the service knows them: what they are told, what they answer, what they say of themselves.

Nothing here does I/O for a model call: an `Engine` builds the request and reads the answer, so that workers
(asynchronous) and services (synchronous) share it.
"""
