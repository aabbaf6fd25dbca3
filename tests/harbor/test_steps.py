"""Tasks with steps: one sandbox and one conversation, and a gate behind each step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.schema import Limits, Rollout, State
from rollout.trajectory import FinishReason
from tests.helpers.harbor_tasks import Play, bash, checks, refused, said
from tests.helpers.players import finish
from workers.agent.turns import RunDiverged
from workers.handlers.harbor import steps

TOML = """
{first}
artifacts = ["note.txt"]
[environment]
network_mode = "no-network"
workdir = "/work"
[[steps]]
name = "one"
{one}
[[steps]]
name = "two"
{two}
[[steps]]
name = "three"
"""
FINAL = 'multi_step_reward_strategy = "final"'
STEPS = {
    "steps/one/instruction.md": "Make 1.",
    "steps/one/tests/test.sh": checks("test -f 1"),
    "steps/one/solution/solve.sh": "touch 1",
    "steps/two/instruction.md": "Make 2.",
    "steps/two/workdir/setup.sh": "echo two >given.txt; nohup sleep 100 >/dev/null 2>&1 &",
    "steps/two/workdir/data/a.txt": "a",
    "steps/two/tests/test.sh": "cat data/a.txt given.txt; " + checks("test -f 2"),
    "steps/two/solution/solve.sh": "touch 2",
    "steps/three/instruction.md": "Make 3.",
    "steps/three/tests/test.sh": checks("test -f 3"),
    "steps/three/solution/solve.sh": "touch 3",
}


def played(play: Play, *actions: Any, first: str = "", one: str = "", two: str = "", **more: Any) -> Rollout:
    toml = TOML.format(first=first, one=one, two=two)
    files = {**STEPS, **more.pop("files", {})}
    return play(*actions, toml=toml, files=files, instruction=None, test=None, solution=None, **more)


def test_steps_share_a_sandbox_and_a_conversation_and_the_mean_is_the_score(play: Play):
    done = played(
        play,
        bash("touch 1; x=kept; echo note >note.txt"),
        finish("one is done"),
        bash("echo $PWD; ls -x; cat data/a.txt given.txt; pgrep sleep >/dev/null && echo runs"),
        "Two is too hard.",
        bash("touch 3"),
        one="min_reward = 1.0",
    )
    assert (done.state, done.finish_reason) == (State.COMPLETED, FinishReason.STOP)
    assert done.reward == 2 / 3
    steps = {"step.one": 1.0, "step.two": 0.0, "step.three": 1.0}
    assert done.reward_components == {"reward": 2 / 3, **steps}
    users = [message.text for message in done.trajectory.messages if message.role == "user"]
    assert [text.split("\n")[0] for text in users] == ["Make 1.", "Make 2.", "Make 3."]
    assert len(done.trajectory.chains) == 1
    assert said(done)[2] == "/work\n1  data  given.txt  note.txt  setup.sh\natwo\nruns"
    assert done.trajectory.artifacts["artifacts/one/note.txt"] == "note\n"
    assert done.trajectory.artifacts["verifier.log/two"].startswith("atwo")


def test_a_step_that_does_not_earn_enough_is_the_last_one(play: Play):
    done = played(play, bash("true"), "Enough.", bash("touch 2"), one="min_reward = 0.5")
    assert (done.reward, done.reward_components) == (0.0, {"reward": 0.0, "step.one": 0.0})
    assert done.metrics["steps_played"] == 1 and done.metrics["turns"] == 2
    both = {"steps/one/tests/test.sh": 'echo \'{"reward": 1, "style": 0.2}\' >/logs/verifier/reward.json'}
    done = played(
        play, "Done.", "Done.", one="min_reward = { style = 0.1 }", two="min_reward = 0.1", files=both
    )
    assert [name for name in done.reward_components if name.startswith("step.")] == ["step.one", "step.two"]
    assert done.reward_components["style"] == 0.1, "a step that does not write it counts as 0"
    done = played(play, "Done.", "Done.", one="min_reward = { style = 0.3 }", files=both)
    assert done.reward == 1.0 and done.metrics["steps_played"] == 1


def test_limits_end_all_steps_and_what_was_reached_is_scored(play: Play):
    slow = [bash("touch 1"), "Done.", bash("touch 2; sleep 20", timeout=20)]
    done = played(play, *slow, two="agent = { timeout_sec = 1.5 }")
    assert done.finish_reason is FinishReason.TIME_LIMIT and done.reward == 2 / 3
    assert done.metrics["steps_played"] == 2 and done.state is State.TIMED_OUT
    done = played(play, bash("touch 1"), "Done.", limits=Limits(max_turns=2))
    assert done.finish_reason is FinishReason.TURN_LIMIT and done.reward == 1 / 3
    cut_off = bash("touch 1; sleep 20", timeout=20)
    done = played(play, cut_off, limits=Limits(run_timeout_s=3))
    assert done.finish_reason is FinishReason.TIME_LIMIT and done.reward == 1 / 3
    assert done.reward_components["step.one"] == 1.0, "verified in EVAL"
    stuck = [bash("true")] * 5
    done = played(play, *stuck, limits=Limits(max_repeated_actions=3))
    assert done.finish_reason is FinishReason.REPEATED_ACTIONS and done.metrics["turns"] == 3


def test_an_agent_that_breaks_the_next_step_ends_there_and_has_earned_no_more(play: Play):
    health = "healthcheck = { command = 'test ! -e broken', interval_sec = 0.01, retries = 1 }"
    done = played(play, bash("touch 1 broken"), "Done.", two=health)
    assert done.reward == 1 / 3 and done.metrics["steps_played"] == 1
    last = played(play, bash("touch 1 broken"), "Done.", two=health, first=FINAL)
    assert last.reward == 0.0, "the last step is one that the agent kept from being played"
    assert any("steps end before two" in warning for warning in done.trajectory.warnings)
    done = played(play, bash("touch 1; cd /; mv /work /elsewhere; echo >/work"), "Done.")
    assert done.metrics["steps_played"] == 1 and done.error is None
    failing = {"steps/one/workdir/setup.sh": "echo no such thing; exit 3"}
    why = refused(played(play, files=failing))
    assert "setup.sh of step one" in why and "no such thing" in why


def test_a_lost_worker_begins_steps_anew():
    ctx = SimpleNamespace(spent_s=3.0)
    with pytest.raises(RunDiverged, match="begins anew"):
        asyncio.run(steps.play(ctx, None, None))  # type: ignore[arg-type]
