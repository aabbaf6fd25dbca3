"""HTTP with a gateway: its address and key, one request with its retries, and what an answer holds."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import httpx
from pydantic import BaseModel, ValidationError

from rollout import account
from rollout.errors import AddressError, ApiError, ApiKeyError, RolloutError, Unavailable
from rollout.schema import Problem, Rollout

if TYPE_CHECKING:
    from rollout.arrays import Record

DEFAULT_URL = "http://127.0.0.1:8080"
URL_VARIABLE = "ROLLOUT_URL"
KEY_VARIABLE = "ROLLOUT_API_KEY"
FROM_VARIABLE = f"from {URL_VARIABLE}"
BACKOFF_S = (0.1, 5.0)
"""First and longest pause between tries of one request."""
RETRIED_STATUS = frozenset({502, 503, 504})
"""503 is the gateway's own; the others come from a proxy before it."""
NOT_FOUND, CONFLICT = 404, 409
OVER_QUOTA = 429
"""A request is sent again when the gateway says, by Retry-After, when that may help."""
LONG_POLL_S = 30.0
"""Seconds of one long-poll; the gateway allows up to 60 by default."""
TYPED = "application/msgpack, application/json;q=0.5"

Wire = Literal["auto", "json", "msgpack"]
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


# ---------------------------------------------------------------------------------- address and key


class Key(httpx.Auth):
    """Puts the key into the header of requests to the one address that it belongs to, and of no others."""

    def __init__(self, url: str, key: str, owned: account.Owned | None) -> None:
        """
        Args:
            owned: Looks at who listens at the address; None for an address and a key that the caller gave.
        """
        self._origin = account.origin(url)
        self._header = f"Bearer {key}"
        self.owned = owned

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if account.origin(str(request.url)) == self._origin:
            if self.owned:
                self.owned.require()
            request.headers["Authorization"] = self._header
        yield request


def default_address() -> tuple[str, str]:
    """The gateway that is meant where none is named, and how it was found.

    Raises:
        AddressError: None was found, and another user's program listens where one is looked for last.
    """
    if url := os.environ.get(URL_VARIABLE):
        return url, FROM_VARIABLE
    if service := account.find():
        return service
    if users := account.other_owners(account.origin(DEFAULT_URL)):
        raise AddressError(
            f"no service of this account was found, and user {min(users)} listens at {DEFAULT_URL}: "
            f"`rollout up` starts yours; --url or {URL_VARIABLE} names another one"
        )
    return DEFAULT_URL, "no service of this account was found: `rollout up` starts one"


def authorization(url: str, api_key: str | None, ours: bool) -> Key | None:
    """What authorizes requests to `url`: this key, the environment's, or that of our own service there.

    Args:
        ours: Whether nobody named the address, so that a service of this account is meant.

    Raises:
        ApiKeyError: No header can carry the key, or its file is not ours alone.
    """
    key = (os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key).strip()
    if not key and api_key is None and (own_key := account.key_for(url)):
        key, ours = own_key, True
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ApiKeyError(
            "the API key has characters that no key has; give what `rollout keys create` printed, as api_key "
            f"or {KEY_VARIABLE}"
        )
    return Key(url, key, account.Owned(url) if ours else None)


def without_password(url: str) -> str:
    """An address as it is shown: without the user and password of a proxy before the gateway."""
    return re.sub(r"//[^/]*@", "//", url)


# ---------------------------------------------------------------------------------- requests


class Gateway:
    """The way to a gateway: its address, the key for it, connections, and a request with its retries."""

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
            base_url: The gateway; None = `$ROLLOUT_URL`, else that of the service of this Slurm run, of this
                checkout, or that this account started last (`rollout.account`), else http://127.0.0.1:8080.
            timeout: Seconds to wait for one answer, beside what a long-poll waits by itself.
            retry_for: Seconds during which a request is sent again after a connection error, a 503, or a 429
                (over quota) that says when to.
            api_key: None = `$ROLLOUT_API_KEY`, else that of this account's own service at that address. It is
                sent to no other address.
            wire: How trajectories come: `msgpack` as typed arrays, which `auto` means too, or `json`. A
                gateway that knows only JSON sends that in any case.

        Raises:
            AddressError: The address is not an http(s) URL; or none can be found (`default_address`).
            ApiKeyError: No header can carry the key, or its file is not ours alone.
        """
        self.found = None if base_url else default_address()
        """Where the caller named no address: the gateway's, and how it was found."""
        self.base_url = (base_url or self.found[0]).rstrip("/")
        self.timeout = timeout
        self.retry_for = retry_for
        try:
            scheme, host, port = account.origin(self.base_url)
        except ValueError:
            scheme, host, port = "", "", 0
        if scheme not in ("http", "https") or not host or not port:
            raise AddressError(
                f"gateway address {self.base_url!r} is not an http(s) URL; give one like {DEFAULT_URL} "
                f"as base_url, --url or {URL_VARIABLE}"
            )
        if wire not in get_args(Wire):
            raise ValueError(f"wire = {wire!r} is not one of {', '.join(get_args(Wire))}")
        self._typed = wire != "json"
        self._local = host in ("localhost", "::1") or host.startswith("127.")
        ours = self.found is not None and self.found[1] != FROM_VARIABLE
        self.auth = authorization(self.base_url, api_key, ours)
        """What authorizes requests; None = nothing does."""
        _ = self._http  # made here and not by the first call: what is wrong in the environment is told here

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        # A proxy of the environment cannot reach this machine's own loopback.
        direct = self._local or (self.auth is not None and self.auth.owned is not None)
        return httpx.AsyncClient(trust_env=not direct, auth=self.auth)

    def forget_connections(self) -> None:
        """Begin with none. Those there were stay open: in a forked child they are the parent's."""
        self.__dict__.pop("_http", None)

    async def aside(self, function: Callable[[], T]) -> T:
        """Do what is the caller's: read what it gave, or call what it wants to be told."""
        return function()

    async def close(self) -> None:
        """Close the connections, if there are any."""
        if "_http" in self.__dict__:
            await self._http.aclose()

    def _headers(self, typed: bool) -> dict[str, str]:
        headers = {"accept": TYPED} if typed and self._typed else {}
        if self._local or headers:
            # To compress arrays, or anything for this machine's own loopback, takes longer than it saves.
            headers["accept-encoding"] = "identity"
        return headers

    def open_stream(
        self, path: str, params: dict[str, Any], headers: dict[str, str], silence_s: float
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Ask once for an answer that comes bit by bit, with no longer silence in between."""
        timeout = httpx.Timeout(self.timeout, read=silence_s)
        headers = self._headers(typed=False) | headers
        return self._http.stream("GET", self.base_url + path, params=params, headers=headers, timeout=timeout)

    async def _send_once(
        self,
        method: str,
        path: str,
        params: dict[str, Any] | None = None,
        body: BaseModel | bytes | None = None,
        wait: float = 0.0,
        typed: bool = False,
        media: str = "application/json",
    ) -> httpx.Response:
        headers = self._headers(typed)
        if isinstance(body, BaseModel):
            body = body.model_dump_json(exclude_defaults=True).encode()
        if body is not None:
            headers["content-type"] = media
        timeout = httpx.Timeout(self.timeout, read=self.timeout + wait)
        response = await self._http.request(
            method, self.base_url + path, params=params, content=body, headers=headers, timeout=timeout
        )
        # It refers back to the response: its body would stay until the next full garbage collection.
        del response.stream
        return response

    async def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request, again after connection errors, 503 and 429, for at most `retry_for` seconds.

        Every request of this API is idempotent, so that it may be sent again.

        Args:
            request: `params`; `body`, a model or bytes, of JSON or else of `media`; `wait`, the seconds for
                which the gateway may hold the answer back; `typed`, whether it may come as msgpack with typed
                arrays.

        Raises:
            ApiError: Any other answer that is not a success; also 429 when `retry_for` is over.
            Unavailable: `retry_for` is over.
        """
        end, tries = time.monotonic() + self.retry_for, 0
        while True:
            tries += 1
            refusal, retry_after = None, None
            try:
                response = await self._send_once(method, path, **request)
                if response.is_success:
                    return response
                retry_after = response.headers.get("retry-after")
                refusal = ApiError(response.status_code, problem_of(response), f"{method} {path}")
                reason, remedy = refusal.reason, "`rollout status` says more"
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                remedy = (
                    "Is the gateway up? `rollout up` starts one, `rollout slurm status` shows one on Slurm; "
                    "ROLLOUT_URL or --url names another one"
                )
            pause = backoff_s(tries - 1, retry_after)
            late = time.monotonic() + pause > end
            if refusal and refusal.status not in RETRIED_STATUS:
                if late or refusal.status != OVER_QUOTA or not retry_after:
                    raise refusal
            elif late:
                raise Unavailable(
                    f"{method} {without_password(self.base_url)}{path} failed for {self.retry_for:g} s "
                    f"({tries} tries, the last: {reason}). {remedy}"
                )
            await asyncio.sleep(pause)

    async def fetch(self, model: type[M], method: str, path: str, **request: Any) -> M:
        """Send a request, and read its answer as `model`. See `send`."""
        return model.model_validate_json((await self.send(method, path, **request)).content)

    async def fetch_json(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Send a request, and read its answer as a JSON object. See `send`."""
        return (await self.send(method, path, **request)).json()

    async def fetch_rollouts(
        self, model: type[M], path: str, params: dict[str, Any], include: str, wait: float = 0.0
    ) -> M:
        """Ask for a model with rollouts in it.

        Args:
            include: `arrays` leaves trajectories out and gives their arrays alone.
            wait: See `send`.

        Raises:
            RolloutError: The answer is damaged, or a newer release wrote it.
        """
        params = {**params, "include": include_of(include)}
        response = await self.send("GET", path, params=params, wait=wait, typed=True)
        return read_rollouts(response, model, arrays_only=include == "arrays")


class Polls:
    """Long-polls up to a time limit: how long each may take, and when it is over."""

    def __init__(self, timeout: float | None, longest: float | None = None) -> None:
        """
        Args:
            timeout: Seconds from now on; None = no limit.
            longest: Seconds of one long-poll; None = `LONG_POLL_S`.
        """
        self._end = None if timeout is None else time.monotonic() + timeout
        self._longest = LONG_POLL_S if longest is None else longest
        self._began = 0.0

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() >= self._end

    @property
    def remaining(self) -> float | None:
        """Seconds until then; None = no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def next(self) -> float:
        """Seconds that the next long-poll may take, which begins now."""
        self._began = time.monotonic()
        remaining = self.remaining
        return round(self._longest if remaining is None else min(self._longest, remaining), 3)

    async def pause(self) -> None:
        """Wait a little where something before the gateway does not hold long-polls."""
        if time.monotonic() - self._began < 0.05:
            await asyncio.sleep(0.2)


def present(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def backoff_s(attempt: int, retry_after: str | None = None) -> float:
    """Seconds before the next try; `attempt` counts from 0."""
    if retry_after and retry_after.isdigit():
        return min(float(retry_after), 60.0)
    first, longest = BACKOFF_S
    # Jitter: many trainers' ranks that lost the same gateway must not come back in step.
    return min(longest, first * 2**attempt) * random.uniform(0.5, 1.0)


# ---------------------------------------------------------------------------------- answers


def problem_of(response: httpx.Response) -> Problem:
    """What a refusal says."""
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:  # a proxy's page, or something that is no gateway at all
        title, text = response.reason_phrase or "error", response.text.strip()
        return Problem(title=title, status=response.status_code, detail=text[:300])


def include_of(include: str) -> str:
    """The word for `include` that the gateway knows."""
    return "trajectory" if include == "arrays" else include


def read_rollouts(response: httpx.Response, model: type[M], *, arrays_only: bool) -> M:
    """The model of an answer that came as JSON or as typed arrays (`rollout.arrays`)."""
    text: str | bytes = response.content
    records: dict[str, Record] = {}
    if response.headers.get("content-type", "").startswith("application/msgpack"):
        from rollout.arrays import WireError, unpack_answer

        try:
            text, records = unpack_answer(response.content)
        except WireError as error:
            raise RolloutError(
                f"{response.url}: {error}; Client(wire='json') asks for JSON instead"
            ) from error
    answer = model.model_validate_json(text)
    for part in getattr(answer, "groups", [answer]):  # a page of groups, a page of rollouts, or one
        for rollout in getattr(part, "rollouts", [part]):
            if rollout.id in records:
                _attach(rollout, records[rollout.id], arrays_only=arrays_only)
            elif arrays_only:
                leave_arrays(rollout)
    return answer


def _attach(rollout: Rollout, record: Record, *, arrays_only: bool) -> None:
    from rollout.arrays import Arrays

    spoke = bool(record.chains) and record.chains[-1].own
    if spoke:
        # Where the cached property looks for it: these arrays lie in the bytes of the answer.
        rollout.__dict__["arrays"] = Arrays(record)
    if not (arrays_only and spoke):
        rollout.trajectory = record.trajectory()


def leave_arrays(rollout: Rollout) -> None:
    """Turn the trajectory of a rollout into its arrays; one without chains stays as it is."""
    if rollout.trajectory is not None and rollout.trajectory.own:
        _ = rollout.arrays
        rollout.trajectory = None
