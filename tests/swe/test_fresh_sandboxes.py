"""Sandboxes beside the rollout's own: started ahead, the attempt's, gone when they are not needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from rollout.schema import Blame, Rollout, RolloutRequest
from rollout.trajectory import FinishReason
from sandbox.host_client import HostClient
from sandbox.spec import Limits, SandboxSpec
from tests.helpers.sandboxes import own_sandboxes, require_apptainer
from workers.handlers.base import AgentHandler, AnyTask, EvalContext, Reward, RunContext
from workers.inprocess import InProcess
from workers.sandboxes import release_attempts

pytestmark = pytest.mark.apptainer
PATIENCE_S = 120.0
OTHER = Limits(memory_mb=777)
"""A kind of sandbox that nothing else here asks for."""

Body = Callable[[RunContext[AnyTask]], Awaitable[None]]


class Booting(AgentHandler[AnyTask]):
    """Does in RUN what a test wants."""

    name = "booting"
    uses_model = False
    uses_sandbox = True

    def __init__(self, body: Body) -> None:
        self._body = body

    async def run(self, ctx: RunContext[AnyTask]) -> FinishReason:
        await self._body(ctx)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        return Reward(1.0)


@pytest.fixture
def host() -> Iterator[HostClient]:
    require_apptainer()
    with own_sandboxes() as state:
        client = HostClient(state)
        yield client
        asyncio.run(client.stop())  # and what it keeps warm


def roll(body: Body, **limits: Any) -> Rollout:
    request = RolloutRequest(handler="booting", limits={"max_attempts": 1, **limits})
    return asyncio.run(InProcess(Booting(body)).run(request))[0]


def test_a_sandbox_warmed_in_run_is_what_a_later_one_gets(
    host: HostClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_SANDBOX_WARM", "1")
    claimed = []

    async def body(ctx: RunContext[AnyTask]) -> None:
        await ctx.sandboxes.warm(ctx, limits=OTHER)
        async with asyncio.timeout(PATIENCE_S):
            # One of the rollout's own kind, which the host keeps by itself, and the one asked for.
            while (await host.stats())["warm"] < 2:
                await asyncio.sleep(0.05)
        before = (await host.stats())["claimed_warm"]
        async with ctx.sandboxes.fresh(ctx, limits=OTHER) as box:
            assert (await box.bash("echo fresh")).output.strip() == "fresh"
            claimed.append((await host.stats())["claimed_warm"] - before)

    assert roll(body).reward == 1.0
    assert claimed == [1]


def test_a_fresh_sandbox_is_another_one_of_the_same_attempt_and_ends_with_its_block(host: HostClient) -> None:
    lists: list[list[dict[str, Any]]] = []

    async def body(ctx: RunContext[AnyTask]) -> None:
        await ctx.sandbox.write_file("/tmp/mine", "x")
        async with ctx.sandboxes.fresh(ctx) as box:
            assert (await box.stat("/tmp/mine")).kind is None
            lists.append(await host.list())
        lists.append(await host.list())

    rollout = roll(body)
    assert rollout.reward == 1.0, rollout.error
    assert [len(listed) for listed in lists] == [2, 1]
    assert {info["owner"] for info in lists[0]} == {f"{rollout.id}/1"}
    assert lists[1][0]["id"] == rollout.sandbox.id


def test_a_fresh_sandbox_ends_when_its_stage_is_cut_off(host: HostClient) -> None:
    async def body(ctx: RunContext[AnyTask]) -> None:
        async with ctx.sandboxes.fresh(ctx) as box:
            await box.bash("sleep 1000", timeout=1000)

    rollout = roll(body, run_timeout_s=3.0)
    assert rollout.finish_reason is FinishReason.TIME_LIMIT
    assert asyncio.run(host.list()) == []


def test_a_fresh_sandbox_that_dies_is_to_blame_and_the_sample_dropped(host: HostClient) -> None:
    async def body(ctx: RunContext[AnyTask]) -> None:
        own = [info["id"] for info in await host.list()]
        async with ctx.sandboxes.fresh(ctx) as box:
            (fresh,) = [info for info in await host.list() if info["id"] not in own]
            await host.release(fresh["id"])
            await box.bash("echo gone")

    rollout = roll(body)
    assert rollout.error.blame is Blame.SANDBOX
    assert (rollout.reward, rollout.drop) == (None, True)


def test_the_end_of_an_attempt_ends_sandboxes_of_attempts_before_it(host: HostClient) -> None:
    # Of an EVAL that is done again, as the next attempt, because its worker was lost.
    async def owners() -> list[str]:
        for owner in ("r/1", "r/2", "r/3", "other/1"):
            await host.start(SandboxSpec(owner=owner))
        await release_attempts(host, "r", 2)
        return sorted(info["owner"] for info in await host.list())

    assert asyncio.run(owners()) == ["other/1", "r/3"]
