"""Shares, the bound ahead of RUN, and stops of nodes, through real workers."""

from __future__ import annotations

import re
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from click.testing import CliRunner

from rollout.cli import main
from rollout.schema import Blame, RolloutRequest, Stage, State
from sandbox.room import DISK, MIB, Floors, free_disk
from services.dispatch import Dispatcher, _expand
from services.queues import INIT, make_celery
from services.settings import Settings
from services.state import keys
from services.state.fleet import ANNOUNCE_EVERY_S
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
from services.state.tenants import Tenant, TenantStore
from tests.helpers.chores import Clock, services
from tests.helpers.keys import metric
from tests.helpers.sandboxes import leftovers, stop_host
from tests.helpers.stack import NODE, Stack, wait_until
from workers.chores.admission import LEAST_AHEAD, LOOK_WHEN_CLOSED_S, SLOTS_EVERY_S, Admission
from workers.held import CANCEL, SHUTDOWN
from workers.process import WorkerProcess

AHEAD = 4
PATIENCE_S = 120
LIVE = ("queued", "initializing", "ready", "running", "evaluating")


class Service:
    """A stack, and submissions of any tenant: its gateway has no keys."""

    def __init__(self, stack):
        settings = Settings(redis_url=stack.redis.url)
        self.stack = stack
        self.redis = connect(stack.redis.url)
        self.store = RolloutStore(self.redis, settings)
        self.dispatcher = Dispatcher(make_celery(settings), self.store)

    def submit(self, tenant, count=1, **fields):
        request = RolloutRequest(**{"handler": "noop", **fields})
        return [rollout.id for rollout in self.dispatcher.submit([request] * count, Tenant(name=tenant))]

    def wait(self, rollout_id):
        wait_until(lambda: self.store.state(rollout_id).terminal, PATIENCE_S, f"the end of {rollout_id}")
        return self.store.get(rollout_id)

    def metric(self, line):
        return metric(self.stack.url, line)

    def wait_for_metric(self, line, value):
        wait_until(lambda: self.metric(line) == value, PATIENCE_S, f"{line} {value}")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """INIT goes four rollouts ahead; there is no RUN worker until a test starts one."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            env = {"ROLLOUT_READY_AHEAD": str(AHEAD)}
            with Stack(tmp_path_factory.mktemp("small"), Path(sandbox_dir), env) as stack:
                stack.start_workers({"init": "init", "eval": "eval"}, slots=4)
                yield Service(stack)
                wait_until(lambda: leftovers(stack.sandbox_dir) == [], PATIENCE_S, "all sandboxes to be gone")
        finally:
            stop_host(Path(sandbox_dir))


# ------------------------------------------------------------------------------ whole services


def test_init_waits_for_run_and_leaves_the_messages_in_their_queue(service):
    ids = service.submit("a", 20)
    service.wait_for_metric(f'rollout_node_init_waits{{node="{NODE}"}}', 1)

    def settled():
        counts = service.store.counts()
        return not counts["initializing"] and service.redis.llen(INIT) == counts["queued"]

    wait_until(settled, PATIENCE_S, "the messages to be back in place")
    ready = service.store.counts()["ready"]
    # What INIT had in hand when the bound was reached comes on top.
    assert AHEAD <= ready < 2 * AHEAD
    assert service.metric('rollout_ready_ahead{node="-"}') == ready
    assert service.metric('rollout_tenant_waiting{tenant="a"}') == 20 - ready
    assert service.stack.client.status()["nodes"][NODE]["full"] is True
    log = (service.stack.directory / "init.log").read_text()
    assert "INIT waits: it is far enough ahead of RUN" in log

    # Connections that Celery makes anew while INIT is closed must not keep it closed for ever.
    service.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    service.stack.start_worker("run", slots=4)
    assert {service.wait(id_).state for id_ in ids} == {State.COMPLETED}
    assert service.redis.keys("ahead:*") == []
    service.wait_for_metric(f'rollout_node_init_waits{{node="{NODE}"}}', 0)


def test_a_tenant_with_500_waiting_rollouts_does_not_delay_another_s_single_one(service):
    """Counted in rollouts, not in seconds: how many of the many ended between its submission and its end."""
    many = service.submit("big", 500, task={"run_s": 0.2})
    states = service.store.state
    wait_until(lambda: any(states(id_).terminal for id_ in many), PATIENCE_S, "the first of them to end")
    (single,) = service.submit("little", task={"run_s": 0.2})
    item = service.wait(single)
    assert item.state is State.COMPLETED
    # Both times are Redis' own.
    since = f"{round(item.created_at * 1000)}-0"
    overtaken_by = len(service.redis.xrange(keys.RESULTS, since, item.completion)) - 1
    assert service.redis.zcard(keys.fair_waiting("big")) > 0, "the many were through: this showed nothing"
    for id_ in many:
        service.dispatcher.cancel(id_)
    # At most what INIT, RUN and EVAL had in hand, what was ready, and one turn.
    assert overtaken_by <= 40
    counts = service.store.counts
    wait_until(lambda: not any(counts()[state] for state in LIVE), PATIENCE_S, "everything to end")
    assert service.redis.keys("ahead:*") == service.redis.keys("fair:waiting:*") == []


def test_a_sandbox_that_the_tenant_may_not_have_is_refused_by_the_worker(service):
    """Nobody else sees it: this submission does not come through the gateway."""
    TenantStore(service.redis).set(Tenant(name="limited", images=("special",)))
    (new,) = service.submit("limited", handler="in_tool")
    item = service.wait(new)
    assert (item.state, item.attempt, item.error.blame) == (State.FAILED, 1, Blame.TASK)
    assert "image 'base': tenant 'limited' may not use it; allowed images: special" in item.error.message
    assert item.reward is None and item.sandbox is None


def test_a_node_short_of_memory_leaves_rollouts_to_one_that_has_room(service):
    (worker,) = (process for process in service.stack.processes if process.name == "init")
    worker.stop()
    short = {"ROLLOUT_NODE": "short", "ROLLOUT_NODE_MIN_FREE_MEMORY_MB": str(1 << 40)}
    service.stack.start_worker("init", "starved", slots=2, env=short)
    service.wait_for_metric('rollout_node_stopped{node="short",reason="memory"}', 1)
    (new,) = service.submit("a")
    (why,) = service.stack.client.status()["nodes"]["short"]["stopped"].values()
    assert re.fullmatch(r"\d+ MiB of memory are left, fewer than ROLLOUT_NODE_MIN_FREE_MEMORY_MB=\d+", why)
    shown = CliRunner().invoke(main, ["status", "--url", service.stack.url], terminal_width=300)
    assert "node short" in shown.output and "INIT is stopped" in shown.output
    log = service.stack.directory / "starved.log"
    assert log.read_text().count("INIT STOPS ON THIS NODE") == 1
    wait_until(lambda: "Canceling queue init" in log.read_text(), PATIENCE_S, "it to stop consuming")
    assert service.store.state(new) is State.QUEUED
    service.stack.start_worker("init", "fed", slots=2)
    item = service.wait(new)
    assert item.state is State.COMPLETED and item.attempt == 1
    assert item.timeline[1].owner == f"fed@{NODE}"


# ------------------------------------------------------------------------------ parts of a worker


@pytest.fixture
def parts(server, tmp_path):
    """An `Admission` whose looks the test makes itself, on a Redis without rollouts."""
    client = connect(server.url)
    client.flushall()
    settings = Settings(redis_url=server.url, node="n")
    host = SimpleNamespace(state=tmp_path / "not" / "there")
    parts = services(client, settings, "init@n", host=host)
    parts.app.amqp.queues.select([INIT])
    return Admission(parts), parts.store, parts.fleet


def test_a_stopped_node_goes_on_only_when_a_quarter_more_than_the_floor_is_free(parts, tmp_path):
    admission, _, fleet = parts
    admission.floors = Floors(0, 0)
    with structlog.testing.capture_logs() as logs:
        admission.tick()
        assert admission.is_open
        admission.floors = Floors(disk_mb=free_disk(tmp_path) // MIB * 2, memory_mb=0)
        admission.tick()
        admission.tick()
        assert not admission.is_open and list(fleet.admissions()["n"].stopped) == [DISK]
        # Enough to start with, but not yet enough to go on.
        admission.floors = Floors(disk_mb=free_disk(tmp_path) // MIB * 9 // 10, memory_mb=0)
        admission.tick()
        assert not admission.is_open
        admission.floors = Floors(disk_mb=free_disk(tmp_path) // MIB // 2, memory_mb=0)
        admission.tick()
    assert admission.is_open and fleet.admissions()["n"].stopped == {}
    assert [entry["log_level"] for entry in logs if "reason" in entry] == ["warning", "info"], "once a change"


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("workers.chores.admission.time", clock)
    return clock


def test_the_bound_ahead_of_run_follows_the_slots_of_live_run_workers(parts, clock):
    admission, _, fleet = parts
    assert admission.bounds() == (LEAST_AHEAD, LEAST_AHEAD)
    fleet.announce("run@n", ["run"], "n", 100)
    fleet.announce("run@m", ["run"], "m", 300)
    fleet.announce("eval@n", ["eval"], "n", 1000)
    assert fleet.run_slots("n") == (100, 400)
    admission.tick()
    assert admission.bounds() == (100, 400)
    fleet.leave("run@m")
    assert fleet.run_slots("n") == (100, 100)
    clock.now += SLOTS_EVERY_S + 0.1
    admission.tick()
    assert admission.bounds() == (100, 100)
    admission._settings = Settings(ready_ahead=7)
    assert admission.bounds() == (7, 7)


def test_each_bound_stops_init_by_itself_and_what_is_told_is_the_nodes(parts):
    admission, store, fleet = parts
    admission._settings = Settings(node="n", ready_ahead=2)
    store.submit([new for _ in range(5) for new in _expand(RolloutRequest(handler="noop"))])
    elsewhere = [store.claim_next("w", node="m") for _ in range(2)]
    here = store.claim_next("w", node="n")
    admission.tick()
    assert admission.is_open
    state = fleet.admissions()["n"]
    assert (state.full, state.ahead, state.most_ahead) == (False, 1, 2)
    for claim in elsewhere:
        store.finish(claim, Finish(State.READY))
    admission.tick()
    assert not admission.is_open, "two without a sandbox are ready"
    state = fleet.admissions()["n"]
    assert (state.full, state.ahead, state.most_ahead) == (True, 1, 2)
    assert state.free_disk > 0 and state.free_memory > 0
    store.finish(here, Finish(State.CANCELLED))
    for claim in elsewhere:
        store.cancel(claim.rollout_id)
    admission.tick()
    assert admission.is_open


def test_celery_is_told_to_consume_or_not_and_again_where_it_has_not_heard(parts, clock, monkeypatch):
    admission, _, _ = parts
    orders, app = [], admission._app
    for what in ("add_consumer", "cancel_consumer"):
        note = lambda queue, destination, what=what: orders.append((what, queue, *destination))  # noqa: E731
        monkeypatch.setattr(app.control, what, note)
    admission.floors = Floors(0, 0)
    admission.tick()
    assert orders == [], "it consumes, as it is to"
    admission.floors = Floors(disk_mb=1 << 40, memory_mb=0)
    for seconds in (0.0, LOOK_WHEN_CLOSED_S / 2, LOOK_WHEN_CLOSED_S):
        clock.now += seconds
        admission.tick()
    assert orders == [("cancel_consumer", INIT, "init@n")] * 2
    app.amqp.queues.deselect(INIT)
    clock.now += 1.0
    admission.tick()
    assert len(orders) == 2
    admission.floors = Floors(0, 0)
    admission.tick()
    assert orders[2:] == [("add_consumer", INIT, "init@n")]


def test_a_node_says_at_once_what_has_changed_and_else_that_it_lives(parts, clock):
    admission, _, _ = parts
    admission.floors = Floors(0, 0)
    client = connect(admission._settings.redis_url)
    entries = []
    for seconds, floors in ((0.0, 0), (1.0, 0), (ANNOUNCE_EVERY_S, 0), (0.1, 1 << 40), (0.1, 1 << 40)):
        clock.now += seconds
        admission.floors = Floors(floors, 0)
        admission.tick()
        entries.append(client.hget(keys.FLEET_ADMISSION, "n"))
    first, same, again, stopped, still = entries
    assert first == same != again != stopped == still


def test_who_waits_for_room_is_woken_by_the_look_that_finds_it(parts):
    admission, _, _ = parts
    admission.floors = Floors(0, 0)
    assert admission.is_open and not admission.wait_for_room(0.05), "a look of before says nothing"
    admission.stopped = {DISK: "none is left"}
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(admission.wait_for_room(PATIENCE_S)))
    waiting.start()
    wait_until(lambda: admission._looked._waiters, PATIENCE_S, "it to wait")
    admission.tick()
    waiting.join(PATIENCE_S / 2)
    assert answers == [True]


def test_a_claim_that_finds_the_bound_reached_has_it_looked_at_again(parts):
    admission, _, _ = parts
    admission.interval_s = PATIENCE_S
    admission.floors = Floors(0, 0)
    looking = threading.Thread(target=admission.run)
    looking.start()
    wait_until(lambda: admission._looks == 1, PATIENCE_S / 2, "the first look")
    admission.ring()
    wait_until(lambda: admission._looks == 2, PATIENCE_S / 2, "another one")
    admission.stop()
    looking.join(PATIENCE_S)
    assert not looking.is_alive()


def test_init_goes_on_once_a_quarter_of_the_bound_has_gone(parts):
    admission, store, _ = parts
    store.submit([new for _ in range(LEAST_AHEAD) for new in _expand(RolloutRequest(handler="noop"))])
    claims = [store.claim_next("w", node="n") for _ in range(LEAST_AHEAD)]
    with structlog.testing.capture_logs() as logs:
        admission.tick()
        assert admission.full
        for ended, claim in enumerate(claims, 1):
            store.finish(claim, Finish(State.CANCELLED))
            admission.tick()
            assert admission.full == (ended <= LEAST_AHEAD // 4), ended
    events = [entry["event"] for entry in logs]
    assert events == ["INIT waits: it is far enough ahead of RUN", "INIT goes on: RUN took rollouts"]


def test_a_cancel_between_the_claim_and_its_entry_is_not_missed(parts, server):
    """Which rollout INIT gets is known only from the answer; its cancel may be heard before that."""
    settings = Settings(redis_url=server.url)
    process = WorkerProcess(make_celery(settings), settings, "w", [Stage.INIT], 1)
    _, store, _ = parts
    store.submit([new for _ in range(3) for new in _expand(RolloutRequest(handler="noop"))])
    with process.claiming() as cancelled:
        claim, second = (store.claim_next("w", node="n") for _ in range(2))
        process._cancel(claim.rollout_id)
        held, untouched = process.hold(claim, cancelled), process.hold(second, cancelled)
    assert (held.reason, untouched.reason) == (CANCEL, None)
    process._cancel(second.rollout_id)
    assert untouched.reason == CANCEL
    with process.claiming() as cancelled:
        third = store.claim_next("w", node="n")
        process._cancel("somebody else's")
        assert process.hold(third, cancelled).reason is None


def test_a_stopping_worker_hands_back_what_a_claim_brings_after_all(parts, server):
    settings = Settings(redis_url=server.url, shutdown_grace_s=0, lease_s=600)
    process = WorkerProcess(make_celery(settings), settings, "w", [Stage.INIT], 1)
    _, store, _ = parts
    store.submit(_expand(RolloutRequest(handler="noop")))
    with process.claiming() as cancelled:
        claim = store.claim_next("w", node="n")
        stopping = threading.Thread(target=process.stop)
        stopping.start()
        wait_until(lambda: process._hands_back, PATIENCE_S, "the grace to be over")
        assert stopping.is_alive(), "it waits for the claim under way"
        held = process.hold(claim, cancelled)
    assert held.reason == SHUTDOWN and stopping.is_alive()
    process.let_go(held)
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
