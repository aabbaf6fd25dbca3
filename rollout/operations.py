"""What the client can do, one generator each (see `rollout.calls`); a stream also yields rollouts."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, cast
from urllib.parse import quote

import httpx

from rollout.answers import fetch_rollouts
from rollout.calls import Call, Operation, Reply, Sleep, Step, fetch, fetch_json, send
from rollout.errors import WaitTimeout
from rollout.schema import (
    MAX_ROLLOUTS_PER_CALL,
    AckResponse,
    Backend,
    BackendRequest,
    CompletionPage,
    DrainRequest,
    HandlerInfo,
    Rollout,
    RolloutPage,
    RolloutRequest,
    State,
    SubmitResponse,
    Submitted,
    new_id,
)

log = logging.getLogger("rollout")

MAX_CALL_BYTES = 8 << 20
"""Body size at which a submission is split, well under the gateway's default limit of 32 MiB."""
LONG_POLL_S = 30.0
"""Seconds of one long-poll; the gateway allows up to 60 by default."""
PAGE = 50
"""Rollouts asked for at once from the stream of completions; a long trajectory is 1 MB of JSON."""
SILENCE_S = 60.0
"""Seconds without news of a wanted rollout after which some are asked for by id: the stream of
completions is trimmed, and a caller that fell behind it must not wait for ever."""
PROBED = 16
"""Rollouts asked for by id after such a silence."""

Include = Literal["trajectory", "arrays", "summary"]
"""What comes with a rollout. `arrays`: `rollout.arrays` alone; `rollout.trajectory` is None, for to make
Python lists of a long one takes longer than to fetch it."""
Requests = RolloutRequest | Iterable[RolloutRequest]
Stream = Generator[Step | Rollout, Any, None]
More = Callable[[], Stream]
"""Submits what there is room for, into the rollouts that a stream waits for."""


def _params(**values: Any) -> dict[str, Any]:
    return {
        key: value.value if isinstance(value, State) else value
        for key, value in values.items()
        if value is not None
    }


def asked(include: str) -> str:
    """The word for `include` that the gateway knows."""
    return "trajectory" if include == "arrays" else include


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


# ---------------------------------------------------------------------------------- submission


def with_ids(requests: Iterable[RolloutRequest]) -> list[RolloutRequest]:
    """The requests, each with an id, so that sending one twice creates nothing twice."""
    return [r if r.id else r.model_copy(update={"id": new_id()}) for r in requests]


def batches(requests: Sequence[RolloutRequest]) -> list[bytes]:
    """Bodies of as few calls as hold the requests, in order: at most 1,000 rollouts and 8 MiB each."""
    bodies: list[list[bytes]] = []
    count = size = 0
    for request in requests:
        part = request.model_dump_json(exclude_defaults=True).encode()
        too_many = count + request.n > MAX_ROLLOUTS_PER_CALL
        if not bodies or too_many or size + len(part) > MAX_CALL_BYTES:
            bodies.append([])
            count = size = 0
        bodies[-1].append(part)
        count += request.n
        size += len(part)
    return [b'{"requests":[' + b",".join(parts) + b"]}" for parts in bodies]


def submit(requests: Requests, retry_for: float) -> Operation[list[Submitted]]:
    wanted = [requests] if isinstance(requests, RolloutRequest) else list(requests)
    accepted: list[Submitted] = []
    for body in batches(with_ids(wanted)):
        answer = yield from fetch(Call("POST", "/v1/rollouts", body=body), SubmitResponse, retry_for)
        accepted += answer.rollouts
    return accepted


# ---------------------------------------------------------------------------------- reading


def get(rollout_id: str, wait: float | None, include: Include, retry_for: float) -> Operation[Rollout]:
    params = _params(wait=wait, include=asked(include))
    call = Call("GET", f"/v1/rollouts/{quote(rollout_id)}", params, wait=wait or 0.0, typed=True)
    return fetch_rollouts(call, Rollout, include, retry_for)


def wait(rollout_id: str, timeout: float | None, include: Include, retry_for: float) -> Operation[Rollout]:
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LONG_POLL_S if end is None else min(LONG_POLL_S, max(0.0, end - time.monotonic()))
        asked = time.monotonic()
        rollout = yield from get(rollout_id, round(left, 3), include, retry_for)
        if rollout.state.terminal:
            return rollout
        if end is not None and time.monotonic() >= end:
            raise WaitTimeout(f"rollout {rollout_id} is still {rollout.state.value} after {timeout:g} s")
        if time.monotonic() - asked < 0.05:  # something before the gateway does not hold long-polls
            yield Sleep(0.2)


def list_page(
    state: State | str | None,
    handler: str | None,
    group_id: str | None,
    tag: str | None,
    limit: int | None,
    cursor: str | None,
    retry_for: float,
) -> Operation[RolloutPage]:
    params = _params(state=state, handler=handler, group_id=group_id, tag=tag, limit=limit, cursor=cursor)
    return fetch(Call("GET", "/v1/rollouts", params), RolloutPage, retry_for)


def completions(
    cursor: str | None,
    wait: float | None,
    limit: int | None,
    tag: str | None,
    include: Include,
    retry_for: float,
) -> Operation[CompletionPage]:
    params = _params(cursor=cursor, wait=wait, limit=limit, tag=tag, include=asked(include))
    call = Call("GET", "/v1/completions", params, wait=wait or 0.0, typed=True)
    return fetch_rollouts(call, CompletionPage, include, retry_for)


def warn_of_gaps(expired: list[str], missed: bool) -> None:
    """Say what a reader that came too late does not get."""
    if missed:
        log.warning("the cursor is older than what is kept: some completions are past their retention")
    for rollout_id in expired:
        log.warning("rollout %s ended, and is past its retention", rollout_id)


def ack(ids: Iterable[str], retry_for: float) -> Operation[AckResponse]:
    wanted = list(ids)
    total = AckResponse(acknowledged=0, already_acknowledged=0, not_ended=0, unknown=0)
    for start in range(0, len(wanted), MAX_ROLLOUTS_PER_CALL):
        body = _dump({"ids": wanted[start : start + MAX_ROLLOUTS_PER_CALL]})
        answer = yield from fetch(Call("POST", "/v1/rollouts/ack", body=body), AckResponse, retry_for)
        for name in AckResponse.model_fields:
            setattr(total, name, getattr(total, name) + getattr(answer, name))
    return total


def now_cursor(retry_for: float) -> Operation[str]:
    """The cursor after everything that has ended so far."""
    page = yield from completions("$", None, 1, None, "summary", retry_for)
    return page.cursor


def _pages(
    cursor: str, tag: str | None, include: Include, end: float | None, retry_for: float
) -> Generator[Step | CompletionPage, Any, None]:
    """Pages of completions from `cursor` on, empty ones too, until `end` (monotonic seconds)."""
    while True:
        left = LONG_POLL_S if end is None else min(LONG_POLL_S, max(0.0, end - time.monotonic()))
        asked = time.monotonic()
        page = yield from completions(cursor, round(left, 3), PAGE, tag, include, retry_for)
        cursor = page.cursor
        warn_of_gaps(page.expired, page.missed)
        yield page
        if page.rollouts:
            continue
        if end is not None and time.monotonic() >= end:
            return
        if time.monotonic() - asked < 0.05:
            yield Sleep(0.2)


def stream(
    ids: Iterable[str] | None,
    tag: str | None,
    cursor: str | None,
    timeout: float | None,
    include: Include,
    retry_for: float,
    more: More | None = None,
) -> Stream:
    """Completions as they come. `more` is asked after each page; what it submits it enters into `ids`."""
    end = None if timeout is None else time.monotonic() + timeout
    # A dict keeps the order, so that the oldest are probed first.
    pending = dict.fromkeys(ids) if ids is not None and more is None else cast("dict[str, None] | None", ids)
    if pending is not None and not pending:
        return
    if cursor is None:
        if pending is None:
            cursor = "0"
        else:
            cursor = yield from now_cursor(retry_for)
            yield from _probe(pending, list(pending), include, retry_for)
    heard = time.monotonic()
    if pending is not None and not pending:
        return
    pages = _pages(cursor, tag, include, end, retry_for)
    answer: Any = None
    while True:
        try:
            step = pages.send(answer)
        except StopIteration:
            break
        if not isinstance(step, CompletionPage):
            answer = yield step
            continue
        answer = None
        for rollout in step.rollouts:
            if pending is None:
                yield rollout
            elif rollout.id in pending:
                del pending[rollout.id]
                heard = time.monotonic()
                yield rollout
        if pending is None:
            continue
        if more is not None:
            yield from more()
        if pending and time.monotonic() - heard > SILENCE_S:
            yield from _probe(pending, list(pending)[:PROBED], include, retry_for)
            heard = time.monotonic()
        if not pending:
            return
    if pending:
        raise WaitTimeout(
            f"{len(pending)} rollouts had not ended after {timeout:g} s, among them {next(iter(pending))}"
        )


def _probe(pending: dict[str, None], ids: list[str], include: Include, retry_for: float) -> Stream:
    """Ask for rollouts by id; yield those that have ended, and take them out of `pending`."""
    for rollout_id in ids:
        rollout = yield from get(rollout_id, None, include, retry_for)
        if rollout.state.terminal:
            del pending[rollout_id]
            yield rollout


def run(
    requests: Requests,
    timeout: float | None,
    include: Include,
    retry_for: float,
    announce: Callable[[list[Submitted]], None] | None = None,
    in_flight: int | None = None,
) -> Stream:
    """Submit, then stream in order of completion. `announce` is told what was accepted.

    The cursor is taken before the submission, so that nothing can end unseen.
    """
    source = iter([requests] if isinstance(requests, RolloutRequest) else requests)
    cursor = yield from now_cursor(retry_for)
    pending: dict[str, None] = {}

    def more() -> Stream:
        while True:
            room = math.inf if in_flight is None else in_flight - len(pending)
            wanted: list[RolloutRequest] = []
            # A group is submitted whole, so the last one may go a little beyond.
            while room > 0 and (request := next(source, None)) is not None:
                wanted.append(request)
                room -= request.n
            if not wanted:
                return
            accepted = yield from submit(wanted, retry_for)
            if announce:
                announce(accepted)
            pending.update(dict.fromkeys(s.id for s in accepted))
            # What a previous run with the same ids has finished is not in the stream any more.
            ended = [s.id for s in accepted if not s.created]
            yield from _probe(pending, ended, include, retry_for)
            if pending:
                return

    yield from more()
    yield from stream(pending, None, cursor, timeout, include, retry_for, more)


def collect(
    requests: Requests,
    timeout: float | None,
    include: Include,
    retry_for: float,
    show: Callable[[Stream], Stream] = lambda steps: steps,
) -> Operation[list[Rollout]]:
    """`run` to its end, the results in the order of submission. `show` may look at the steps."""
    order: list[str] = []
    found: dict[str, Rollout] = {}
    steps = show(
        run(requests, timeout, include, retry_for, lambda accepted: order.extend(s.id for s in accepted))
    )
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration:
            return [found[rollout_id] for rollout_id in order]
        if isinstance(step, Rollout):
            found[step.id] = step
            answer = None
        else:
            answer = yield step


# ---------------------------------------------------------------------------------- control


def cancel(rollout_id: str, retry_for: float) -> Operation[dict[str, Any]]:
    return fetch_json(Call("POST", f"/v1/rollouts/{quote(rollout_id)}/cancel"), retry_for)


def cancel_many(
    ids: Iterable[str] | None, group_id: str | None, tag: str | None, retry_for: float
) -> Operation[dict[str, int]]:
    chosen = _params(ids=None if ids is None else list(ids), group_id=group_id, tag=tag)
    if len(chosen) != 1:
        raise ValueError(
            f"cancel_many takes one of ids, group_id and tag; got {' and '.join(chosen) or 'none of them'}"
        )
    total = {"cancelled": 0, "already_ended": 0}
    wanted = chosen.get("ids")
    if wanted is None:
        bodies = [chosen]
    else:
        step = MAX_ROLLOUTS_PER_CALL
        bodies = [{"ids": wanted[i : i + step]} for i in range(0, len(wanted), step)]
    for body in bodies:
        answer = yield from fetch_json(Call("POST", "/v1/rollouts/cancel", body=_dump(body)), retry_for)
        for key in total:
            total[key] += int(answer.get(key, 0))
    return total


def handlers(retry_for: float) -> Operation[list[HandlerInfo]]:
    answer = yield from fetch_json(Call("GET", "/v1/handlers"), retry_for)
    return [HandlerInfo.model_validate(item) for item in answer["handlers"]]


def backends(retry_for: float) -> Operation[list[Backend]]:
    answer = yield from fetch_json(Call("GET", "/v1/backends"), retry_for)
    return [Backend.model_validate(item) for item in answer["backends"]]


def add_backend(request: BackendRequest, retry_for: float) -> Operation[Backend]:
    body = request.model_dump_json(exclude_none=True).encode()
    return fetch(Call("POST", "/v1/backends", body=body), Backend, retry_for)


def _backend_path(backend_id: str) -> str:
    return f"/v1/backends/{quote(backend_id, safe='')}"


def backend(backend_id: str, retry_for: float) -> Operation[Backend]:
    return fetch(Call("GET", _backend_path(backend_id)), Backend, retry_for)


def drain_backend(backend_id: str, drain: bool, retry_for: float) -> Operation[Backend]:
    body = DrainRequest(drain=drain).model_dump_json().encode()
    return fetch(Call("POST", f"{_backend_path(backend_id)}/drain", body=body), Backend, retry_for)


def remove_backend(backend_id: str, force: bool, retry_for: float) -> Operation[None]:
    params = {} if force else {"force": "false"}
    yield from send(Call("DELETE", _backend_path(backend_id), params), retry_for)


def status(retry_for: float) -> Operation[dict[str, Any]]:
    return fetch_json(Call("GET", "/v1/status"), retry_for)


def ready() -> Operation[dict[str, Any]]:
    """What `/ready` says, with `ready` added. 503 is an answer here, so nothing is tried again."""
    reply: Reply = yield Call("GET", "/ready")
    if not isinstance(reply, httpx.Response):
        return {"ready": False, "detail": f"the gateway does not answer: {reply!r}"}
    try:
        said = reply.json()
    except ValueError:
        said = {"detail": reply.text[:300]}
    return {**(said if isinstance(said, dict) else {"detail": said}), "ready": reply.status_code == 200}
