"""`GET /v1/live` of a running service: what happens comes as it happens, to who may see it."""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from rollout.schema import Rollout, RolloutRequest, new_id
from rollout.trajectory import Segment
from services.gateway.auth import CACHE_S
from services.state import keys
from services.state.api_keys import KeyStore, Scope
from services.state.fleet import FleetStore
from tests.chaos.harness import Engine, diary_engine
from tests.helpers.keys import http, metric
from tests.helpers.live import Live
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, wait_until
from workers.handlers.noop import Noop

PATIENCE_S = 60


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    env = {
        "ROLLOUT_HANDLERS": "tests.helpers.printing:all_handlers",
        "ROLLOUT_LEASE_S": "10",
        "ROLLOUT_SSE_HEARTBEAT_S": "2",
        "ROLLOUT_SSE_STREAMS": "120",
        "ROLLOUT_GATEWAY_TENANT_SHARE": "1",
    }
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            with Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir), env) as stack:
                stack.start_workers({"run": "run", "others": "init,eval"})
                Engine(stack, "diary", diary_engine)
                yield stack
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture
def live(service):
    """Opens streams, which end with the test."""
    streams = []

    def open_one(**params) -> Live:
        streams.append(Live(service.url, **params))
        assert streams[-1].response.status_code == 200
        return streams[-1]

    yield open_one
    for stream in streams:
        stream.close()
    wait_until(lambda: metric(service.url, "rollout_page_viewers") == 0, PATIENCE_S, "the viewers to be gone")


@pytest.fixture
def stranger(service):
    """Headers of another tenant's key, which may read."""
    _, text = KeyStore(service.redis.client).create("other", [Scope.READ])
    time.sleep(CACHE_S + 0.2)
    return {"Authorization": f"Bearer {text}"}


def submit(service, handler="printing", **task) -> str:
    request = RolloutRequest(handler=handler, id=new_id(), task=task, limits={"max_turns": 60})
    service.client.submit(request)
    return request.id


@pytest.fixture
def followed(service, live, tmp_path):
    """Submits rollouts that are looked at before they run, however slow the machine is."""

    def submit_and_open(handler="printing", **task) -> tuple[str, Live]:
        rollout_id = submit(service, handler, gates=str(tmp_path), **task)
        stream = live(rollout=rollout_id)
        stream.until("rollout")
        for stage in ("init", "run", "eval"):
            (tmp_path / stage).touch()
        return rollout_id, stream

    return submit_and_open


def in_run(service, rollout_id: str) -> None:
    wait_until(lambda: service.client.get(rollout_id).state == "running", PATIENCE_S, "RUN")


def ended(service, rollout_id: str) -> Rollout:
    return service.client.wait(rollout_id, PATIENCE_S)


TICKING = "for i in $(seq 40); do echo \"$i $(date +%s.%N)\"; sleep 0.1; done; printf '\\033[1mdone'; sleep 1"


@pytest.mark.parametrize("program", [False, True])
def test_the_terminal_is_seen_as_it_is_typed_and_nothing_of_the_scoring(followed, program):
    _, stream = followed(command=TICKING, program=program)
    stream.until("output", lambda said: "done" in said["text"])
    stream.until("rollout", lambda said: said["state"] == "completed")
    outputs = [(at, data) for at, name, data in stream.events if name == "output"]
    assert {data["kind"] for _, data in outputs} == {"exec" if program else "bash"}
    assert len({data["operation"] for _, data in outputs}) == 1
    assert not any(data["skipped"] for _, data in outputs)
    assert "secretly" not in stream.text()
    assert [line.split()[0] for line in stream.text().splitlines()[:-1]] == [str(n) for n in range(1, 41)]
    lags = sorted(
        at - float(line.split()[1])
        for at, data in outputs
        for line in data["text"].splitlines()
        if len(line.split()) == 2
    )
    print("lag ms", [round(1000 * lags[int(share * len(lags))]) for share in (0.5, 0.95)])
    assert lags[int(0.95 * len(lags))] < 1.0, lags


def test_who_comes_later_sees_what_was_printed_before(followed, live):
    rollout_id, first = followed(command="echo first; sleep 5; echo second; sleep 1")
    first.until("output", lambda said: "first" in said["text"])
    second = live(rollout=rollout_id)
    assert second.until("output")["text"] == "first\n"
    for stream in (first, second):
        stream.until("output", lambda said: "second" in said["text"])
        assert stream.text() == "first\nsecond\n"


def test_a_rollout_is_followed_from_its_queue_to_its_end(service, live):
    ids = [submit(service, command="sleep 0.5") for _ in range(3)]
    stream = live(rollout=ids[0], ids=",".join(ids))
    for rollout_id in ids:
        stream.until("states", lambda said, one=rollout_id: said.get(one, {}).get("state") == "completed")
    said = {}
    for states in stream.all("states"):
        said |= states
    for rollout_id in ids:
        item = service.client.get(rollout_id)
        assert said[rollout_id] == {
            "state": "completed",
            "attempt": 1,
            "reward": 1.0,
            "updated_at": pytest.approx(item.updated_at),
            "drop": False,
        }
    stream.until("rollout", lambda said: said["state"] == "completed")
    summary = http.get(f"{service.url}/v1/rollouts/{ids[0]}?include=summary").json()
    assert stream.all("rollout")[-1] == summary


def test_turns_come_as_the_pieces_of_which_the_trajectory_is_made(service, followed, live, tmp_path):
    end = tmp_path / "end"
    rollout_id, stream = followed("gated_diary", lines=6, pause_s=0.3, until=str(end))
    stream.until("turns", lambda said: any(piece["place"] >= 4 for piece in said.get("pieces", ())))
    late = live(rollout=rollout_id)
    assert late.until("rollout")["id"] == rollout_id
    late.until("turns")
    end.touch()
    item = ended(service, rollout_id)
    assert item.reward == 1.0
    (chain,) = item.trajectory.chains
    for viewer in (stream, late):
        viewer.until("rollout", lambda said: said["state"] == "completed")
    pieces = [piece for said in stream.all("turns") for piece in said.get("pieces", ())]
    assert all(said["attempt"] == 1 for said in stream.all("turns"))
    assert [piece["place"] for piece in pieces] == list(range(len(pieces)))
    assert [Segment.model_validate(piece["segment"]) for piece in pieces] == chain.segments[: len(pieces)]
    assert len(pieces) > 10
    late_pieces = [piece for said in late.all("turns") for piece in said.get("pieces", ())]
    assert late_pieces == pieces[len(pieces) - len(late_pieces) :]
    assert 0 < len(late_pieces) < len(pieces)
    calls = [call for said in stream.all("turns") for call in said.get("calls", ())]
    whole = [call.model_dump(exclude_defaults=True) for call in item.trajectory.calls]
    assert calls == whole[: len(calls)] and len(calls) >= 10
    assert {call["kind"] for call in calls} == {"model", "tool"}


def test_the_worker_says_what_the_ids_stand_for(service):
    item = ended(service, submit(service, "diary", lines=1))
    url = f"{service.url}/v1/tokenizers/{item.trajectory.tokenizer.rpartition('@')[2]}"
    wait_until(lambda: http.get(url).status_code == 200, PATIENCE_S, "the texts of the tokenizer")
    texts = http.get(url).json()["texts"]
    said = "".join(texts[token_id] for token_id in item.trajectory.response_ids)
    assert '<tool_call>\n{"name": "execute_bash"' in said and "wrote 1\n" in said


def test_the_overview_says_what_the_fleet_says_and_whose_the_viewer_is(service, live, stranger):
    mine, others = live(topics="overview"), live(topics="overview", headers=stranger)
    said = mine.until("overview", lambda said: len(said["fleet"]["workers"]) == 2)
    fleet = http.get(f"{service.url}/v1/fleet").json()
    assert said["fleet"].keys() == fleet.keys()
    assert [one["id"] for one in said["backends"]] == ["diary"]
    assert said["policy"] is None and "run" in said["queues"]
    assert said["tenant"]["name"] == "default"
    assert others.until("overview")["tenant"]["live"] == 0
    assert abs(said["at"] - time.time()) < 60
    everybody = live(topics="overview", tenant="*")
    assert everybody.until("overview")["tenant"]["name"] == "*"
    before = len(mine.all("overview"))
    wait_until(lambda: len(mine.all("overview")) >= before + 3, PATIENCE_S, "the next ones")
    times = [said["at"] for said in mine.all("overview")[before - 1 :][:4]]
    # The gateway's own: one may come late where it stands still, and the next one soon after it.
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert sum(pauses) > 1.9 and min(pauses) < 1.5, pauses


def test_batches_and_reports_are_told_to_their_tenant(service, live, stranger):
    mine = live(topics="batches,reports")
    others = live(topics="batches,reports", headers=stranger)
    time.sleep(1)
    prompts = [{"handler": "printing", "task": {"command": "true"}}]
    batch = http.post(f"{service.url}/v1/batches", json={"prompts": prompts, "groups": 1, "n": 2})
    assert batch.status_code < 300, batch.text
    assert mine.until("changed") == {"what": "batch", "id": batch.json()["id"]}
    service.redis.client.publish(keys.REPORTS_CHANNEL, "default my-run")
    assert mine.until("changed", lambda said: said["what"] == "report")["id"] == "my-run"
    time.sleep(1)
    assert others.all("changed") == []


def test_nobody_sees_what_is_another_tenants(service, live, stranger):
    rollout_id = submit(service, command="echo mine; sleep 3")
    refused = Live(service.url, headers=stranger, rollout=rollout_id)
    assert refused.response.status_code == 404
    assert http.get(f"{service.url}/v1/live?rollout=no-such").status_code == 404
    asked = Live(service.url, headers=stranger, topics="overview", tenant="*")
    assert asked.response.status_code == 403
    others, mine = live(ids=rollout_id, headers=stranger), live(ids=rollout_id)
    mine.until("states", lambda said: said[rollout_id]["state"] == "completed")
    assert others.all("states") == []


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "topics"),
        ("topics=weather", "topics"),
        ("ids=" + ",".join(f"r{n}" for n in range(201)), "ids"),
        ("topics=overview&more=1", "more"),
    ],
)
def test_a_query_that_does_not_fit_is_refused_with_its_field(service, query, field):
    answer = http.get(f"{service.url}/v1/live?{query}")
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"] == field


def test_a_stream_ends_with_its_key_and_beats_until_then(service, live):
    store = KeyStore(service.redis.client)
    key, text = store.create("passing", [Scope.READ])
    time.sleep(CACHE_S + 0.2)
    stream = live(ids="none", headers={"Authorization": f"Bearer {text}"})
    stream.until("", lambda said: said == "nothing new")
    store.revoke(key.id)
    wait_until(lambda: stream.over, PATIENCE_S, "the end of the stream")


def test_a_hundred_viewers_cost_little_and_nobody_nothing(service, live):
    process = psutil.Process(service.gateway.pid)

    def cpu() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))

    ids = [submit(service, command="for i in $(seq 400); do echo $i; sleep 0.1; done") for _ in range(2)]
    for rollout_id in ids:
        in_run(service, rollout_id)
    names = ",".join(ids)
    streams = [live(topics="overview", rollout=ids[number % 2], ids=names) for number in range(100)]

    def events() -> int:
        return sum(len(one.events) for one in streams)

    began, at, before = cpu(), time.monotonic(), events()
    time.sleep(5)
    wait_until(lambda: events() - before > 500, 15, "500 events")
    passed = time.monotonic() - at
    cores = (cpu() - began) / passed
    print(f"100 viewers: {cores:.3f} cores for {(events() - before) / passed:.0f} events/s")
    assert cores < 0.8
    service.client.cancel_many(ids)


def test_a_stream_goes_on_where_redis_was_away(tmp_path):
    env = {"ROLLOUT_SSE_HEARTBEAT_S": "2"}
    with Stack(tmp_path, tmp_path / "s", env) as stack:
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        (item,) = stack.client.submit([RolloutRequest(handler="noop")])
        with Live(stack.url, rollout=item.id, ids=item.id, topics="overview") as stream:
            stream.until("states", lambda said: said[item.id]["state"] == "queued")
            stack.redis.crash()
            stream.until("", lambda said: said == "Redis is away")
            stack.redis = stack.redis.restarted()
            wait_until(lambda: stack.client.cancel(item.id) or True, PATIENCE_S, "Redis")
            stream.until("states", lambda said: said[item.id]["state"] == "cancelled")
            stream.until("rollout", lambda said: said["state"] == "cancelled")
            assert not stream.over
