"""Where an LLM server is, and the synchronous HTTP client for what is no model call."""

from __future__ import annotations

import httpx


def root(url: str) -> str:
    """The server's address without a trailing slash and without the `/v1` that OpenAI clients add."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def session(timeout_s: float) -> httpx.Client:
    """An HTTP client that goes to servers directly, past a proxy of the environment, as the workers do."""
    return httpx.Client(timeout=timeout_s, trust_env=False)
