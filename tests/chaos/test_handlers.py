"""Handlers as bad as code can be: what can be bounded is. docs/reliability.md says what cannot."""

from __future__ import annotations

import psutil
import pytest

from rollout.schema import RolloutRequest, State
from tests.chaos.harness import PATIENCE_S
from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import wait_until


def submit(chaos, how, limits=None, **task):
    request = RolloutRequest(handler="misbehaves", task={"how": how, **task}, limits=limits or {})
    return chaos.client.submit(request)[0].id


def test_a_handler_that_ignores_its_deadline_or_a_cancel_does_not_keep_its_rollout(chaos, tmp_path):
    """It is still at it when its rollout has ended; only its slot stays taken."""
    late, cancelled = tmp_path / "late", tmp_path / "cancelled"
    forever = 10 * PATIENCE_S
    ids = [
        submit(chaos, "ignore", {"deadline_s": 10}, seconds=forever, note=str(late)),
        submit(chaos, "ignore", seconds=forever, note=str(cancelled)),
    ]
    wait_until(lambda: late.exists() and cancelled.exists(), PATIENCE_S, "the handlers to begin")
    assert chaos.client.cancel(ids[1])["cancelling"]
    items = [chaos.client.wait(rollout_id, PATIENCE_S) for rollout_id in ids]
    assert [item.state for item in items] == [State.TIMED_OUT, State.CANCELLED]
    assert items[0].error.blame == "timeout"
    assert all(item.drop and item.reward is None for item in items)
    chaos.require_exact(ids)
    chaos.kill_workers(["run"])  # it would not stop by itself before they return


def test_a_handler_that_blocks_the_event_loop_delays_its_neighbours_and_fails_none(chaos):
    """Heartbeats come from a thread of their own."""
    neighbours = chaos.submit(20)
    blocking = submit(chaos, "block", seconds=5)
    ids = [*neighbours, *chaos.submit(20), blocking]
    chaos.require_exact(ids)
    for rollout_id in ids:
        item = chaos.client.get(rollout_id, include="summary")
        assert item.state is State.COMPLETED and item.attempt == 1


@pytest.mark.parametrize("stage", CHAOS("stages that a handler ends", short=["eval"], long=["run", "eval"]))
def test_a_handler_that_ends_its_worker_costs_the_others_an_attempt(chaos, stage):
    """Also a scorer: what it did before it died is no reward."""
    gates = chaos.gates()
    for earlier in ("init", "run")[: ("run", "eval").index(stage) + 1]:
        (gates / earlier).touch()
    ids = chaos.submit(10, gates)
    chaos.wait_for_held(ids, stage, 10)
    how = "exit" if stage == "run" else "scorer_exits"
    killer = submit(chaos, how, {"max_attempts": 1})
    doomed = chaos.workers.pop(stage)
    wait_until(lambda: doomed.popen.poll() is not None, PATIENCE_S, "the worker to die")
    chaos.processes.remove(doomed)
    chaos.start_stages([stage])
    for each in ("run", "eval"):
        (gates / each).touch()
    chaos.require_exact([*ids, killer])
    item = chaos.client.get(killer, include="summary")
    assert item.state is State.FAILED and item.error.blame == "infrastructure" and item.reward is None
    assert all(chaos.client.get(i, include="summary").state is State.COMPLETED for i in ids)


def test_a_worker_whose_handlers_leak_starts_anew_and_loses_no_rollout(chaos):
    """In place: the process id stays, the memory goes, and what it had in hand costs no attempt."""
    chaos.kill_workers(["run"])
    chaos.env["ROLLOUT_WORKER_MAX_MEMORY_MB"] = "600"
    usual = chaos.env.get("ROLLOUT_LEASE_S")
    # A slow machine must not take the leases away before the worker hands back.
    chaos.env["ROLLOUT_LEASE_S"] = "60"
    try:
        chaos.start_stages(["run"])
        worker = chaos.workers["run"]
        ids, gates = chaos.submit_up_to("run", 20)
        chaos.wait_for_held(ids, "run", 20)
        leaking = [submit(chaos, "leak") for _ in range(2)]

        def count_of(what: str) -> int:
            return worker.log.read_text(errors="replace").count(what)

        wait_until(lambda: count_of("starts anew"), PATIENCE_S, "the worker to find itself too large", worker)

        # Once more where it was too large before the second one had leaked, who then leaks in its next life.
        def renewed() -> bool:
            lives = count_of("worker ready")
            return lives >= 2 and psutil.Process(worker.pid).memory_info().rss < 600 << 20

        wait_until(renewed, PATIENCE_S, "it to be there again, and small", worker)
        (gates / "run").touch()
        (gates / "eval").touch()
        chaos.require_exact([*ids, *leaking])
        assert count_of("worker ready") <= 3, "a life for each that leaks, and the first"
        for rollout_id in ids:
            item = chaos.client.get(rollout_id, include="summary")
            assert (item.state, item.attempt) == (State.COMPLETED, 1)
            assert any("handed back" in note.text for note in item.notes)
    finally:
        del chaos.env["ROLLOUT_WORKER_MAX_MEMORY_MB"], chaos.env["ROLLOUT_LEASE_S"]
        if usual is not None:
            chaos.env["ROLLOUT_LEASE_S"] = usual
        chaos.kill_workers(["run"])
