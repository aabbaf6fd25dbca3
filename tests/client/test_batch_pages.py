"""How a client reads the groups of a batch: each once and in order, in few calls, several of them at once."""

from __future__ import annotations

from collections import deque

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import batch_operations as op
from rollout.batch import Batch, BatchState, Group, GroupPage
from rollout.calls import Begin, Call, Join, Sleep
from services.gateway.routes.batches import AHEAD, LOOKED_AT

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
        self.begun = self.most_begun = 0

    def answer(self, call: Call) -> httpx.Response:
        cursor, limit = int(call.params["cursor"]), call.params["limit"]
        self.calls.append((cursor, limit))
        if cursor >= self.groups and call.params["wait"]:
            self.more()
        stop = min(self.groups, cursor + limit)
        seen = min(self.groups, cursor + max(limit * (1 + AHEAD), LOOKED_AT))
        state = BatchState.DONE if self.ended else BatchState.RUNNING
        page = GroupPage(
            groups=[Group(id=f"b.{k}", batch="b", verdict="kept", rollouts=[]) for k in range(cursor, stop)],
            cursor=str(stop),
            ahead=[str(at) for at in range(cursor + 2 * limit, seen, limit)],
            batch=BATCH.model_copy(update={"state": state}),
            last=self.says_last and self.ended and stop == self.groups,
        )
        request = httpx.Request("GET", "http://gateway")
        return httpx.Response(200, text=page.model_dump_json(), request=request)

    def more(self) -> None:
        """What has been decided while a call waited."""
        if self.late:
            self.groups += self.late.popleft()
        else:
            self.ended = True

    def read(self, include: str = "arrays", cursor: str = "0") -> tuple[list[str], Batch]:
        stream = op.stream("b", cursor, None, include, False, 1.0)
        found, sent = [], None
        while True:
            try:
                step = stream.send(sent)
            except StopIteration as stop:
                assert not self.begun, "what was begun is not waited for"
                return found, stop.value
            sent = None
            match step:
                case Call():
                    sent = self.answer(step)
                case Begin():
                    self.begun += 1
                    self.most_begun = max(self.most_begun, self.begun)
                    sent = self.answer(step.call)
                case Join():
                    self.begun -= 1
                    sent = step.begun
                case Sleep():
                    pass
                case _:
                    found.append(step.id)


@given(st.integers(0, 120), st.booleans(), st.sampled_from(["arrays", "trajectory", "summary", "verdicts"]))
@settings(max_examples=80, deadline=None)
def test_each_group_comes_once_and_in_order(groups, says_last, include):
    gateway = Gateway(groups, says_last=says_last)
    found, batch = gateway.read(include)
    assert found == [f"b.{k}" for k in range(groups)] and batch.state is BatchState.DONE
    assert gateway.most_begun <= (op.AHEAD if include in op.LARGE else 0)
    full = sum(1 for cursor, limit in gateway.calls if cursor + limit <= groups)
    assert len(gateway.calls) <= full + 2 + (not says_last), "no page is asked for twice, and few in vain"


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(0, 20), st.booleans())
@settings(max_examples=80, deadline=None)
def test_what_is_decided_meanwhile_comes_too(late, groups, says_last):
    gateway = Gateway(groups, ended=False, says_last=says_last, late=late)
    found, batch = gateway.read()
    assert found == [f"b.{k}" for k in range(groups + sum(late))] and batch.state is BatchState.DONE


def test_pages_are_short_at_first_and_asked_for_together():
    gateway = Gateway(40)
    gateway.read()
    assert gateway.calls == [(0, 2), (2, 4), (6, 8), (14, 8), (22, 8), (30, 8), (38, 8)]
    assert gateway.most_begun == op.AHEAD


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_a_batch_that_has_ended_needs_no_call_that_finds_nothing(groups):
    gateway = Gateway(groups)
    gateway.read()
    assert all(cursor < groups for cursor, _ in gateway.calls)


def test_reading_goes_on_from_a_cursor():
    assert Gateway(9).read(cursor="7")[0] == ["b.7", "b.8"]
