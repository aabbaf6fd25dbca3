"""Where an LLM server is, and the synchronous HTTP for what is no model call."""

from __future__ import annotations

import time
from typing import Any

import httpx
from pydantic_core import from_json

MOST_BYTES = 16 << 20
"""Of an answer that is no model call. The metrics of a large server have a megabyte."""
LONGEST_S = 30.0
"""A server may send without end, a byte at a time; no time limit of a single read ends that."""


class BoundlessAnswer(httpx.TransportError):
    """An answer had more bytes, or took longer, than anything honest does."""


def root(url: str) -> str:
    """The server's address without a trailing slash and without the `/v1` that OpenAI clients add."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def session(timeout_s: float) -> httpx.Client:
    """An HTTP client that goes to servers directly, past a proxy of the environment, as the workers do."""
    return httpx.Client(timeout=timeout_s, trust_env=False)


def ask(
    http: httpx.Client,
    method: str,
    url: str,
    *,
    most_bytes: int = MOST_BYTES,
    within_s: float = LONGEST_S,
    **options: Any,
) -> httpx.Response:
    """An answer, read as far as is honest and never unpacked.

    Args:
        within_s: For the body, beside the time limits of the client.

    Raises:
        BoundlessAnswer: It is too long, or comes too slowly.
        httpx.HTTPError: As the client has it.
    """
    ends = time.monotonic() + within_s
    body = bytearray()
    with http.stream(method, url, headers={"Accept-Encoding": "identity"}, **options) as response:
        if response.headers.get("content-encoding", "identity") != "identity":
            # What is small on the wire may be without end when it is unpacked.
            raise BoundlessAnswer("a packed answer, which was not asked for", request=response.request)
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > most_bytes:
                raise BoundlessAnswer(
                    f"the answer has more than {most_bytes} bytes", request=response.request
                )
            if time.monotonic() > ends:
                raise BoundlessAnswer(f"the answer took longer than {within_s:g} s", request=response.request)
    return httpx.Response(response.status_code, content=bytes(body), request=response.request)


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object that an answer is; empty where it is none, or nested beyond reason."""
    try:
        said = from_json(response.content)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
