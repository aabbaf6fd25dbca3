"""Environments behind servers: NeMo Gym's own resource server, of both releases, and OpenEnv's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from rollout.schema import State
from services.settings import Settings, SettingsError
from tests.helpers.gym_collector import HOME, RELEASES
from tests.helpers.stack import ROOT, free_port, wait_until
from workers.agent.replay import Action, Call
from workers.handlers.environments.nemo_gym import NemoGym
from workers.handlers.environments.openenv import OpenEnv
from workers.testing import play

PATIENCE_S = 60.0


def act(name="add", **arguments) -> Action:
    return Action(tool_calls=[Call(name=name, arguments=arguments)])


def say(text) -> Action:
    return Action(content=text)


@pytest.fixture(scope="module")
def started():
    """Starts servers, one of a kind, which end with the module."""
    processes: dict[str, tuple[subprocess.Popen, str]] = {}

    def start(name, command, wait=True, **env):
        if name not in processes:
            port = free_port()
            words = [str(port) if word == "PORT" else str(word) for word in command]
            processes[name] = subprocess.Popen(words, env=os.environ | env), f"http://127.0.0.1:{port}"
        if wait:
            wait_until(lambda: _answers(processes[name]), PATIENCE_S, f"{name} answers")
        return processes[name][1]

    yield start
    for process, _ in processes.values():
        process.kill()
        process.wait()


def _answers(server) -> bool:
    process, url = server
    assert process.poll() is None, "the server ended"
    try:
        return urllib.request.urlopen(f"{url}/openapi.json", timeout=5).status == 200
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


ADD = {
    "type": "function",
    "name": "add",
    "description": "Add to the count.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
}


@pytest.fixture(params=RELEASES)
def counter(request, started, configured):
    """A row for a counter, at the resource server of a release of NeMo Gym."""
    if not (HOME / request.param).is_dir():
        pytest.skip(f"there is no {HOME / request.param}: run `make setup-tests`")
    for release in sorted(RELEASES, key=request.param.__eq__):  # it last, and both at once
        path = os.pathsep.join(map(str, [HOME / release, HOME / "needs", ROOT]))
        command = [sys.executable, "-m", "tests.helpers.gym_resources", "PORT"]
        url = started(release, command, release == request.param, PYTHONPATH=path)
    configured(environment_servers=f"counter={url}/, gone=http://127.0.0.1:9")

    def row(wanted=5, **fields):
        params = {"input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "To 5"}]}
        return {
            "server": "counter",
            "responses_create_params": params | {"tools": [ADD]},
            "wanted": wanted,
            **fields,
        }

    return row


def test_a_session_of_nemo_gym_is_worked_on_by_its_tools_and_judged_by_its_verifier(counter):
    actions = [act(by=3), act(by="x"), act("verify", by=1), act(by=2), say("Done.")]
    first, second = play(NemoGym(), counter(), actions, n=2)
    assert (first.state, first.reward, second.reward) == (State.COMPLETED, 1.0, 1.0), (
        "each has its own session"
    )
    system, user, _, *_ = messages = first.trajectory.messages
    assert (system.role, system.text, user.text) == ("system", "Count.", "To 5")
    three, wrong, reserved, five = [m.text for m in messages if m.role == "tool"]
    assert json.loads(three) == {"count": 3} and json.loads(five) == {"count": 5}
    assert "valid integer" in wrong and "no tool 'verify'" in reserved


def test_the_row_goes_to_nemo_gym_as_it_is_and_a_wrong_end_earns_what_its_verifier_says(counter):
    (rollout,) = play(NemoGym(), counter(start=4), [act(by=1), say("Done.")])
    assert rollout.reward == 1.0, "/seed_session had read `start`"
    (rollout,) = play(NemoGym(), counter(wanted=4, seed=1), [act(by=5), say("Done.")])
    assert rollout.reward == 1.0, "/verify had read `seed`"
    (rollout,) = play(NemoGym(), counter(), [say("I am done.")])
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 0.0)


def test_what_a_server_of_nemo_gym_refuses_drops_the_sample(counter):
    (rollout,) = play(NemoGym(), counter(wanted="many"), [say("Done.")])
    assert (rollout.reward, rollout.error.blame) == (None, "task") and "422" in rollout.error.message
    (rollout,) = play(NemoGym(), counter(wanted=-1), [say("Done.")], limits={"max_attempts": 1})
    assert (rollout.state, rollout.reward) == (State.FAILED, None), "its reward is not finite"


def test_a_tenant_names_no_server_that_the_operator_did_not(counter):
    for server, blame in (("http://127.0.0.1:9", "task"), ("gone", "infrastructure")):
        (rollout,) = play(NemoGym(), counter() | {"server": server}, [], limits={"max_attempts": 1})
        assert (rollout.state, rollout.error.blame) == (State.FAILED, blame)


def test_servers_that_have_no_name_or_no_url_are_refused_at_the_start():
    for wrong in ("http://10.0.0.7:9001", "counter=10.0.0.7:9001", "a=http://b c=http://d"):
        with pytest.raises(SettingsError, match="ROLLOUT_ENVIRONMENT_SERVERS"):
            Settings.from_env({"ROLLOUT_ENVIRONMENT_SERVERS": wrong})


@pytest.fixture
def open_env(package, started, configured):
    python = package("openenv")

    def at(kind):
        command = [python, ROOT / "tests" / "helpers" / "open_env.py", "PORT", kind]
        url = started(f"openenv {kind}", command)
        configured(environment_servers=f"openenv={url}")

    return at


def test_an_openenv_server_whose_action_is_one_text_reads_what_the_model_says(open_env):
    open_env("text")
    task = {"seed": 7, "prompt": "Play.", "reset": {"hint": "It has two letters."}}
    (rollout,) = play(OpenEnv(), task, [say("a"), say("w7")])
    assert (rollout.state, rollout.reward, rollout.finish_reason) == (State.COMPLETED, 1.25, "stop")
    texts = [(m.role, m.text) for m in rollout.trajectory.messages]
    assert texts[:2] == [("system", "Play."), ("user", "Guess the word. It has two letters.")]
    assert texts[3] == ("user", "no, it is w7") and texts[-1] == ("user", "right")


@pytest.mark.parametrize("word", ["nan", "crash"])
def test_an_openenv_server_that_fails_drops_the_sample(open_env, word):
    open_env("text")
    (rollout,) = play(OpenEnv(), {}, [say(word)])
    assert (rollout.state, rollout.reward, rollout.error.blame) == (State.FAILED, None, "task")


def test_an_openenv_action_of_several_fields_is_a_tool_and_a_wrong_one_is_told(open_env):
    open_env("moves")
    (rollout,) = play(
        OpenEnv(), {}, [act("act", x=0), act("jump"), act("act", x=0, y=2), act("act", x=1, y=1)]
    )
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0)
    missing, unknown, moved, _ = [m.text for m in rollout.trajectory.messages if m.role == "tool"]
    assert "Field required" in missing and "no tool 'jump'" in unknown and moved == "at 0,2"


def test_the_tools_of_an_openenv_server_are_offered_and_called(open_env):
    open_env("tools")
    actions = [act(a=2, b=3), act("nothing"), say("It is 5.")]
    (rollout,) = play(OpenEnv(), {"prompt": "Add 2 and 3."}, actions)
    added, unknown = [m.text for m in rollout.trajectory.messages if m.role == "tool"]
    assert "5" in added and "nothing" in unknown
    # The environment gives no reward at all, and a sample without one is none.
    assert (rollout.state, rollout.reward) == (State.FAILED, None)
    assert "gave no reward" in rollout.error.message
