"""Where an LLM server is, and the synchronous HTTP for what is no model call."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import requests
import urllib3
from pydantic_core import from_json

from services.engines import credentials
from services.logs import masked

MOST_BYTES = 16 << 20
"""The most bytes of an answer that is no model call. The metrics of a large server have a megabyte."""
CONNECT_S = 5.0
"""A server that takes longer to accept a connection counts as down."""
_PIECE = 1 << 16


class BoundlessAnswer(requests.ConnectionError):
    """An answer had more bytes than anything honest does, or came packed."""


@dataclass(frozen=True)
class Answer:
    """What a server answered, read to its end."""

    url: str
    status: int
    reason: str
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8, whatever the server says that it is."""
        return self.content.decode(errors="replace")


def root(url: str) -> str:
    """The server's address without a trailing slash and without the `/v1` that OpenAI clients add."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def ask(method: str, url: str, timeout_s: float, key: str | None = None, **options: Any) -> Answer:
    """An answer, read as far as is honest and never unpacked.

    It is asked for past a proxy of the environment, as the workers' model calls are, and by a connection of
    its own: servers close idle ones after a few seconds, and one that was used again just then would break.

    Args:
        timeout_s: Most seconds without a byte, and most for the whole body; `CONNECT_S` at most to connect.
        key: Of the server as it is registered; it is in no part of the answer.
        options: Of `requests`, such as `json` and `params`.

    Raises:
        EngineKeyProblem: The key cannot be used.
        BoundlessAnswer: It is too long.
        requests.ReadTimeout: It comes too slowly, in whole or in part.
        requests.RequestException: As the library has it.
    """
    ends = time.monotonic() + timeout_s
    body = bytearray()
    with requests.Session() as http:
        http.trust_env = False
        with http.request(
            method,
            url,
            headers={"Accept-Encoding": "identity", "Connection": "close"} | credentials.headers(key),
            timeout=(min(CONNECT_S, timeout_s), timeout_s),
            allow_redirects=False,
            stream=True,
            **options,
        ) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                # What is small on the wire may be without end when it is unpacked.
                raise BoundlessAnswer("a packed answer, which was not asked for")
            try:
                while piece := response.raw.read1(_PIECE):
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise BoundlessAnswer(f"the answer has more than {MOST_BYTES} bytes")
                    if time.monotonic() > ends:
                        raise requests.ReadTimeout(f"the answer took longer than {timeout_s:g} s")
            except urllib3.exceptions.ReadTimeoutError as error:
                raise requests.ReadTimeout(str(error)) from error
            except urllib3.exceptions.HTTPError as error:
                raise requests.ConnectionError(str(error)) from error
    return Answer(url, response.status_code, masked(response.reason or ""), masked(bytes(body)))


def text_of(error: requests.RequestException) -> str:
    """What went wrong, without what `requests` says of tries that were not made."""
    cause = error.args[0] if error.args else error
    return masked(f"{type(error).__name__}: {getattr(cause, 'reason', cause)}")


def json_object(answer: Answer) -> dict[str, Any]:
    """The JSON object that an answer is; empty where it is none, or nested beyond reason."""
    try:
        value = from_json(answer.content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
