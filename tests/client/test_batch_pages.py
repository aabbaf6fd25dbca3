"""How a client reads the groups of a batch: each once and in order, in few calls, several of them at once."""

from __future__ import annotations

import asyncio
from collections import deque

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.async_batches import AHEAD, LARGE
from rollout.batch import Batch, BatchState, Group, GroupPage
from rollout.client import AsyncClient
from services.gateway.routes import batches as route

BATCH = Batch(
    **{name: 0 for name, field in Batch.model_fields.items() if field.annotation is int},
    id="b",
    tenant="t",
    state=BatchState.RUNNING,
    closed=True,
    created_at=1.0,
)


class Gateway:
    """Answers as the route does; `says_last` as of a release that tells which page is the last one."""

    def __init__(self, groups: int, *, ended: bool = True, says_last: bool = True, late: deque[int] = ()):
        self.groups, self.ended, self.says_last, self.late = groups, ended, says_last, deque(late)
        self.calls: list[tuple[int, int]] = []
        self.under_way = self.most_under_way = 0

    async def answer(self, request: httpx.Request) -> httpx.Response:
        params = request.url.params
        cursor, limit = int(params["cursor"]), int(params["limit"])
        self.calls.append((cursor, limit))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(9):  # others may begin meanwhile
            await asyncio.sleep(0)
        self.under_way -= 1
        if cursor >= self.groups and float(params["wait"]):
            self.more()
        stop = min(self.groups, cursor + limit)
        looked_at = min(self.groups, cursor + max(limit * (1 + route.AHEAD), route.LOOKED_AT))
        state = BatchState.DONE if self.ended else BatchState.RUNNING
        page = GroupPage(
            groups=[Group(id=f"b.{k}", batch="b", verdict="kept", rollouts=[]) for k in range(cursor, stop)],
            cursor=str(stop),
            ahead=[str(at) for at in range(cursor + 2 * limit, looked_at, limit)],
            batch=BATCH.model_copy(update={"state": state}),
            last=self.says_last and self.ended and stop == self.groups,
        )
        return httpx.Response(200, text=page.model_dump_json())

    def more(self) -> None:
        """What has been decided while a call waited."""
        if self.late:
            self.groups += self.late.popleft()
        else:
            self.ended = True

    def read(self, include: str = "arrays", cursor: str = "0") -> tuple[list[str], Batch]:
        """Ids of the groups that the client reads, and the batch as it saw it last."""
        states = []

        async def follow() -> list[str]:
            client = AsyncClient("http://gateway", retry_for=0.0)
            transport = httpx.MockTransport(self.answer)
            client._http = httpx.AsyncClient(transport=transport, base_url=client.base_url)
            groups = client.batches.watch("b", states.append, cursor, None, include)
            return [group.id async for group in groups]

        ids = asyncio.run(follow())
        assert not self.under_way, "what was begun is waited for"
        return ids, states[-1]


@given(st.integers(0, 120), st.booleans(), st.sampled_from(["arrays", "trajectory", "summary", "verdicts"]))
@settings(max_examples=80, deadline=None)
def test_each_group_comes_once_and_in_order(groups, says_last, include):
    gateway = Gateway(groups, says_last=says_last)
    ids, batch = gateway.read(include)
    assert ids == [f"b.{k}" for k in range(groups)] and batch.state is BatchState.DONE
    assert gateway.most_under_way <= (AHEAD if include in LARGE else 1)
    full = sum(1 for cursor, limit in gateway.calls if cursor + limit <= groups)
    assert len(gateway.calls) <= full + 2 + (not says_last), "no page is asked for twice, and few in vain"


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(0, 20), st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_is_decided_meanwhile_comes_too(late, groups, says_last):
    gateway = Gateway(groups, ended=False, says_last=says_last, late=late)
    ids, batch = gateway.read()
    assert ids == [f"b.{k}" for k in range(groups + sum(late))] and batch.state is BatchState.DONE


def test_pages_are_short_at_first_and_asked_for_together():
    gateway = Gateway(40)
    gateway.read()
    assert gateway.calls == [(0, 2), (2, 4), (6, 8), (14, 8), (22, 8), (30, 8), (38, 8)]
    assert gateway.most_under_way == AHEAD


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_a_batch_that_has_ended_needs_no_call_that_finds_nothing(groups):
    gateway = Gateway(groups)
    gateway.read()
    assert all(cursor < groups for cursor, _ in gateway.calls)


def test_reading_goes_on_from_a_cursor():
    assert Gateway(9).read(cursor="7")[0] == ["b.7", "b.8"]
