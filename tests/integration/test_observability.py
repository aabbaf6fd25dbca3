"""What an operator can see: log lines, metrics, timelines, the dashboard."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import re
import tempfile
from pathlib import Path

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from rollout.cli import render as _render
from rollout.schema import RolloutRequest, Stage, State
from services import logs
from services.capture import metrics as capture_metrics
from services.dispatch import _expand
from services.gateway.app import create_app
from services.settings import Settings
from services.state import scripts
from services.state.fleet import FleetStore, NodeAdmission
from services.state.observations import BUCKETS_MS, BUCKETS_S, Observations
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
from tests.helpers.keys import http, keyed, metric
from tests.helpers.stack import NODE, ROOT, Stack, free_port, wait_until

DOCUMENTED = ROOT / "docs" / "observability.md"


@pytest.fixture
def store(server):
    client = connect(server.url)
    client.flushall()
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))


@pytest.fixture
def observations(server):
    return Observations(connect(server.url))


def submitted(store, **fields):
    new = _expand(RolloutRequest(handler="noop", **fields))
    store.submit(new)
    return new[0].id


def claimed(store, stage, rollout_id, attempt=1):
    claim = store.claim(rollout_id, attempt, stage, f"{stage.value}@n")
    assert not isinstance(claim, str), claim
    return claim


ERROR = {
    "blame": "sandbox",
    "error": json.dumps({"blame": "sandbox", "stage": "init", "type": "Full", "message": "no\nroom"}),
}


# -- metrics ---------------------------------------------------------------------------------


def test_each_end_of_a_stage_is_counted_once_in_a_histogram(store, observations):
    rollout_id = submitted(store)
    first = claimed(store, Stage.INIT, rollout_id)
    store.finish(first, Finish("again", ERROR, delay_s=0))
    store.finish(first, Finish("again", ERROR, delay_s=0))  # its client got no answer
    for stage, entered in ((Stage.INIT, "ready"), (Stage.RUN, "evaluating"), (Stage.EVAL, "completed")):
        store.finish(claimed(store, stage, rollout_id, attempt=2), Finish(entered))
    histograms = observations.histograms()
    counted = {name: histogram.cumulative()[-1][1] for name, histogram in histograms.items()}
    assert counted == {
        "queue_init": 2, "queue_run": 1, "queue_eval": 1,
        "stage_init": 2, "stage_run": 1, "stage_eval": 1,
        "total_completed": 1,
    }  # fmt: skip
    totals = store.totals()
    assert totals["retry_sandbox"] == 1 and totals["attempts_2"] == 1


def test_times_fall_into_the_bucket_that_bounds_them(store, observations, server):
    rollout_id = submitted(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    client = connect(server.url)
    key = f"rollout:{{{rollout_id}}}"
    client.hset(key, "claimed", int(client.hget(key, "claimed")) - 42_000)
    store.finish(claim, Finish("ready"))
    histogram = observations.histograms()["stage_init"]
    rows = dict(histogram.cumulative())
    assert list(rows)[-1] == "+Inf" and len(rows) == len(BUCKETS_S) + 1
    assert rows["30"] == 0 and rows["60"] == 1 and rows["+Inf"] == 1
    assert 42 <= histogram.sum_s < 60


def test_rewards_and_turns_of_what_is_not_dropped_are_counted_by_handler(store, observations, server):
    ends = [
        {"reward": "1.0", "metrics": '{"turns": 3}'},
        {"reward": "-2.5", "metrics": '{"turns": 1}'},
        {"reward": "1e300", "metrics": '{"turns": NaN}'},
        {"reward": "-0.0", "metrics": '{"turns": "many"}'},
        {"reward": "1.0", "metrics": '{"turns": 9}', "drop": "1", "drop_reason": "no"},
        {"reward": "", "metrics": "nonsense"},
        {},
    ]
    for fields in ends:
        rollout_id = submitted(store)
        for stage, outcome in ((Stage.INIT, Finish("ready")), (Stage.RUN, Finish("evaluating"))):
            store.finish(claimed(store, stage, rollout_id), outcome)
        assert (
            store.finish(claimed(store, Stage.EVAL, rollout_id), Finish("completed", fields)) == "completed"
        )
    histograms = observations.histograms()
    reward, turns = histograms["reward_noop"], histograms["turns_noop"]
    # What no reward is stands as a million, for Redis counts in whole numbers.
    assert (sum(reward.counts.values()), reward.sum_s) == (4, 1.0 - 2.5 + 1e6)
    assert turns.counts == {1: 1, 5: 1, float("inf"): 1} and turns.sum_s == 4 + 1e6
    text = keyed(create_app(Settings(redis_url=server.url))).get("/metrics").text
    assert re.search(r'^rollout_reward_count{handler="noop"} 4\.0$', text, re.MULTILINE)
    assert re.search(r'^rollout_reward_sum{handler="noop"} 999998\.5$', text, re.MULTILINE)


def test_a_time_at_a_bound_belongs_to_it(server, observations, monkeypatch):
    client = connect(server.url)
    client.flushall()
    observe = "function operations.observe(ask) observe('stage_init', ask.ms) end"
    text = scripts.text("observations") + observe
    monkeypatch.setattr(scripts, "text", lambda name: text)
    do = scripts.Operations(client, "observations", BUCKETS_MS=BUCKETS_MS)
    for ms in (*BUCKETS_MS[:3], BUCKETS_MS[-1] + 1):
        do("observe", ms=ms)
    expected = dict.fromkeys(BUCKETS_S[:3], 1) | {float("inf"): 1}
    assert observations.histograms()["stage_init"].counts == expected


def test_no_more_leases_are_looked_at_than_the_bound(store, observations, monkeypatch):
    for _ in range(3):
        claimed(store, Stage.INIT, submitted(store))
    for most, count in ((2, 2), (3, 3), (4, 3)):
        monkeypatch.setattr("services.state.observations.MOST_LEASES", most)
        assert observations.ages().leases["init"] == count


def test_the_age_of_a_lease_is_since_its_last_heartbeat(store, observations, server):
    rollout_id = submitted(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    client = connect(server.url)
    key = f"rollout:{{{rollout_id}}}"
    client.hset(key, "claimed", int(client.hget(key, "claimed")) - 500_000)
    ages = observations.ages()
    assert ages.leases == {"init": 1, "run": 0, "eval": 0}
    assert 500 <= ages.lease_age["init"] < 600
    assert store.heartbeat([(rollout_id, claim.fence)]) == ["ok"]
    assert observations.ages().lease_age["init"] < 400
    assert ages.lease_age["run"] == 0.0


def test_the_lag_of_the_reaper_and_the_oldest_rollout_are_told(store, observations, server):
    client = connect(server.url)
    rollout_id = submitted(store)
    assert observations.ages().reaper_lag == 0
    client.zincrby("rollouts:due", -1_000_000, rollout_id)
    client.zincrby("rollouts:state:queued", -2_000_000, rollout_id)
    ages = observations.ages()
    assert 900 < ages.reaper_lag < 1100
    assert 1999 < ages.oldest["queued"] < 2200
    assert ages.oldest["running"] == 0


def test_lost_leases_and_reasons_of_drops_are_counted(store, server):
    client = connect(server.url)
    rollout_id = submitted(store, limits={"max_attempts": 2})
    for attempt in (1, 2, 3):  # what ends three workers is ended
        claimed(store, Stage.INIT, rollout_id, attempt)
        client.hset(f"rollout:{{{rollout_id}}}", "lease", 0)
        client.zadd("rollouts:due", {rollout_id: 0})
        store.overdue()
    assert store.get(rollout_id).state is State.FAILED
    store.cancel(submitted(store))
    text = keyed(create_app(Settings(redis_url=server.url))).get("/metrics").text
    assert re.search(r'^rollout_leases_lost_total{stage="init"} 3\.0$', text, re.MULTILINE)
    assert re.search(r'^rollout_dropped_total{reason="it ends workers"} 1\.0$', text, re.MULTILINE)
    assert re.search(r'^rollout_dropped_total{reason="cancelled"} 1\.0$', text, re.MULTILINE)


def test_reasons_of_drops_beyond_a_bound_are_counted_as_one(store):
    for number in range(210):
        rollout_id = submitted(store)
        reason = {"drop": "1", "drop_reason": f"handler: Error{number}"}
        store.finish(claimed(store, Stage.INIT, rollout_id), Finish(State.FAILED, reason))
    drops = {name: count for name, count in store.totals().items() if name.startswith("drop_")}
    assert len(drops) <= 200 and sum(drops.values()) == 210 and drops["drop_other"] >= 10


def test_workers_their_load_and_what_nodes_have_left_are_told(store, server):
    fleet = FleetStore(connect(server.url))
    fleet.announce("run@n1", ["run"], "n1", slots=8, most_slots=16, held=3)
    fleet.announce("all@n2", ["init", "run", "eval"], "n2", slots=4, held=4)
    fleet.put_admission("n1", NodeAdmission({}, False, 0, 64, free_disk=5 << 30, free_memory=7 << 20))
    fleet.put_admission("n2", NodeAdmission({}, False, 0, 64, 1 << 30, 1 << 30))
    families = exposed(Settings(redis_url=server.url))

    def values(name):
        return {tuple(sorted(sample.labels.values())): sample.value for sample in families[name].samples}

    first, second = ("n1", "run", "run@n1"), ("all@n2", "init+run+eval", "n2")
    assert values("rollout_fleet_slots") == {first: 8, second: 4}
    assert values("rollout_fleet_slots_limit") == {first: 16, second: 4}
    assert values("rollout_fleet_busy") == {first: 3, second: 4}
    assert values("rollout_node_free_bytes") == {
        **{("disk", "n1"): 5 << 30, ("memory", "n1"): 7 << 20},
        **{("disk", "n2"): 1 << 30, ("memory", "n2"): 1 << 30},
    }


def test_a_redis_that_may_lose_data_shows(store, server):
    client = connect(server.url)

    def value(name):
        (sample,) = exposed(Settings(redis_url=server.url))[f"rollout_redis_{name}"].samples
        return sample.value

    assert value("aof_enabled") == value("aof_write_ok") == 1
    assert 0 < value("memory_bytes") < value("memory_limit_bytes")
    client.config_set("maxmemory", 1 << 30)
    client.config_set("appendonly", "no")
    try:
        assert value("memory_limit_bytes") == 1 << 30
        assert value("aof_enabled") == 0
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("appendonly", "yes")


def exposed(settings):
    text = keyed(create_app(settings)).get("/metrics").text
    families = text_string_to_metric_families(text)
    # When a counter began is no metric of its own.
    return {family.name: family for family in families if not family.name.endswith("_created")}


def names_of(families):
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    return {
        family.name + suffix for family in families.values() for suffix in suffixes.get(family.type, ("",))
    }


def test_the_gateway_exposes_valid_histograms(store, server):
    rollout_id = submitted(store)
    store.finish(claimed(store, Stage.INIT, rollout_id), Finish("ready"))
    families = exposed(Settings(redis_url=server.url))
    duration = families["rollout_stage_duration_seconds"]
    assert duration.type == "histogram"
    values = {sample.labels.get("le"): sample.value for sample in duration.samples}
    assert values["+Inf"] == 1
    assert families["rollout_leases"].samples[0].labels["stage"] == "init"


def test_the_dashboard_is_what_its_script_makes_and_asks_for_nothing_else(server):
    path = ROOT / "deploy" / "grafana" / "make_dashboard.py"
    spec = importlib.util.spec_from_file_location("make_dashboard", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.TARGET.read_text() == made.text(), "run `python deploy/grafana/make_dashboard.py`"
    board = json.loads(made.text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 20
    captured = {family.name: family for family in capture_metrics.registry.collect()}
    names = names_of(exposed(Settings(redis_url=server.url)) | captured)
    used = {name for query in queries for name in re.findall(r"\brollout_\w+", query)}
    assert used and used - names == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    at_top = [panel["type"] for panel in board["panels"] if panel["gridPos"]["y"] <= 1]
    assert at_top.count("stat") == 8, "a first row of single figures"
    assert {variable["name"] for variable in board["templating"]["list"]} == {"source", "node", "handler"}
    for figure in ("rollout_reward", "rollout_turns", "rollout_rollouts"):
        assert any(name.startswith(figure) for name in used), figure


def test_every_metric_is_documented_and_every_documented_one_exists(server):
    names = set(exposed(Settings(redis_url=server.url)))
    rows = re.findall(
        r"^\| `(rollout_\w+?)(?:_total)?(?:\{[^}]*\})?` \|", DOCUMENTED.read_text(), re.MULTILINE
    )
    captured = {name for name in rows if name.startswith("rollout_capture_")}
    assert captured == {family.name for family in capture_metrics.registry.collect()}
    documented = {name for name in rows if not name.startswith("rollout_worker_")} - captured
    assert names - documented == set(), "describe them in docs/observability.md"
    assert documented - names == set()


# -- timelines -------------------------------------------------------------------------------


def test_notes_say_what_happened_between_the_states(store):
    rollout_id = submitted(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    assert store.note(rollout_id, claim.fence, {"node": "n"}, "sandbox s1 started on n")
    store.finish(claim, Finish("again", ERROR, delay_s=0))
    again = claimed(store, Stage.INIT, rollout_id, attempt=2)
    assert not store.note(rollout_id, claim.fence, {}, "of an attempt that is over")
    store.finish(again, Finish("handback"))
    claimed(store, Stage.INIT, rollout_id, attempt=2)
    store.cancel(rollout_id)
    store.cancel(rollout_id)
    item = store.get(rollout_id)
    assert [(note.attempt, note.fence, note.text) for note in item.notes] == [
        (1, 1, "sandbox s1 started on n"),
        (1, 1, "init: sandbox is blamed: Full: no room"),
        (2, 2, "handed back: worker init@n stops"),
        (2, 3, "cancel asked for; worker init@n is told"),
    ]
    states = [event.state for event in item.timeline]
    assert states == ["queued", "initializing", "queued", "initializing", "queued", "initializing"]
    assert [note.at for note in item.notes] == sorted(note.at for note in item.notes)


def test_notes_are_bounded_in_number_and_in_size(store):
    rollout_id = submitted(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    for number in range(100):
        store.note(rollout_id, claim.fence, {}, f"{number} " + "ü€𝄞" * 200)
    notes = store.get(rollout_id).notes
    assert len(notes) == 64 and notes[-1].text == "further notes are left out"
    assert all(len(note.text.encode()) <= 404 for note in notes)
    assert notes[0].text.startswith("0 ü€𝄞") and notes[0].text.endswith("…")
    store.finish(claim, Finish("ready"))
    assert store.get(rollout_id).timeline[-1].state is State.READY, "states are written all the same"


# -- log lines -------------------------------------------------------------------------------


@pytest.fixture
def configured():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield lambda **fields: logs.configure(Settings(**fields))
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()


def test_secrets_are_left_out_by_name_by_form_and_by_value(configured, capfd, monkeypatch):
    monkeypatch.setenv("ROLLOUT_TEST_SECRET", "correct-horse")
    configured(log_format="json", redis_url="redis://:staple-battery@h/0")
    secret = "rlt_0123456789ab_" + "f" * 64
    log = structlog.get_logger("test")
    log.info("a", password="p1", api_key="p2", headers={"Authorization": "Bearer p3p3p3p3", "n": [secret]})
    log.info(f"calls with rlm-2-mine:1-{'e' * 64}", path=f"/s/rlw-10-it.s-{'e' * 64}/v1/reward", id="rlm-x")
    log.info("b", url="rediss://u:p4@h/0", tokens=7, text="got correct-horse and staple-battery")
    logging.getLogger("lib").warning("Bearer %s password=p5&x=1", "p6p6p6p6")
    try:
        raise ValueError("staple-battery p=1")
    except ValueError:
        log.exception("c")
    output = capfd.readouterr().err
    for hidden in ("p1", "p2", "p3", "p4", "p5", "p6", "ffff", "eeee", "correct-horse", "staple-battery"):
        assert hidden not in output, hidden
    lines = [json.loads(line) for line in output.splitlines()]
    assert lines[1]["event"] == "calls with rlm-2-***" and lines[1]["id"] == "rlm-x"
    assert lines[1]["path"] == "/s/rlw-10-***/v1/reward"
    assert lines[2]["tokens"] == 7 and lines[2]["url"] == "rediss://***@h/0"
    assert "rlt_0123456789ab_***" in lines[0]["headers"]["n"][0]
    assert "ValueError" in lines[4]["exception"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A gateway and a worker that write JSON; the worker shows metrics of its own."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes:
        directory = tmp_path_factory.mktemp("service")
        with Stack(directory, Path(sandboxes), {"ROLLOUT_LOG_FORMAT": "json"}) as stack:
            stack.worker_metrics = free_port()
            env = {"ROLLOUT_WORKER_METRICS_PORT": str(stack.worker_metrics)}
            stack.start_worker("init,run,eval", "all", env=env)
            yield stack


def lines_of(process):
    entries = []
    for line in process.log.read_text().splitlines():
        if line.startswith("{"):
            entries.append(json.loads(line))
    return entries


def test_every_line_of_a_stage_says_whose_it_is(service):
    """Lines of the stage itself, of its handler, and of a library that knows nothing of rollouts."""
    (item,) = service.client.run([RolloutRequest(handler="chatty", task={})])
    assert item.state is State.COMPLETED
    worker = next(process for process in service.processes if process.name == "all")

    def entries():
        mine = [line for line in lines_of(worker) if line.get("rollout_id") == item.id]
        return {line["event"]: line for line in mine}

    # Written after the rollout has ended.
    wait_until(lambda: "rollout completed" in entries(), 120, "the last line of the rollout", worker)
    for name in ("handler says", "library says"):
        line = entries()[name]
        assert (line["attempt"], line["stage"], line["fence"]) == (1, "run", 2)
        assert (line["worker"], line["node"]) == (f"all@{NODE}", NODE)
        assert line["tenant"] == item.tenant
    assert entries()["rollout completed"]["stage"] == "eval"


def test_every_request_has_an_id_and_a_line(service):
    answer = http.get(f"{service.url}/v1/rollouts/nobody", headers={"X-Request-ID": "mine-1"})
    assert answer.headers["X-Request-ID"] == "mine-1"
    forged = http.get(f"{service.url}/v1/status", headers={"X-Request-ID": "x y {"})
    assert re.fullmatch(r"[0-9a-f]{16}", forged.headers["X-Request-ID"])

    def line():
        return [entry for entry in lines_of(service.gateway) if entry.get("request_id") == "mine-1"]

    wait_until(line, 120, "the line of the request")
    (entry,) = line()
    assert (entry["event"], entry["method"], entry["status"]) == ("request", "GET", 404)
    assert entry["path"] == "/v1/rollouts/nobody" and entry["ms"] > 0


def test_a_worker_shows_its_own_metrics(service):
    url = f"http://127.0.0.1:{service.worker_metrics}"
    (new,) = service.client.submit(RolloutRequest(handler="noop", task={"run_s": 600}))

    def value(line):
        return metric(url, line) or 0.0

    wait_until(lambda: value('rollout_worker_held{stage="run"}') == 1, 120, "the rollout in hand")
    wait_until(lambda: value("rollout_worker_loop_lag_seconds_count") > 0, 120, "the loop to be measured")
    assert value("process_resident_memory_bytes") > 1e6
    service.client.cancel(new.id)
    wait_until(lambda: value('rollout_worker_held{stage="run"}') == 0, 120, "nothing in hand")


def test_the_timeline_is_shown_in_order(service):
    (item,) = service.client.run([RolloutRequest(handler="chatty", task={})])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(_render.timeline_view(item))
    text = console.export_text()
    order = [text.index(word) for word in ("queued", "initializing", "running", "evaluating", "completed")]
    assert order == sorted(order)
    assert f"by all@{NODE}" in text
