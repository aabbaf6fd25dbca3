"""Stages from claim to finish: a worker's real process object on a real Redis, without Celery."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from rollout.schema import Backend, Blame, ErrorInfo, Limits, Stage, State
from rollout.trajectory import FinishReason
from services.state import keys
from services.state.rollouts.store import Finish, error_fields
from tests.helpers.stage_worker import NODE, Worker, meanwhile, stage_worker
from workers import process as processes
from workers.errors import InfrastructureError
from workers.held import CANCEL, LOST, OVERDUE, SHUTDOWN, Held
from workers.sandboxes import owner_of
from workers.stage import outcome_fields


@pytest.fixture
def worker(server, monkeypatch):
    with stage_worker(server, monkeypatch) as worker:
        yield worker


# -- how a stage ends ------------------------------------------------------------------------


ENDS = [
    # stage, what happens meanwhile, the state after it, whether its sandbox is ended, who is rung for
    (Stage.INIT, "nothing", State.READY, False, None),
    (Stage.RUN, "nothing", State.EVALUATING, False, None),
    (Stage.EVAL, "nothing", State.COMPLETED, True, None),
    (Stage.INIT, SHUTDOWN, State.QUEUED, True, "init"),
    (Stage.RUN, SHUTDOWN, State.QUEUED, True, "init"),
    (Stage.EVAL, SHUTDOWN, State.EVALUATING, False, f"eval.{NODE}"),
    (Stage.INIT, "cancel unheard", State.CANCELLED, True, None),
    (Stage.RUN, "cancel unheard", State.CANCELLED, True, None),
    (Stage.EVAL, "cancel unheard", State.COMPLETED, True, None),
    (Stage.RUN, CANCEL, State.CANCELLED, True, None),
    (Stage.RUN, OVERDUE, State.TIMED_OUT, True, None),
    # By then it may be what another worker goes on in.
    (Stage.INIT, LOST, State.QUEUED, False, None),
    (Stage.RUN, LOST, State.QUEUED, False, None),
    (Stage.EVAL, LOST, State.EVALUATING, False, None),
]


@pytest.mark.parametrize(("stage", "what", "entered", "ended", "rung"), ENDS)
def test_a_stage_leaves_a_sandbox_to_the_next_one_alone(worker, stage, what, entered, ended, rung):
    rollout_id = worker.submit()
    worker.brings_to(stage, rollout_id, boxed=True)
    goes_on = worker.does(stage, rollout_id, meanwhile(worker, what))
    item = worker.store.get(rollout_id)
    assert (item.state, item.attempt) == (entered, 1 + (what == LOST))
    assert (item.sandbox is None) == (entered is State.QUEUED), "whoever begins anew gets another one"
    assert set(worker.host.released) == ({owner_of(rollout_id, 1)} if ended else set())
    assert goes_on == (what == "nothing" or (stage is Stage.EVAL and entered is State.COMPLETED))
    queues = {
        name: worker.redis.llen(name) for name in ("init", "run", "eval", f"run.{NODE}", f"eval.{NODE}")
    }
    assert {name for name, length in queues.items() if length} == ({rung} if rung else set())
    assert not worker.process._held, "its slot is free"


def test_a_worker_that_stops_puts_the_bell_back(worker):
    rollout_id = worker.submit()
    worker.process.admission.stopped = {"disk": "none is left"}
    before = time.monotonic()
    assert not worker.does(Stage.INIT, rollout_id)
    assert time.monotonic() - before >= 1.0, "it waits for room"
    assert (worker.redis.llen("init"), worker.store.state(rollout_id)) == (1, State.QUEUED)


def test_a_message_for_somebody_else_is_dropped_and_ends_its_chain(worker):
    rollout_id = worker.submit()
    assert not worker.does(Stage.RUN, rollout_id)
    assert (worker.redis.llen("init"), worker.store.state(rollout_id)) == (0, State.QUEUED)


# -- what the stages write -------------------------------------------------------------------


def test_a_rollout_goes_through_and_its_metrics_are_those_of_all_stages(worker):
    rollout_id = worker.submit()
    assert [worker.does(stage, rollout_id) for stage in Stage] == [True, True, True]
    item = worker.store.get(rollout_id)
    assert (item.state, item.reward) == (State.COMPLETED, 1.0)
    assert item.metrics["of_init"] == 1.0 and "no_number" not in item.metrics
    assert "NaN" not in worker.redis.hget(keys.record(rollout_id), "metrics")


def test_run_gives_its_backend_back_however_it_ends(worker):
    backend = Backend(id="b", url="http://b", model="m", tokenizer="t", max_model_len=100)
    worker.services.backends.put(backend)
    rollout_id = worker.submit("asking")
    worker.brings_to(Stage.RUN, rollout_id)
    assert worker.does(Stage.RUN, rollout_id), "EVAL ends it, and does not score it"
    item = worker.store.get(rollout_id)
    assert (item.state, item.backend, item.error.blame) == (State.EVALUATING, "b", Blame.HANDLER)
    (record,) = worker.services.backends.list()
    assert (record.load, record.live_rollouts) == (0.0, 0)
    assert worker.services.backends.totals()["placed"] == 1
    worker.does(Stage.EVAL, rollout_id)
    item = worker.store.get(rollout_id)
    assert (item.state, item.reward, item.error.message) == (State.FAILED, None, "broken")


def test_a_stage_ends_at_its_own_time_limit(worker):
    limits = Limits(init_timeout_s=0.1, max_attempts=2)
    slow = worker.submit(task={"init_s": 60.0}, limits=limits)
    assert not worker.does(Stage.INIT, slow)
    item = worker.store.get(slow)
    assert (item.state, item.attempt) == (State.QUEUED, 2), "a time-out of INIT is tried again"
    assert any("init_timeout_s = 0.1" in note.text for note in item.notes)
    cut = worker.submit(task={"run_s": 60.0}, limits=Limits(run_timeout_s=0.1))
    assert [worker.does(stage, cut) for stage in Stage] == [True, True, True]
    item = worker.store.get(cut)
    assert (item.state, item.reward, item.drop) == (State.TIMED_OUT, 1.0, False), "what was reached is scored"
    assert item.finish_reason is FinishReason.TIME_LIMIT


def test_another_attempt_waits_twice_as_long_each_time(worker):
    async def body(run):
        raise InfrastructureError("away")

    rollout_id = worker.submit(limits=Limits(max_attempts=4))

    def now():
        seconds, micros = worker.redis.time()
        return seconds * 1000 + micros // 1000

    for attempt, wait_s in ((1, 2), (2, 4), (3, 8)):
        began = now()
        assert not worker.does(Stage.INIT, rollout_id, body, attempt)
        assert began <= worker.redis.zscore(keys.DUE, rollout_id) - 1000 * wait_s <= now()
        worker.redis.zadd(keys.DUE, {rollout_id: 0})
        worker.store.overdue()
    worker.does(Stage.INIT, rollout_id, body, 4)
    assert worker.store.get(rollout_id).state is State.FAILED


def test_a_failure_takes_a_reward_away_that_a_stage_had_written(worker):
    fields = error_fields(ErrorInfo(blame=Blame.HANDLER, type="E", message="m"))
    rollout_id = worker.submit()
    worker.brings_to(Stage.EVAL, rollout_id)
    claim = worker.store.claim(rollout_id, 1, Stage.EVAL, "w")
    worker.store.finish(claim, Finish(State.FAILED, outcome_fields(reward=1.0) | fields))
    item = worker.store.get(rollout_id)
    assert (item.reward, item.drop, item.drop_reason) == (None, True, "handler: E")


# -- leases ----------------------------------------------------------------------------------


class Beats:
    """In place of the event that a stopping worker sets: so many pauses, which take no time."""

    def __init__(self, count, between):
        self.pauses, self._count, self._between = [], count, between

    def wait(self, pause):
        self.pauses.append(pause)
        self._between(len(self.pauses))
        return len(self.pauses) > self._count


def test_what_a_worker_holds_is_kept_alive_three_times_a_lease(worker):
    claim, _ = worker.holds(worker.submit())
    record = keys.record(claim.rollout_id)

    def fade(_):
        worker.redis.hset(record, "lease", 1)
        worker.redis.zadd(keys.DUE, {claim.rollout_id: 1})

    worker.process.stopping = beats = Beats(2, lambda number: None if number > 2 else fade(number))
    worker.process._beat()
    assert beats.pauses == [10.0, 10.0, 10.0]
    assert worker.store.overdue() == [] and worker.store.get(claim.rollout_id).attempt == 1


def test_a_heartbeat_that_redis_did_not_answer_is_sent_again_before_a_lease_is_judged(worker, monkeypatch):
    worker.holds(worker.submit())
    heartbeat, calls = worker.store.heartbeat, []

    def fails_first(held):
        calls.append(list(held))
        if len(calls) == 1:
            raise redis.ConnectionError("away")
        return heartbeat(calls[-1])

    monkeypatch.setattr(worker.store, "heartbeat", fails_first)
    worker.process.stopping = beats = Beats(2, lambda number: None)
    worker.process._beat()
    assert beats.pauses == [10.0, processes.BEAT_AGAIN_S, 10.0]
    assert calls[0] == calls[1], "the same leases"


@pytest.mark.parametrize("what", [CANCEL, LOST, OVERDUE, "a jump of the clock", "nothing"])
def test_a_worker_hears_by_its_heartbeat_of_what_it_missed(worker, what):
    claim, held = worker.holds(worker.submit())
    record = keys.record(claim.rollout_id)
    if what == CANCEL:
        worker.store.cancel(claim.rollout_id)
    elif what == LOST:
        worker.redis.hincrby(record, "fence", 1)
    elif what in (OVERDUE, "a jump of the clock"):
        worker.redis.hset(record, "deadline", 1)
    if what == OVERDUE:
        held.ends_at = time.monotonic()
    worker.process.stopping = Beats(1, lambda number: None)
    worker.process._beat()
    assert held.reason == (what if what in (CANCEL, LOST, OVERDUE) else None)


def test_the_first_reason_to_interrupt_a_stage_counts(worker):
    held = Held("r", Stage.RUN)
    held.interrupt(CANCEL)
    held.interrupt(SHUTDOWN)
    assert held.reason == CANCEL


def test_one_message_cancels_all_that_it_names_and_nobody_else(worker):
    held = [worker.holds(worker.submit())[1] for _ in range(3)]
    worker.process._cancel(f"{held[0].rollout_id} {held[2].rollout_id} gone")
    assert [claim.reason for claim in held] == [CANCEL, None, CANCEL]


def test_work_under_an_old_fence_and_under_the_new_one_are_two(worker):
    rollout_id = worker.submit()
    old, _ = worker.holds(rollout_id)
    worker.redis.hset(keys.record(rollout_id), "lease", 0)
    worker.redis.zadd(keys.DUE, {rollout_id: 0})
    worker.store.overdue()
    with worker.process.claiming() as cancelled:
        new = worker.store.claim(rollout_id, 2, Stage.INIT, "w")
        worker.process.hold(new, cancelled)
    assert [fence for _, fence in worker.process._held] == [old.fence, new.fence]
    worker.process.let_go(worker.process._held[rollout_id, old.fence])
    assert [fence for _, fence in worker.process._held] == [new.fence]


def test_a_worker_that_stops_hands_back_what_it_holds_and_leaves_the_list(server):
    worker = Worker(server.url, shutdown_grace_s=0, lease_s=600)
    worker.services.announce()
    assert worker.redis.zrange(keys.workers("run"), 0, -1) == ["w"]
    _, held = worker.holds(worker.submit())
    stopping = threading.Thread(target=worker.process.stop)
    stopping.start()
    deadline = time.monotonic() + 120
    while held.reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held.reason == SHUTDOWN and stopping.is_alive(), "its lease is kept until the hand-back is written"
    worker.process.let_go(held)
    stopping.join(30)
    assert not stopping.is_alive() and worker.redis.zrange(keys.workers("run"), 0, -1) == []
