"""What both clients share: address, key, timeouts, and how a call becomes a request."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import SplitResult, urlsplit

import httpx

from rollout import account
from rollout.batch import BatchRequest
from rollout.batch_operations import GroupInclude, Groups, Seen
from rollout.batch_operations import run as run_batch
from rollout.calls import Call
from rollout.errors import AddressError, ApiKeyError
from rollout.operations import Requests, Stream
from rollout.schema import (
    Backend,
    HandlerInfo,
    Rollout,
    Submitted,
)
from rollout.sse import Follower

DEFAULT_URL = "http://127.0.0.1:8080"
URL_VARIABLE = "ROLLOUT_URL"
KEY_VARIABLE = "ROLLOUT_API_KEY"
Wire = Literal["auto", "json", "msgpack"]
AHEAD = 4
"""Calls of a client that are under way while their operations go on, for as many streams at once."""
TYPED = "application/msgpack, application/json;q=0.5"
T = TypeVar("T")
# Named here because the method `list` hides the builtin inside the classes.
Accepted = list[Submitted]
Handlers = list[HandlerInfo]
Backends = list[Backend]
Results = list[Rollout]


class Key(httpx.Auth):
    """Puts the key into the header of calls to the one address that it belongs to, and of no others."""

    def __init__(self, url: str, key: str, owned: account.Owned | None) -> None:
        """
        Args:
            owned: Looks at who listens at the address; None for a key that the caller gave.
        """
        self._origin = account.origin(url)
        self._header = f"Bearer {key}"
        self._owned = owned

    @property
    def found(self) -> bool:
        """Whether it was found in a file of this account's."""
        return self._owned is not None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if account.origin(str(request.url)) == self._origin:
            if self._owned:
                self._owned.require()
            request.headers["Authorization"] = self._header
        yield request


def _auth(url: str, given: str | None) -> Key | None:
    """What authorizes calls to `url`: the key given, the environment's, or that of our own service there.

    Raises:
        ApiKeyError: It is one that no header can carry, or its file is not ours alone.
    """
    owned = None
    key = (given if given is not None else os.environ.get(KEY_VARIABLE, "")).strip()
    if not key and given is None and (found := account.key_for(url)):
        key, owned = found, account.Owned(url)
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ApiKeyError(
            "the API key has characters that no key has; give what `rollout keys create` printed, as api_key "
            f"or {KEY_VARIABLE}"
        )
    return Key(url, key, owned)


def _port_fits(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


class Base:
    """Address, timeouts and the making of requests."""

    def __init__(
        self,
        base_url: str | None = None,
        timeout: float = 30.0,
        retry_for: float = 30.0,
        api_key: str | None = None,
        wire: Wire = "auto",
    ) -> None:
        """
        Args:
            base_url: The gateway; None = `$ROLLOUT_URL`, else that of the service that this account started
                last with `rollout up` and that runs, else http://127.0.0.1:8080.
            timeout: Seconds to wait for one answer, beside what a long-poll waits by itself.
            retry_for: Seconds during which a call is sent again after a connection error, a 503, or a 429
                (over quota) that says when to.
            api_key: None = `$ROLLOUT_API_KEY`, else that of this account's own service at that address. It is
                sent to no other address.
            wire: How trajectories come: `msgpack` as typed arrays, `json`, or `auto`: as arrays where the
                package `msgspec` is installed. A gateway that knows only JSON sends that in any case.
        """
        url = base_url or os.environ.get(URL_VARIABLE) or account.default_url() or DEFAULT_URL
        self.base_url = url.rstrip("/")
        self.timeout = timeout
        self.retry_for = retry_for
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _port_fits(parts):
            raise AddressError(
                f"gateway address {self.base_url!r} is not an http(s) URL; give one like {DEFAULT_URL} "
                f"as base_url, --url or {URL_VARIABLE}"
            )
        if wire not in get_args(Wire):
            raise ValueError(f"wire = {wire!r} is not one of {', '.join(get_args(Wire))}")
        self._typed = wire == "msgpack" or (wire == "auto" and find_spec("msgspec") is not None)
        # A proxy of the environment cannot reach this machine's own loopback.
        self._local = local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
        auth = _auth(self.base_url, api_key)
        direct = local or (auth is not None and auth.found)
        self._http_options = {"base_url": self.base_url, "trust_env": not direct, "auth": auth}

    def _request(self, call: Call) -> dict[str, Any]:
        headers = {"content-type": "application/json"} if call.body is not None else {}
        if call.typed and self._typed:
            headers["accept"] = TYPED
        if self._local or "accept" in headers:
            # To compress arrays, or anything for this machine's own loopback, takes longer than it saves.
            headers["accept-encoding"] = "identity"
        return {
            "method": call.method,
            "url": call.path,
            "params": call.params,
            "content": call.body,
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, read=self.timeout + call.wait),
        }

    def _stream_request(self, follow: Follower) -> dict[str, Any]:
        request = self._request(follow.call())
        request["headers"] = {**request["headers"], **follow.headers()}
        request["timeout"] = httpx.Timeout(self.timeout, read=follow.read_timeout())
        return request


def shown(progress: bool | None) -> bool:
    """Whether there is to be a progress bar; unasked only where a person sees it."""
    return sys.stderr.isatty() if progress is None else progress


def with_bar(steps: Stream, requests: Requests, progress: bool | None) -> Stream:
    """Rollouts as they end, under a bar if it is to be shown."""
    if not shown(progress):
        return steps
    from rollout.progress import expected, metered

    return metered(steps, expected(requests))


def batch_steps(
    request: BatchRequest,
    cursor: str,
    timeout: float | None,
    include: GroupInclude,
    every: bool,
    progress: bool | None,
    retry_for: float,
) -> Groups:
    """Groups of a batch as they are decided, under a bar if it is to be shown."""

    def make(seen: Seen | None) -> Groups:
        return run_batch(request, cursor, timeout, include, every, retry_for, seen)

    if not shown(progress):
        return make(None)
    from rollout.progress import metered_batch

    return metered_batch(make, request.groups)
