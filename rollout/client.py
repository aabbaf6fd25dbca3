"""The clients of the HTTP API: `Client` for blocking code, and `AsyncClient` with the same as coroutines."""

from rollout.async_client import AsyncClient
from rollout.errors import AddressError, ApiError, ApiKeyError, RolloutError, Unavailable, WaitTimeout
from rollout.http import DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE
from rollout.sync import Client

__all__ = [
    "DEFAULT_URL",
    "KEY_VARIABLE",
    "URL_VARIABLE",
    "AddressError",
    "ApiError",
    "ApiKeyError",
    "AsyncClient",
    "Client",
    "RolloutError",
    "Unavailable",
    "WaitTimeout",
]
