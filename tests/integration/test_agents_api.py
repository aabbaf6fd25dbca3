"""What a program elsewhere is told so that it can drive a rollout: address and keys of one attempt."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rollout.cli import main
from rollout.client import ApiError
from rollout.schema import HandlerInfo, RolloutRequest, Stage
from services.gateway.context import EXTENSION
from services.state.api_keys import Scope
from services.state.capture.session import MODEL, REWARD, read_key
from services.state.capture.store import CaptureStore
from services.state.fleet import FleetStore
from services.state.rollouts.store import Finish
from tests.helpers.stack import Stack

CAPTURE = "http://capture.test:8790"
EXTERNAL = {"harness": "external"}
AGENT = "/v1/rollouts/{}/agent"


@pytest.fixture
def agents(world):
    """A gateway that has a capture, and the key of tenant `a`."""
    world.app = world.start(capture_url=f"{CAPTURE}/")
    world.gate = world.app.extensions[EXTENSION]
    world.gate.fleet.put_handlers([HandlerInfo(name="mute", uses_model=False)])
    world.key("a")
    return world


def meaning(agents, access: dict) -> list[tuple[str, str, int] | None]:
    """What capture reads in the keys."""
    secret = CaptureStore(agents.redis).secret()
    return [read_key(secret, access[name]) for name in ("api_key", "reward_key")]


def end_attempt(agents, rollout_id: str, outcome: str) -> None:
    claim = agents.gate.rollouts.claim(rollout_id, 1, Stage.INIT, "w")
    agents.gate.rollouts.finish(claim, Finish(outcome))


def test_a_submission_tells_address_and_keys_of_the_first_attempt_the_second_time_too(agents):
    first = agents.submit("a", id="r1", agent=EXTERNAL)
    (entry,) = first.json["rollouts"]
    assert first.status_code == 202 and entry["created"]
    assert entry["agent"]["base_url"] == CAPTURE and entry["agent"]["attempt"] == 1
    assert meaning(agents, entry["agent"]) == [(MODEL, "r1", 1), (REWARD, "r1", 1)]
    (again,) = agents.submit("a", id="r1", agent=EXTERNAL).json["rollouts"]
    assert not again["created"] and again["agent"] == entry["agent"]
    assert agents.get(AGENT.format("r1"), "a").json == entry["agent"]


def test_of_many_only_those_that_a_program_elsewhere_drives_have_keys_each_its_own(agents):
    requests = [
        {"handler": "noop", "id": "own"},
        {"handler": "noop", "id": "outside", "n": 3, "agent": EXTERNAL},
        {"handler": "noop", "id": "inside", "agent": {"harness": "codex"}},
    ]
    rollouts = agents.post("/v1/rollouts", "a", {"requests": requests}).json["rollouts"]
    told = {entry["id"]: entry["agent"] for entry in rollouts}
    outside = [f"outside.{k}" for k in range(3)]
    assert [name for name, access in told.items() if access] == outside
    for name in outside:
        assert meaning(agents, told[name]) == [(MODEL, name, 1), (REWARD, name, 1)]


def test_another_attempt_has_other_keys_and_an_ended_rollout_none(agents):
    (entry,) = agents.submit("a", id="r1", agent=EXTERNAL).json["rollouts"]
    end_attempt(agents, "r1", "again")
    access = agents.get(AGENT.format("r1"), "a").json
    assert access["attempt"] == 2 and meaning(agents, access) == [(MODEL, "r1", 2), (REWARD, "r1", 2)]
    assert not {access["api_key"], access["reward_key"]} & {*entry["agent"].values()}
    agents.gate.rollouts.cancel("r1")
    ended = agents.get(AGENT.format("r1"), "a")
    assert ended.status_code == 410 and "cancelled" in ended.json["detail"]


def test_keys_are_told_to_their_tenant_alone_and_to_who_may_submit(agents):
    agents.submit("a", id="r1", agent=EXTERNAL)
    agents.submit("a", id="own")
    agents.key("b")
    reader, admin = agents.key("a2", Scope.READ), agents.key("op", Scope.ADMIN)
    theirs, nowhere = (agents.get(AGENT.format(name), "b") for name in ("r1", "nowhere"))
    assert theirs.status_code == nowhere.status_code == 404
    assert theirs.json["detail"].replace("r1", "nowhere") == nowhere.json["detail"]
    assert agents.get(AGENT.format("r1"), reader).status_code == 403
    assert agents.get(AGENT.format("r1")).status_code == 401
    assert agents.get(f"{AGENT.format('r1')}?tenant=a", admin).status_code == 200
    driven_here = agents.get(AGENT.format("own"), "a")
    assert driven_here.status_code == 409 and "external" in driven_here.json["detail"]


@pytest.mark.parametrize("harness", ["external", "claude_code"])
def test_without_capture_no_program_is_taken_and_nothing_enqueued(world, harness):
    world.key("a")
    requests = [{"handler": "noop"}, {"handler": "noop", "agent": {"harness": harness}}]
    refused = world.post("/v1/rollouts", "a", {"requests": requests})
    assert refused.status_code == 400
    assert [error["field"] for error in refused.json["errors"]] == ["requests.1.agent"]
    assert "ROLLOUT_CAPTURE_URL" in refused.json["detail"]
    batch = {"n": 1, "groups": 1, "prompts": [requests[1]]}
    (error,) = world.post("/v1/batches", "a", batch).json["errors"]
    assert error["field"] == "prompts.0.agent"
    assert world.get("/v1/rollouts", "a").json["rollouts"] == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"handler": "mute", "agent": EXTERNAL}, "agent"),
        ({"agent": {"harness": "../pack"}}, "agent.harness"),
        ({"agent": {"harness": "external", "command": ["sh"]}}, "agent"),
    ],
)
def test_what_no_program_could_drive_is_refused_with_the_field(agents, body, field):
    refused = agents.submit("a", **body)
    assert refused.status_code == 400
    assert [error["field"] for error in refused.json["errors"]] == [field]


def test_keys_are_kept_nowhere_and_shown_by_no_other_route(agents):
    body = {"handler": "noop", "id": "r1", "agent": EXTERNAL, "metadata": {"mark": "seen"}}
    (entry,) = agents.post("/v1/rollouts", "a", body).json["rollouts"]
    end_attempt(agents, "r1", "failed")
    keys = [entry["agent"]["api_key"], entry["agent"]["reward_key"]]
    secret = CaptureStore(agents.redis).secret()
    stored = "".join(text for name in agents.redis.scan_iter() for text in everything(agents.redis, name))
    paths = ("/v1/rollouts/r1", "/v1/rollouts", "/v1/results", "/v1/status", "/openapi.json")
    shown = "".join(agents.get(path, "a").text for path in paths)
    assert "seen" in stored and "seen" in shown, "the looking finds what is there"
    assert not [key for key in keys if key in stored + shown] and secret not in shown


def everything(client, name: str) -> list[str]:
    """All texts of a key."""
    read = {
        "string": lambda: [client.get(name)],
        "hash": lambda: [*client.hgetall(name).values()],
        "list": lambda: client.lrange(name, 0, -1),
        "set": lambda: [*client.smembers(name)],
        "zset": lambda: client.zrange(name, 0, -1),
        "stream": lambda: [json.dumps(client.xrange(name))],
    }
    return [str(text) for text in read[client.type(name)]()]


def test_client_and_command_line_ask_a_real_gateway_and_show_no_key_by_accident(tmp_path):
    """Neither its log, nor an error, nor what is printed of an object holds a key."""
    with Stack(tmp_path, tmp_path / "sbx", {"ROLLOUT_CAPTURE_URL": CAPTURE}) as stack:
        FleetStore(stack.redis.client).put_handlers([HandlerInfo(name="noop")])
        client = stack.client
        (entry,) = client.submit(RolloutRequest(handler="noop", id="r1", agent=EXTERNAL))
        access = client.agent("r1")
        assert access == entry.agent and access.attempt == 1
        environment = {
            "OPENAI_BASE_URL": f"{CAPTURE}/v1",
            "OPENAI_API_KEY": access.api_key,
            "ANTHROPIC_BASE_URL": CAPTURE,
            "ANTHROPIC_API_KEY": access.api_key,
            "GOOGLE_GEMINI_BASE_URL": CAPTURE,
            "GEMINI_API_KEY": access.api_key,
        }
        assert access.environment() == environment
        lines = command("agent", "r1", "--url", stack.url).splitlines()
        assert lines == [f"export {name}={value}" for name, value in environment.items()]
        assert json.loads(command("agent", "r1", "--json", "--url", stack.url)) == access.model_dump()
        client.cancel("r1")
        with pytest.raises(ApiError) as refused:
            client.agent("r1")
        assert refused.value.status == 410
        log = stack.gateway.log.read_text()
    assert "/v1/rollouts/r1/agent" in log, "calls are logged"
    shown = [repr(entry), str(access), str(refused.value), log]
    assert not [text for text in shown for key in (access.api_key, access.reward_key) if key in text]


def command(*args: str) -> str:
    """What a command prints, which ends well."""
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    return result.stdout
