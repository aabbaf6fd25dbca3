"""Forks as they are asked for: what they become, what is refused, client, command line and batches."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from click.testing import CliRunner
from werkzeug.serving import make_server

from rollout import AsyncClient, Client, ForkPoint, ForkRequest, Limits, RolloutRequest, SamplingParams
from rollout.cli import main
from rollout.client import ApiError
from rollout.schema import BatchRequest, HandlerInfo, PromptsRequest, Stage, State
from services.state import keys
from services.state.api_keys import Scope
from services.state.checkpoints import Kept
from services.state.rollouts.store import Finish
from services.state.scripts import send_many
from services.state.tenants import Tenant
from services.state.turns.store import TurnStore
from tests.helpers.stack import wait_until
from tests.helpers.tenants import World

NODE = "n1"
SCHEMA = {"properties": {"x": {"type": "integer"}}}
TASK = {"handler": "steps", "task": {"x": 1}}
ASKED = TASK | {
    "checkpoints": "every_turn",
    "priority": 3,
    "sampling": {"temperature": 0.5, "seed": 4},
    "limits": {"max_turns": 9, "deadline_s": 1000},
    "policy_version": "old",
    "tags": ["source"],
    "metadata": {"note": 1},
    "group_id": "theirs",
}


class Forked(World):
    """A gateway, and tenant `a` with rollouts that have kept turns."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.key("a")
        handlers = [
            HandlerInfo(name="steps", task_schema=SCHEMA, repeatable=[Stage.RUN]),
            HandlerInfo(name="once"),
            HandlerInfo(name="mute", repeatable=[Stage.RUN], uses_model=False),
            HandlerInfo(name="live", repeatable=[Stage.RUN], survives="nothing"),
        ]
        self.gate.fleet.put_handlers(handlers)
        self.gate.fleet.put_node(NODE, {})
        self.store, self.log = self.gate.rollouts, TurnStore(self.redis)

    def running(self, rollout_id: str, *turns: int, who: str = "a", **more):
        """A rollout in RUN with these turns kept, and its claim."""
        accepted = self.post("/v1/rollouts", who, ASKED | {"id": rollout_id} | more)
        assert accepted.status_code == 202, accepted.text
        self.store.finish(self.store.claim(rollout_id, 1, Stage.INIT, "w"), Finish(State.READY))
        claim = self.store.claim(rollout_id, 1, Stage.RUN, "w")
        (answer,) = send_many(self.redis, [self.log.append(rollout_id, 1, claim.fence, 0, [b"a", b"b"])])
        assert answer["word"] == "ok"
        for turn in turns:
            self.keep(claim, turn)
        return claim

    def keep(self, claim, turn: int, **more) -> None:
        fields = {"turn": turn, "at": 1.0, "attempt": 1, "entries": turn, "way": "copy", "node": NODE}
        kept = Kept(**fields | {"snapshot": f"{claim.rollout_id}.1.{turn}"} | more)
        assert self.gate.checkpoints.put(claim.rollout_id, kept, claim.fence)

    def fork(self, rollout: str, turn: int, who: str = "a", n: int | None = None, **more):
        point = {"rollout": rollout, "turn": turn} | ({} if n is None else {"n": n})
        return self.post("/v1/rollouts", who, {"from": point} | more)


@pytest.fixture
def forked(world) -> Forked:
    return Forked(world.url)


@pytest.fixture
def served(forked):
    """The same behind an address, and a client of it."""
    server = make_server("127.0.0.1", 0, forked.app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    forked.address = f"http://127.0.0.1:{server.server_port}"
    try:
        with Client(forked.address, api_key=forked.texts["a"], retry_for=0) as forked.client:
            yield forked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def problem(answer, status: int) -> tuple[str, str]:
    """The one field at fault, and what is said of it; all of which stands in the detail, too."""
    assert answer.status_code == status, answer.text
    (error,) = answer.json["errors"]
    assert answer.json["detail"] == f"{error['field']}: {error['message']}"
    return error["field"], error["message"]


def request_of(world, rollout_id: str) -> dict:
    return world.get(f"/v1/rollouts/{rollout_id}", "a").json["request"]


# ------------------------------------------------------------------------------ what forks become


def test_a_fork_is_what_the_other_rollout_was_asked_for_with_what_the_caller_changes(forked):
    forked.running("r", 1, 2)
    more = {"tags": ["mine"], "sampling": {"seed": 5}, "limits": {"max_turns": 12}, "id": "f"}
    answer = forked.fork("r", 2, n=3, **more)
    assert answer.status_code == 202, answer.text
    entries = answer.json["rollouts"]
    assert [entry["id"] for entry in entries] == ["f.0", "f.1", "f.2"]
    assert {entry["group_id"] for entry in entries} == {"f"} and all(entry["created"] for entry in entries)
    request = request_of(forked, "f.1")
    assert request["origin"] == {"rollout": "r", "turn": 2} and request["n"] == 3
    assert (request["handler"], request["task"]) == (TASK["handler"], TASK["task"])
    assert (request["sampling"]["temperature"], request["sampling"]["seed"]) == (0.5, 5)
    assert (request["limits"]["max_turns"], request["limits"]["deadline_s"]) == (12, 1000)
    assert (request["priority"], request["checkpoints"]) == (3, "every_turn")
    assert (request["tags"], request["metadata"], request["policy_version"]) == (["mine"], {}, None)
    claims = [forked.store.claim_next("w", node="n") for _ in entries]
    assert {claim.rollout_id for claim in claims} == {"f.0", "f.1", "f.2"}, "they wait as any do"
    (alone,) = forked.fork("r", 1).json["rollouts"]
    assert alone["group_id"] == alone["id"] not in ("r", "theirs")


def test_a_fork_of_a_fork_goes_on_from_the_fork(forked):
    forked.running("r", 1)
    assert forked.fork("r", 1, id="f").status_code == 202
    forked.store.finish(forked.store.claim("f", 1, Stage.INIT, "w"), Finish(State.READY))
    claim = forked.store.claim("f", 1, Stage.RUN, "w")
    send_many(forked.redis, [forked.log.append("f", 1, claim.fence, 0, [b"a", b"b"])])
    forked.keep(claim, 2)
    assert forked.fork("f", 2, id="g").status_code == 202
    assert request_of(forked, "g")["origin"] == {"rollout": "f", "turn": 2}
    field, message = problem(forked.fork("f", 1), 404)
    assert field == "from.turn" and "up to 1 they are turns of r:" in message


def test_the_same_fork_again_is_the_same_rollouts_whatever_became_of_the_other_one(forked):
    claim = forked.running("r", 1)
    body = {"n": 2, "id": "f", "limits": {"max_turns": 30}}
    first = forked.fork("r", 1, **body).json["rollouts"]
    again = forked.fork("r", 1, **body).json["rollouts"]
    assert [entry["id"] for entry in again] == [entry["id"] for entry in first]
    assert not any(entry["created"] for entry in again)
    other = forked.fork("r", 1, n=2, id="f", priority=9)
    assert other.status_code == 409 and [error["field"] for error in other.json["errors"]] == ["id"]
    forked.store.finish(claim, Finish(State.FAILED))
    late = forked.fork("r", 1, **body)
    assert late.status_code == 202 and not late.json["rollouts"][0]["created"]
    forked.redis.delete(keys.record("r"), keys.checkpoints("r"))
    assert forked.fork("r", 1, **body).status_code == 202
    assert problem(forked.fork("r", 1, n=2, id="f", priority=9), 404)[0] == "from.rollout"
    assert problem(forked.fork("r", 1), 404)[0] == "from.rollout"


def test_what_forks_need_lives_as_long_as_they_may_wait(forked):
    forked.running("r", 1)
    names = [keys.turns("r", 1), keys.checkpoints("r")]
    for name in names:
        forked.redis.expire(name, 100)
    assert forked.fork("r", 1, limits={"deadline_s": 5000}).status_code == 202
    assert all(forked.redis.ttl(name) > 4900 for name in names)
    forked.redis.delete(names[0])
    field, message = problem(forked.fork("r", 1), 404)
    assert field == "from.turn" and "no longer" in message


def test_forks_and_requests_come_in_one_call_all_or_none(forked):
    forked.running("r", 1)
    ends = [{"id": "plain"} | TASK, {"from": {"rollout": "r", "turn": 1, "n": 2}, "id": "f"}]
    bad = {"from": {"rollout": "r", "turn": 7}}
    refused = forked.post("/v1/rollouts", "a", {"requests": [*ends, bad]})
    assert problem(refused, 404)[0] == "requests.2.from.turn"
    assert forked.get("/v1/rollouts/plain", "a").status_code == 404
    taken = forked.post("/v1/rollouts", "a", {"requests": ends}).json["rollouts"]
    assert [entry["id"] for entry in taken] == ["plain", "f.0", "f.1"]
    many = {"requests": [{"from": {"rollout": "r", "turn": 1, "n": 600}}] * 2}
    assert "1200 rollouts" in forked.post("/v1/rollouts", "a", many).json["detail"]


# ------------------------------------------------------------------------------ what is refused


def test_a_rollout_that_is_not_there_or_another_tenants_is_the_same_404(forked):
    forked.running("theirs", 1)
    forked.key("b")
    operator = forked.key("op", Scope.ADMIN)
    for who in ("b", operator):
        field, message = problem(forked.fork("theirs", 1, who), 404)
        nowhere = problem(forked.fork("nowhere", 1, who), 404)
        assert (field, message.replace("theirs", "nowhere")) == nowhere and field == "from.rollout"
    assert forked.redis.hget(keys.COUNTS, State.QUEUED.value) in (None, "0"), "nothing was enqueued"


@pytest.mark.parametrize(
    ("state", "fields", "said"),
    [
        (State.CANCELLED, {}, "cancelled"),
        (State.FAILED, {"drop": "1", "drop_reason": "sandbox: Died"}, "failed (sandbox: Died)"),
        (State.TIMED_OUT, {}, "timed_out"),
        (State.COMPLETED, {"drop": "1", "drop_reason": "verifier: Broken"}, "dropped (verifier: Broken)"),
    ],
)
def test_of_a_rollout_that_ended_badly_nothing_goes_on(forked, state, fields, said):
    claim = forked.running("r", 1)
    if state is State.CANCELLED:
        forked.store.cancel("r")
    if state is State.COMPLETED:
        forked.store.finish(claim, Finish(State.EVALUATING))
        claim = forked.store.claim("r", 1, Stage.EVAL, "w")
    forked.store.finish(claim, Finish(state, fields))
    field, message = problem(forked.fork("r", 1), 409)
    assert field == "from.rollout" and said in message


def test_a_rollout_that_ended_well_can_be_forked_as_one_that_runs(forked):
    claim = forked.running("r", 1)
    forked.store.finish(claim, Finish(State.EVALUATING))
    forked.store.finish(forked.store.claim("r", 1, Stage.EVAL, "w"), Finish(State.COMPLETED, {"reward": "1"}))
    assert request_of(forked, "r") and forked.fork("r", 1).status_code == 202


def test_another_rollout_of_the_same_name_begins_without_the_turns_of_the_first(forked):
    """Its record expires before what forks that wait may need."""
    forked.running("r", 1)
    forked.redis.delete(keys.record("r"))
    kept = forked.gate.checkpoints.get("r", 1)
    assert kept == forked.gate.checkpoints.get("r", 1, tenant="a")
    forked.key("b")
    forked.running("r", 2, who="b")
    assert [kept.turn for kept in forked.gate.checkpoints.list("r")] == [2]
    assert forked.redis.lrange(keys.turns("r", 1), 0, -1) == ["a", "b"]
    assert forked.gate.checkpoints.get("r", 2, tenant="a") is None
    assert problem(forked.fork("r", 2), 404)[0] == "from.rollout"


def test_turns_that_were_not_kept_are_refused_with_those_that_were(forked):
    claim = forked.running("r", 1, 4)
    forked.keep(claim, 5, error="disk full", snapshot=None)
    forked.keep(claim, 6, node="n2")
    forked.keep(claim, 9)
    assert problem(forked.fork("r", 2), 404) == (
        "from.turn",
        "turn 2 is not kept; those that are: 1, 4, 5, 6, 9",
    )
    assert problem(forked.fork("r", 5), 409) == ("from.turn", "the files of turn 5 were not kept: disk full")
    assert "n2" in problem(forked.fork("r", 6), 409)[1]
    forked.gate.fleet.put_node("n2", {})
    assert forked.fork("r", 6).status_code == 202
    assert problem(forked.fork("r", 9), 400)[0] == "from.turn"
    assert problem(forked.fork("r", 4, limits={"max_turns": 4}), 400)[0] == "from.turn"
    assert forked.fork("r", 9, limits={"max_turns": 10}).status_code == 202


def test_what_keeps_no_turns_is_refused_with_the_reason(forked):
    forked.running("r", checkpoints="never")
    field, message = problem(forked.fork("r", 1), 409)
    assert field == "from.rollout" and "every_turn" in message
    forked.running("s", 1)
    # Another release of its handler.
    for info, said in (({}, "not repeatable"), ({"repeatable": [Stage.RUN], "survives": "nothing"}, "files")):
        forked.gate.fleet.put_handlers([HandlerInfo(name="steps", **info)])
        forked.gate.tasks.handlers(fresh=True)
        field, message = problem(forked.fork("s", 1), 409)
        assert field == "from.rollout" and said in message


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"harness": "external"}, "a program elsewhere"),
        ({"harness": "command", "command": ["sh"]}, "'command'"),
        ({"harness": "claude_code"}, "claude_code drives it, which takes up a session"),
    ],
)
def test_a_program_is_not_forked_and_its_turns_are_not_kept(forked, agent, said):
    forked.app = forked.start(capture_url="http://capture.test:8790")
    field, message = problem(forked.post("/v1/rollouts", "a", ASKED | {"agent": agent}), 400)
    assert field == "checkpoints" and "`agent`" in message
    forked.running("r", agent=agent, checkpoints="never")
    field, message = problem(forked.fork("r", 1), 409)
    assert field == "from.rollout" and said in message


def test_checkpoints_from_which_nothing_goes_on_are_refused_when_they_are_asked_for(forked):
    for handler in ("live", "mute", "once"):
        body = {"handler": handler, "checkpoints": "on_tools"}
        assert problem(forked.post("/v1/rollouts", "a", body), 400)[0] == "checkpoints"
    batch = {"prompts": [{"handler": "once"}, body], "groups": 1, "n": 1}
    assert problem(forked.post("/v1/batches", "a", batch), 400)[0] == "prompts.1.checkpoints"
    forked.running("r", 1, checkpoints="every_turn")
    assert forked.fork("r", 1, checkpoints="never", id="f").status_code == 202
    assert "checkpoints" not in request_of(forked, "f")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"from": {"rollout": "r", "turn": 0}}, "from.turn"),
        ({"from": {"rollout": "r"}}, "from.turn"),
        ({"from": {"rollout": "a b", "turn": 1}}, "from.rollout"),
        ({"from": {"rollout": "r", "turn": 1, "n": 0}}, "from.n"),
        ({"from": None}, "from"),
        ({"from": {"rollout": "r", "turn": 1}, "handler": "steps"}, "handler"),
        ({"from": {"rollout": "r", "turn": 1}, "limits": {"max_turns": 0}}, "limits.max_turns"),
        (TASK | {"origin": {"rollout": "r", "turn": 1}}, "origin"),
    ],
)
def test_a_body_that_does_not_fit_is_told_by_the_fields_that_the_caller_wrote(forked, body, field):
    def found(path: str, body: dict) -> list[str]:
        answer = forked.post(path, "a", body)
        assert answer.status_code == 400, answer.text
        return [error["field"] for error in answer.json["errors"]]

    assert found("/v1/rollouts", body) == [field]
    assert found("/v1/rollouts", {"requests": [TASK, body]}) == [f"requests.1.{field}"]
    assert found("/v1/batches", {"prompts": [TASK, body], "groups": 1}) == [f"prompts.1.{field}"]


def test_what_the_other_rollouts_request_is_refused_for_is_told_of_that(forked):
    forked.running("r", 1)
    forked.tenants.set(Tenant(name="a", handlers=["noop"]))
    field, message = problem(forked.fork("r", 1), 403)
    assert field == "from.rollout" and message.startswith("its handler: tenant 'a' may not use 'steps'")
    forked.tenants.set(Tenant(name="a"))
    hooked = forked.fork("r", 1, webhook={"url": "http://hook.test/"})
    assert problem(hooked, 400)[0] == "webhook.url", "this is the caller's own"
    forked.app = forked.start(max_group_bytes=10_000)
    assert problem(forked.fork("r", 1, n=500), 400)[0] == "from.n"


# ------------------------------------------------------------------------------ checkpoints and metrics


def test_kept_turns_are_listed_to_their_tenant_with_nothing_that_is_the_services_own(forked):
    claim = forked.running("r", 10, 2)
    forked.keep(claim, 3, error="disk full", bytes=5, files=1)
    path = "/v1/rollouts/r/checkpoints"
    listed = forked.get(path, "a").json["checkpoints"]
    assert [kept["turn"] for kept in listed] == [2, 3, 10] and listed[1]["error"] == "disk full"
    assert listed[0].keys() == {"turn", "at", "way", "node", "bytes", "files", "error"}
    forked.key("b")
    operator = forked.key("op", Scope.ADMIN)
    theirs, nowhere = (forked.get(p, "b") for p in (path, path.replace("/r/", "/nowhere/")))
    assert theirs.status_code == nowhere.status_code == 404
    assert theirs.json["detail"].replace("'r'", "'nowhere'") == nowhere.json["detail"]
    assert forked.get(f"{path}?tenant=a", operator).json["checkpoints"] == listed
    assert forked.post("/v1/rollouts", "a", TASK | {"id": "plain"}).status_code == 202
    assert forked.get("/v1/rollouts/plain/checkpoints", "a").json == {"checkpoints": []}


def test_forks_are_counted_as_they_are_taken_or_refused(forked):
    def counted() -> list[float]:
        name = 'rollout_gateway_forks_total{outcome="%s"} '
        lines = forked.get("/metrics", forked.key("m", Scope.METRICS)).text.splitlines()
        return [
            next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name % outcome))
            for outcome in ("accepted", "refused")
        ]

    forked.running("r", 1)
    accepted, refused = counted()
    forked.fork("r", 1, n=2)
    forked.fork("r", 2)
    assert counted() == [accepted + 1, refused + 1]


# ------------------------------------------------------------------------------ batches


def test_prompts_of_a_batch_may_be_forks_and_are_kept_as_what_they_stand_for(forked):
    claim = forked.running("r", 1, 2)
    forks = [{"from": {"rollout": "r", "turn": turn}, "sampling": {"seed": turn}} for turn in (1, 2)]
    body = {"id": "b", "prompts": [TASK, *forks], "n": 2, "groups": 2, "max_staleness": 0}
    first = forked.post("/v1/batches", "a", body)
    assert first.status_code == 202, first.text
    stored = [json.loads(text) for text in forked.redis.lrange(keys.batch_prompts("b"), 0, -1)]
    assert [prompt.get("origin") for prompt in stored] == [
        None,
        {"rollout": "r", "turn": 1},
        {"rollout": "r", "turn": 2},
    ]
    assert [prompt["sampling"]["seed"] for prompt in stored] == [None, 1, 2]
    open_batch = {"id": "o", "n": 2, "groups": 2, "closed": False}
    assert forked.post("/v1/batches", "a", open_batch).status_code == 202
    assert forked.post("/v1/batches/o/prompts", "a", {"prompts": forks}).json == {"waiting": 2}
    assert forked.redis.pttl(keys.turns("r", 1)) > 7 * 86400_000, "prompts may wait"
    forked.store.finish(claim, Finish(State.FAILED))
    again = forked.post("/v1/batches", "a", body)
    assert (again.status_code, again.json["id"]) == (202, "b"), "a trainer that begins again has its batch"
    assert problem(forked.post("/v1/batches", "a", body | {"id": "c"}), 409)[0] == "prompts.1.from.rollout"
    assert problem(forked.post("/v1/batches", "a", body | {"groups": 1}), 409)[0] == "prompts.1.from.rollout"
    more = forked.post("/v1/batches/o/prompts", "a", {"prompts": forks})
    assert problem(more, 409)[0] == "prompts.0.from.rollout"


@pytest.mark.parametrize(
    ("given", "field"),
    [({"id": "i"}, "id"), ({"group_id": "g"}, "group_id"), ({"from": {"n": 2}}, "from.n")],
)
def test_a_batch_gives_its_forks_their_number_and_names(forked, given, field):
    fork = {"from": {"rollout": "r", "turn": 1} | given.pop("from", {})} | given
    for model, more in ((BatchRequest, {"groups": 1}), (PromptsRequest, {})):
        with pytest.raises(ValueError, match=f"prompts.1.{field}: the batch gives its own"):
            model.model_validate({"prompts": [TASK, fork]} | more)


# ------------------------------------------------------------------------------ client and command line


def test_the_client_forks_and_lists_and_sends_what_was_given_though_it_is_usual(served):
    served.running("r", 1, 2)
    client = served.client
    assert [kept.turn for kept in client.checkpoints("r")] == [1, 2]
    usual = Limits(max_turns=30)
    started = client.fork("r", 2, n=2, limits=usual, sampling=SamplingParams(temperature=1.0), tags=["t"])
    assert len(started) == 2 and len({entry.group_id for entry in started}) == 1
    request = client.get(started[0].id).request
    assert (request.limits.max_turns, request.limits.deadline_s) == (30, 1000)
    assert (request.sampling.temperature, request.sampling.seed) == (1.0, 4)
    mixed = [RolloutRequest(**TASK), ForkRequest(from_=ForkPoint(rollout="r", turn=1, n=2))]
    assert [entry.created for entry in client.submit(mixed)] == [True] * 3
    batch = client.batches.create(
        BatchRequest(prompts=[*mixed[:1], ForkRequest(from_=ForkPoint(rollout="r", turn=1))], n=2, groups=1)
    )
    assert batch.waiting_prompts == 2
    with pytest.raises(ApiError, match=r"from\.turn: turn 3 is not kept") as refused:
        client.fork("r", 3)
    assert refused.value.status == 404

    async def twin() -> list[int]:
        async with AsyncClient(served.address, api_key=served.texts["a"]) as asynchronous:
            await asynchronous.fork("r", 1)
            return [kept.turn for kept in await asynchronous.checkpoints("r")]

    assert asyncio.run(twin()) == [1, 2]


def test_the_command_lists_turns_and_starts_forks(served):
    claim = served.running("r", 1)
    served.keep(claim, 2, error="disk full", snapshot=None)

    def run(*args: str, code: int = 0):
        env = {"ROLLOUT_API_KEY": served.texts["a"], "ROLLOUT_URL": served.address}
        result = CliRunner().invoke(main, ["fork", "r", *args], env=env)
        assert result.exit_code == code, result.output
        return result

    table = run().stdout.splitlines()
    assert [line.split()[0] for line in table] == ["turn", "1", "2"] and "disk full" in table[2]
    assert [kept["turn"] for kept in json.loads(run("--json").stdout)] == [1, 2]
    ids = run("--turn", "1", "-n", "2", "--tag", "t").stdout.split()
    request = request_of(served, ids[1])
    assert request["n"] == len(ids) == 2 and request["tags"] == ["t"]
    assert "from.turn" in run("--turn", "2", code=1).output
    done = threading.Event()

    def end() -> None:
        found = wait_until(lambda: served.store.ids(tag="w", tenant="a"), 60, "the fork")
        served.gate.dispatcher.cancel_many(found)
        done.set()

    thread = threading.Thread(target=end)
    thread.start()
    lines = run("--turn", "1", "--tag", "w", "--wait").stdout.splitlines()
    thread.join()
    assert done.is_set() and len(lines) == 1 and "cancelled" in lines[0]
