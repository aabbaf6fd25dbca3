"""`AsyncClient`: the HTTP API as coroutines. `Client` (`rollout.sync`) is derived from it."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

from rollout.async_batches import AsyncBatches, GroupInclude
from rollout.async_service import AsyncService
from rollout.calls import Requests, ids_by_calls, parts_of, requests_in, take, with_id
from rollout.errors import ApiError, Unavailable, WaitTimeout
from rollout.http import NOT_FOUND, Polls, present
from rollout.schema import (
    AckResponse,
    AgentAccess,
    BatchRequest,
    Blame,
    Checkpoint,
    CheckpointList,
    ForkPoint,
    ForkRequest,
    Group,
    ResultPage,
    Rollout,
    RolloutPage,
    State,
    SubmitResponse,
    Submitted,
)
from rollout.sse import EventReader, warn_of_gaps

if TYPE_CHECKING:
    from rollout.suites.bundles import Bundle
    from rollout.suites.harbor import HarborTask

B = TypeVar("B", bound=AbstractContextManager[Any])
PAGE = 50
"""Rollouts asked for at once from the stream of results; a long trajectory is 1 MB of JSON."""
SILENCE_S = 60.0
"""Seconds without news of a pending rollout after which some are asked for by id: the stream of results
is trimmed, and a caller that fell behind it must not wait for ever. Also the seconds without even a comment
after which a connection of server-sent events counts as dead; the gateway sends one every 15."""
PROBED = 16
"""Rollouts asked for by id after such a silence."""

Include = Literal["trajectory", "arrays", "summary"]
"""What comes with a rollout. `arrays`: `rollout.arrays` alone; `rollout.trajectory` is None, for to make
Python lists of a long one takes longer than to fetch it."""
# Named here because the method `list` hides the builtin inside the class.
Accepted = list[Submitted]
Results = list[Rollout]
Kept = list[Checkpoint]


class AsyncClient(AsyncService):
    """Client for asyncio. Close it, or use it as an asynchronous context manager.

    Every method may raise `ApiError` (the gateway refused; the message names the field) and
    `Unavailable` (no gateway for `retry_for` seconds).
    """

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def batches(self) -> AsyncBatches:
        """Groups of rollouts with dynamic sampling."""
        return AsyncBatches(self)

    # ------------------------------------------------------------------------------ rollouts

    async def submit(self, requests: Requests) -> Accepted:
        """Submit one request or many; the rollouts come back in the order of the requests.

        Requests without an id get one before they are sent, so a retry creates nothing twice. More
        than 1,000 rollouts are split into several calls, each of which is accepted or refused whole.
        """
        return [entry async for part in self._submitted(requests) for entry in part]

    async def _submitted(self, requests: Requests) -> AsyncIterator[Accepted]:
        """Submit call by call; yield what each has accepted, for a later one may be refused."""
        for part in await self.aside(lambda: parts_of(map(with_id, requests_in(requests)))):
            body = b'{"requests":[' + b",".join(text for _, text in part) + b"]}"
            yield (await self.fetch(SubmitResponse, "POST", "/v1/rollouts", body=body)).rollouts

    async def fork(self, rollout_id: str, turn: int, n: int = 1, **options: Any) -> Accepted:
        """Start `n` rollouts that go on from a turn of another one, which kept it (`checkpoints`).

        Args:
            options: Further fields of `ForkRequest`. Such requests can also be given to `submit`, `rollouts`
                and `run`, and be prompts of a batch.
        """
        point = ForkPoint(rollout=rollout_id, turn=turn, n=n)
        return await self.submit(ForkRequest(from_=point, **options))

    async def checkpoints(self, rollout_id: str) -> Kept:
        """The turns of a rollout from which others can go on, by turn; none where it was to keep none."""
        path = f"/v1/rollouts/{quote(rollout_id)}/checkpoints"
        return (await self.fetch(CheckpointList, "GET", path)).checkpoints

    async def put_bundle(self, bundle: Bundle | HarborTask) -> bool:
        """Send a task directory that rollouts name by its digest, if it is not there; whether it was sent.

        Raises:
            SuiteError: The directory cannot be read, or has changed.
        """
        path = f"/v1/bundles/{bundle.digest}"
        try:
            await self.send("HEAD", path)
            return False
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        content = getattr(bundle, "content", None) or (await self.aside(bundle.bundle)).content
        await self.send("PUT", path, body=content, media="application/gzip")
        return True

    async def get(
        self, rollout_id: str, wait: float | None = None, include: Include = "trajectory"
    ) -> Rollout:
        """One rollout. With `wait`, the answer comes when it has ended or after so many seconds."""
        path = f"/v1/rollouts/{quote(rollout_id)}"
        return await self.fetch_rollouts(Rollout, path, present(wait=wait), include, wait or 0.0)

    async def wait(
        self, rollout_id: str, timeout: float | None = None, include: Include = "trajectory"
    ) -> Rollout:
        """Wait until a rollout has ended.

        Raises:
            WaitTimeout: It has not after `timeout` seconds (None = no limit).
        """
        polls = Polls(timeout)
        while True:
            rollout = await self.get(rollout_id, polls.next(), include)
            if rollout.state.terminal:
                return rollout
            if polls.over:
                raise WaitTimeout(f"rollout {rollout_id} is still {rollout.state.value} after {timeout:g} s")
            await polls.pause()

    async def list(
        self,
        state: State | str | None = None,
        handler: str | None = None,
        group_id: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
        tenant: str | None = None,
        policy_version: str | None = None,
        blame: Blame | str | None = None,
        drop: bool | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
    ) -> RolloutPage:
        """One page of summaries that fit all the filters given; there are more while it has a cursor.

        Args:
            policy_version: One of those that sampled it.
            reward_min: None where `reward_max` is None, too: also those without a reward.
            tenant: Whose; `*` = everybody's, for keys with the scope `admin`. None = the key's own.
        """
        filters = present(state=state, handler=handler, group_id=group_id, tag=tag)
        filters |= present(limit=limit, cursor=cursor, tenant=tenant, policy_version=policy_version)
        filters |= present(blame=blame, drop=drop, reward_min=reward_min, reward_max=reward_max)
        return await self.fetch(RolloutPage, "GET", "/v1/rollouts", params=filters)

    async def page(self, of: str, group: bool = False) -> bytes:
        """A rollout or, with `group`, a group as one HTML file, which opens without a server."""
        kind = "groups" if group else "rollouts"
        return (await self.send("GET", f"/v1/{kind}/{quote(of)}/page")).content

    async def agent(self, rollout_id: str) -> AgentAccess:
        """Where a program that runs elsewhere finds the model, and its keys of the current attempt.

        `submit` tells those of the first one. The status of an `ApiError` is 410 once the rollout has ended,
        and 409 where another harness than `external` drives it.
        """
        return await self.fetch(AgentAccess, "GET", f"/v1/rollouts/{quote(rollout_id)}/agent")

    async def cancel(self, rollout_id: str) -> dict[str, Any]:
        """Cancel a rollout: `{"id", "state", "cancelling"}`. Harmless when it has ended."""
        return await self.fetch_json("POST", f"/v1/rollouts/{quote(rollout_id)}/cancel")

    async def cancel_many(
        self, ids: Iterable[str] | None = None, group_id: str | None = None, tag: str | None = None
    ) -> dict[str, Any]:
        """Cancel by exactly one of ids, group and tag.

        Returns:
            Counts: `{"cancelled", "already_ended", "unknown"}`; and `unknown_ids`, which ones of `ids` are
            unknown (none where an older gateway does not say).
        """
        chosen = present(ids=ids, group_id=group_id, tag=tag)
        if len(chosen) != 1:
            names = " and ".join(chosen) or "none of them"
            raise ValueError(f"cancel_many takes one of ids, group_id and tag; got {names}")
        selections = [chosen] if ids is None else await self.aside(partial(ids_by_calls, ids))
        total = {"cancelled": 0, "already_ended": 0, "unknown": 0, "unknown_ids": []}
        return await self._summed("/v1/rollouts/cancel", selections, total)

    async def ack(self, ids: Iterable[str]) -> AckResponse:
        """Say that results have arrived for good: their trajectories may be freed early."""
        selections = await self.aside(partial(ids_by_calls, ids))
        total = dict.fromkeys(AckResponse.model_fields, 0)
        return AckResponse(**await self._summed("/v1/rollouts/ack", selections, total))

    async def _summed(
        self, path: str, selections: Iterable[dict[str, Any]], total: dict[str, Any]
    ) -> dict[str, Any]:
        """Send a call for each selection of rollouts, and add what the answers say to `total`."""
        for selection in selections:
            answer = await self.fetch_json("POST", path, body=json.dumps(selection).encode())
            for name in total.keys() & answer.keys():
                total[name] += answer[name]
        return total

    # ------------------------------------------------------------------------------ results

    async def results(
        self,
        cursor: str | None = None,
        wait: float | None = None,
        limit: int | None = None,
        tag: str | None = None,
        include: Include = "trajectory",
        tenant: str | None = None,
    ) -> ResultPage:
        """What ended after `cursor`, in that order.

        Args:
            cursor: That of the page before; None or "0" = from the beginning, "$" = from now on.
            wait: Seconds that the gateway may wait for a first one.
            tenant: Whose; `*` = everybody's, for keys with the scope `admin`. None = the key's own.
        """
        params = present(cursor=cursor, wait=wait, limit=limit, tag=tag, tenant=tenant)
        return await self.fetch_rollouts(ResultPage, "/v1/results", params, include, wait or 0.0)

    completions = results

    async def stream(
        self,
        ids: Iterable[str] | None = None,
        tag: str | None = None,
        cursor: str | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> AsyncIterator[Rollout]:
        """Rollouts in order of completion, each of `ids` once, until all of them have ended.

        Without `ids` everything from `cursor` on, without end, or until `timeout` seconds are over.
        With `ids` and no `cursor`, those that have ended already are asked for one by one, first.

        Raises:
            WaitTimeout: Some of `ids` had not ended after `timeout` seconds.
        """
        polls = Polls(timeout)
        # A dict keeps the order, so that the oldest are probed first.
        pending = None if ids is None else await self.aside(lambda: dict.fromkeys(ids))
        if pending is not None and cursor is None and pending:
            cursor = await self._cursor_now()
            async for rollout in self._probe(pending, list(pending), include):
                yield rollout
        with _naming(pending):
            async for rollout in self._follow(pending, tag, cursor or "0", polls, include):
                yield rollout
        if pending:
            raise _not_ended(pending, timeout)

    async def rollouts(
        self,
        requests: Requests,
        in_flight: int | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
        progress: bool | None = None,
        announce: Callable[[Accepted], None] | None = None,
    ) -> AsyncIterator[Rollout]:
        """Submit, then yield in order of completion.

        Args:
            requests: May be an iterator over a dataset of any size, when `in_flight` is given.
            in_flight: Most rollouts submitted and not ended; None = all are submitted at once.
            timeout: Seconds after the first submission until `WaitTimeout` is raised; None = no limit.
            include: `arrays` gives NumPy arrays in place of lists.
            progress: A bar on standard error; None = where that is a terminal.
            announce: Told what was accepted, at each call.
        """
        source = await self.aside(lambda: iter(requests_in(requests)))
        # Taken before the submission, so that nothing can end unseen.
        cursor = await self._cursor_now()
        pending: dict[str, None] = {}

        async def submit_more() -> AsyncIterator[Rollout]:
            """Submit what there is room for; yield what of it had ended before."""
            while True:
                room = math.inf if in_flight is None else in_flight - len(pending)
                batch = await self.aside(partial(take, source, room))
                if not batch:
                    return
                ended: list[str] = []
                async for accepted in self._submitted(batch):
                    if announce:
                        await self.aside(partial(announce, accepted))
                    pending.update(dict.fromkeys(entry.id for entry in accepted))
                    # What a previous run with the same ids has finished is not in the stream any more.
                    ended += [entry.id for entry in accepted if not entry.created]
                async for rollout in self._probe(pending, ended, include):
                    yield rollout
                if pending:
                    return

        def follow() -> AsyncIterator[Rollout]:
            return self._follow(pending, None, cursor, Polls(timeout), include, submit_more)

        bar = partial(_bar, progress, lambda bars: bars.Meter(bars.expected(requests)))
        with await self.aside(bar) as meter, _naming(pending):
            for stage in (submit_more, follow):
                async for rollout in stage():
                    if meter:
                        meter.add(rollout)
                    yield rollout
        if pending:
            raise _not_ended(pending, timeout)

    async def run(
        self,
        requests: Requests,
        timeout: float | None = None,
        include: Include = "trajectory",
        progress: bool | None = None,
    ) -> Results:
        """Submit and wait for all; results in the order of submission.

        Args:
            progress: A bar on standard error; None = where that is a terminal.

        Raises:
            WaitTimeout: Some had not ended after `timeout` seconds. They go on; cancel them if
                they are no longer wanted.
        """
        requests = await self.aside(lambda: [*requests_in(requests)])
        accepted: Accepted = []
        results = {
            rollout.id: rollout
            async for rollout in self.rollouts(requests, None, timeout, include, progress, accepted.extend)
        }
        return [results[entry.id] for entry in accepted]

    async def _cursor_now(self) -> str:
        """The cursor after everything that has ended so far."""
        return (await self.results("$", limit=1, include="summary")).cursor

    async def _follow(
        self,
        pending: dict[str, None] | None,
        tag: str | None,
        cursor: str,
        polls: Polls,
        include: Include,
        submit_more: Callable[[], AsyncIterator[Rollout]] | None = None,
    ) -> AsyncIterator[Rollout]:
        """Results from `cursor` on, until the time is up or none is pending any more.

        Args:
            pending: Rollouts that are waited for, in order; those that end are taken out. None = all.
            submit_more: Asked after each page; what it submits it puts into `pending`.
        """
        heard = time.monotonic()
        while pending is None or pending:
            page = await self.results(cursor, polls.next(), PAGE, tag, include)
            cursor = page.cursor
            warn_of_gaps(page.expired, page.missed)
            for rollout in page.rollouts:
                if pending is None or rollout.id in pending:
                    if pending is not None:
                        del pending[rollout.id]
                    heard = time.monotonic()
                    yield rollout
            if submit_more:
                async for rollout in submit_more():
                    yield rollout
            if pending and time.monotonic() - heard > SILENCE_S:
                async for rollout in self._probe(pending, list(pending)[:PROBED], include):
                    yield rollout
                heard = time.monotonic()
            if not page.rollouts:
                if polls.over:
                    return
                await polls.pause()

    async def _probe(
        self, pending: dict[str, None], ids: Sequence[str], include: Include
    ) -> AsyncIterator[Rollout]:
        """Ask for rollouts by id; yield those that have ended, and take them out of `pending`."""
        for rollout_id in ids:
            rollout = await self.get(rollout_id, None, include)
            if rollout.state.terminal:
                del pending[rollout_id]
                yield rollout

    async def stream_results(
        self,
        cursor: str | None = None,
        tag: str | None = None,
        timeout: float | None = None,
        include: Include = "trajectory",
    ) -> AsyncIterator[Rollout]:
        """Whatever ends after `cursor`, as it ends, over one connection (server-sent events).

        Each comes at least once: keep `completion` of the last rollout dealt with, and pass it as `cursor`
        to go on after a restart. A connection that is cut is made again. Where the gateway gives no stream,
        because all are in use, long-polls do the same.

        Args:
            cursor: None or "0" = from the beginning, "$" = from now on.
            timeout: Seconds after which the iterator ends; None = never.
        """
        polls = Polls(timeout, SILENCE_S)
        events = EventReader(self, cursor or "0", tag, include, polls)
        async with contextlib.aclosing(aiter(events)) as results:
            async for rollout in results:
                yield rollout
        if not polls.over:
            async for rollout in self.stream(None, tag, events.cursor, polls.remaining, include):
                yield rollout

    stream_completions = stream_results

    # ------------------------------------------------------------------------------ batches

    async def batch(
        self,
        request: BatchRequest,
        cursor: str = "0",
        timeout: float | None = None,
        include: GroupInclude = "trajectory",
        every: bool = False,
        progress: bool | None = None,
    ) -> AsyncIterator[Group]:
        """Start a batch, and yield its groups as they are kept, until it has ended.

        A request with the id of a batch that was started before, by a trainer that died since, goes on with
        that one. Leaving the iterator does not end the batch: `batches.cancel` does, and the next one may
        take over what is under way (`carry_from`).

        Args:
            cursor: Of the page up to which its groups have been dealt with.
            timeout: Seconds after which the iterator ends, whether the batch has or not; None = no limit.
            include: `arrays` gives NumPy arrays in place of lists.
            every: Groups that were not kept too.
            progress: A bar on standard error; None = where that is a terminal.
        """
        batch = await self.batches.create(request)
        bar = partial(_bar, progress, lambda bars: bars.BatchMeter(request.groups))
        with await self.aside(bar) as meter:
            show = meter.show if meter else None
            async for group in self.batches.watch(batch.id, show, cursor, timeout, include, every):
                yield group


@contextlib.contextmanager
def _naming(pending: dict[str, None] | None) -> Iterator[None]:
    """Have the error of a gateway that stays away name what is waited for."""
    try:
        yield
    except Unavailable as error:
        raise Unavailable(str(error), pending or ()) from None


def _not_ended(pending: dict[str, None], timeout: float | None) -> WaitTimeout:
    return WaitTimeout(
        f"{len(pending)} rollouts had not ended after {timeout:g} s, among them {next(iter(pending))}"
    )


def _bar(progress: bool | None, make: Callable[[Any], B]) -> AbstractContextManager[B | None]:
    """What is made of the module of bars, if one is to be shown; unasked only where a person sees it."""
    if not (sys.stderr.isatty() if progress is None else progress):
        return nullcontext()
    from rollout import progress as bars  # takes 40 ms: rich

    return make(bars)
