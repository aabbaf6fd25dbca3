"""Checkpoints beside the calls of the model, and what a fork makes of the turns that it shares."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from rollout.schema import Origin, RolloutRequest, SandboxRecord, Stage
from rollout.trajectory import Chain, FinishReason, Message, Segment, Trajectory
from sandbox.errors import SandboxError
from sandbox.spec import SnapshotInfo
from services.state.checkpoints import Kept, given
from tests.helpers.scripted import Look, Said, ScriptedRouter
from tests.unit.test_turn_log import ASKED, call, said
from tests.unit.test_turn_log import Kept as Log
from workers import checkpoints, forks
from workers.agent.loop import AgentLoop
from workers.agent.tools import Finish, Observation
from workers.agent.turns import RunDiverged
from workers.errors import TaskError
from workers.handlers.harbor import handler as harbor
from workers.handlers.harbor import network as network_of_tasks

BOX = SandboxRecord(id="box", runtime="r", image="i", node="n", isolation_missing=[])


class Host:
    """Takes snapshots as a test wants it."""

    def __init__(self, takes_s: float = 0.0, error: Exception | None = None) -> None:
        self.takes_s, self.error = takes_s, error
        self.names: list[str] = []
        self.given_up = 0

    async def snapshot(self, sandbox_id: str, name: str, *, owner: str = "") -> SnapshotInfo:
        assert (sandbox_id, owner) == ("box", "r1")
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.error:
            raise self.error
        self.names.append(name)
        return SnapshotInfo(name, 10, 2, "copy", 0.1)


class Store:
    def __init__(self, *kept: Kept) -> None:
        self.kept = {one.turn: one for one in kept}

    def put(self, rollout_id: str, kept: Kept, fence: int) -> bool:
        self.kept[kept.turn] = kept
        return True

    def list(self, rollout_id: str) -> list[Kept]:
        return list(self.kept.values())


class Working(Look):
    """Does something in the sandbox, where its text says so."""

    log: Any = None

    async def call(self, args, ctx):
        if args.text.startswith("do"):
            self.log.number()
        return Observation(args.text)


def play(
    answers: list[Said],
    *,
    asks: str = "every_turn",
    host: Host | None = None,
    store: Store | None = None,
    log: Log | None = None,
    box: SandboxRecord | None = BOX,
    router: type[ScriptedRouter] = ScriptedRouter,
    **claim: Any,
):
    """A loop with checkpoints to its end: what was kept, what was noted, the host, the agent, its log."""
    request = RolloutRequest(handler="s", checkpoints=asks, origin=claim.pop("origin", None))
    host, store, notes = host or Host(), store or Store(), []
    fields = {"rollout_id": "r1", "attempt": 1, "fence": 3, "resumed": 0, "index": 0, "group_id": "g"}
    run = SimpleNamespace(
        claim=SimpleNamespace(request=request, sandbox=box, **fields | claim),
        handler=SimpleNamespace(repeats={Stage.RUN}),
        log=structlog.get_logger("test"),
        services=SimpleNamespace(
            host=host,
            checkpoints=store,
            settings=SimpleNamespace(node="n"),
            note=lambda *args: notes.append(args[-1]),
        ),
    )
    log, tool = (log or Log()).log(), Working()
    tool.log = log

    async def playing():
        agent = AgentLoop(request, 0, router(answers), (tool, Finish()), False, log)
        agent.around_call = checkpoints.around_calls(run, agent, log)
        await agent.run(ASKED)
        return agent

    agent = asyncio.run(playing())
    return store.kept, notes, host, agent, log


TURNS = [said(call("do a")), said(call("b")), said("so" + call("do c")), said("2")]


def test_each_turn_is_kept_before_the_next_one_and_files_that_did_not_change_are_kept_once():
    kept, notes, host, agent, _ = play(TURNS)
    assert host.names == ["r1.1.3.1", "r1.1.3.3"] and not notes
    assert [(one.turn, one.way, one.snapshot, one.operations) for one in kept.values()] == [
        (1, "copy", "r1.1.3.1", 1),
        (2, "same", "r1.1.3.1", 1),
        (3, "copy", "r1.1.3.3", 2),
    ]
    # Of each turn: what was sampled, answered and appended, behind the prompt.
    assert [one.entries for one in kept.values()] == [4, 7, 10]
    assert [(one.counts["model_calls"], one.counts["tool_calls"]) for one in kept.values()] == [
        (turn, turn) for turn in (1, 2, 3)
    ]
    assert agent.trajectory.turns == 4


@pytest.mark.parametrize(("asks", "turns"), [("never", []), ("on_tools", [2]), ("every_turn", [1, 2])])
def test_only_turns_that_were_asked_for_are_kept(asks, turns):
    answers = [said("<tool_call>no</tool_call>"), said(call("do a")), said("2")]
    kept, _, host, _, _ = play(answers, asks=asks)
    assert list(kept) == turns and len(host.names) == len(turns)
    kept, _, host, _, _ = play(answers, asks=asks, box=None)
    assert [(one.turn, one.way, one.node) for one in kept.values()] == [
        (turn, "none", None) for turn in turns
    ]
    assert not host.names


def test_files_that_cannot_be_kept_are_told_once_and_harm_nobody():
    kept, notes, _, agent, _ = play(TURNS, host=Host(error=SandboxError("disk full")))
    assert [(one.turn, one.error, one.snapshot) for one in kept.values()] == [
        (turn, "disk full", None) for turn in (1, 2, 3)
    ]
    assert notes == ["no checkpoint of turn 1: disk full"] and agent.trajectory.turns == 4


class Broken(ScriptedRouter):
    """The third call breaks off."""

    async def generate(self, request, timeout_s):
        if len(self.prompts) == 2:
            await asyncio.sleep(0.01)
            raise RuntimeError("the call broke off")
        return await super().generate(request, timeout_s)


def test_a_call_that_breaks_off_gives_the_snapshot_up_and_leaves_no_entry():
    store, host = Store(), Host(takes_s=0.05)
    with pytest.raises(RuntimeError, match="broke off"):
        play([*TURNS[:1], said(call("do b")), *TURNS[2:]], store=store, host=host, router=Broken)
    assert list(store.kept) == [1] and host.given_up == 1


def test_what_is_not_hidden_behind_a_call_is_not_the_agents_time():
    log = Log()
    began = time.monotonic()
    *_, written = play(TURNS, log=log, host=Host(takes_s=0.4))
    assert time.monotonic() - began > 0.8, "both were waited for"
    assert written.spent_before_s < -0.75


def test_who_takes_over_keeps_no_turn_twice_and_a_fork_none_that_it_shares():
    log = Log()
    kept, _, _, _, _ = play(TURNS, log=log)
    stored = log.stored[: kept[2].entries]
    again, _, host, _, _ = play(TURNS[2:], log=Log(stored), store=Store(kept[1], kept[2]), resumed=1)
    assert list(again) == [1, 2, 3] and host.names == ["r1.1.3.3"]
    forked, _, host, _, _ = play(TURNS[2:], log=Log(stored), origin=Origin(rollout="r0", turn=2))
    assert list(forked) == [3] and host.names == ["r1.1.3.3"]


def test_seeds_of_forks_differ_from_those_of_what_they_left_and_of_each_other():
    def place(turns=3, origin=None, **fields):
        claim = SimpleNamespace(index=0, request=SimpleNamespace(origin=origin), **fields)
        return forks.place(claim, SimpleNamespace(turns=turns))

    first, second = Origin(rollout="r0", turn=2), Origin(rollout="r0", turn=3)
    places = [
        place(group_id="g"),
        place(group_id="g", origin=first),
        place(group_id="h", origin=first),
        place(group_id="g", origin=second),
    ]
    assert places[0] == 0 and len(set(places)) == 4
    with pytest.raises(RunDiverged, match="lost some of the 2 turns"):
        place(turns=1, group_id="g", origin=first)


def sampled(call_id: str, *ids: int, version: str = "v1") -> Segment:
    return Segment(
        role="assistant",
        token_ids=list(ids),
        sampled=True,
        logprobs=[-1.0] * len(ids),
        policy_version=version,
        call_id=call_id,
        finish_reason="stop",
        messages=[Message(role="assistant", content=call_id)],
    )


def told(*ids: int) -> Segment:
    return Segment(role="user", token_ids=list(ids), messages=[Message(role="user", content="told")])


def test_what_is_shared_is_given_and_only_the_rest_is_to_be_learned_from():
    judged = Chain(segments=[told(9), sampled("j", 8)], role="judge", policy="judge")
    first = Chain(segments=[told(1, 2), sampled("a", 3, 4), told(5), sampled("b", 6, version="v2")])
    second = Chain(
        segments=[told(1), sampled("c", 2, 3), sampled("c", 4, version="v2"), told(5), sampled("d", 6)]
    )
    trajectory = Trajectory(chains=[judged, first, second])
    messages = trajectory.messages
    branch = given(trajectory, Origin(rollout="r0", turn=3))
    assert branch == trajectory.branch
    assert branch.model_dump() == {
        "rollout": "r0",
        "turn": 3,
        "tokens": 11,
        "sampled_tokens": 6,
        "policy_versions": ["v1", "v2"],
    }
    assert (trajectory.turns, trajectory.sampled_tokens) == (1, 1) and trajectory.messages == messages
    assert trajectory.chain.loss_mask == [1] and trajectory.chain.prompt_ids == [1, 2, 3, 4, 5]
    assert (first.teaches, second.teaches, judged.segments[1].sampled) == (False, True, True)
    Trajectory.model_validate(trajectory.model_dump())


@pytest.mark.parametrize(("reason", "what"), [("turn_limit", "1 shared"), ("time_limit", "run_timeout_s")])
def test_a_fork_that_samples_nothing_says_why(reason, what):
    agent = SimpleNamespace(
        trajectory=Trajectory(chains=[Chain(segments=[told(1), sampled("a", 2)])]),
        metrics={"model_calls": 1, "shared_model_calls": 1, "turns_of_the_handler": 4},
    )
    error = forks.tell_shared(Origin(rollout="r0", turn=1), agent, FinishReason(reason))
    assert what in str(error) and agent.trajectory.sampled_tokens == 0
    assert agent.metrics == {
        "model_calls": 0,
        "turns_of_the_handler": 4,
        "shared_turns": 1,
        "shared_tokens": 1,
    }


@pytest.mark.parametrize(
    ("steps", "network", "why"),
    [(1, "no-network", None), (2, "no-network", "steps"), (1, "public", "way out")],
)
def test_of_tasks_with_directories_only_what_is_files_is_forked(monkeypatch, steps, network, why):
    monkeypatch.setattr(network_of_tasks, "check", lambda mode, hosts: None)
    directory = SimpleNamespace(steps=[SimpleNamespace(agent=None)] * steps)
    trial = SimpleNamespace(directory=directory, network=lambda agent: (network, ()))
    if why is None:
        harbor._check_fork(trial)
        return
    with pytest.raises(TaskError, match=why):
        harbor._check_fork(trial)
