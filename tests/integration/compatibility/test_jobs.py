"""Jobs of ProRL's clients that wait: no worker is there yet, so this file comes first."""

from __future__ import annotations

import json

import pytest

from rollout.schema import Rollout, State
from tests.helpers.compatibility import PATIENCE_S, hang_up, waiters
from tests.helpers.prorl_client import Process
from tests.helpers.stack import Stack, wait_until


def queued(stack: Stack, count: int) -> list[Rollout]:
    """The rollouts that wait, once they are so many."""

    def look() -> list[Rollout] | None:
        rollouts = stack.client.list(state=State.QUEUED).rollouts
        return rollouts if len(rollouts) == count else None

    return wait_until(look, PATIENCE_S, f"{count} queued rollouts") or []


def test_cancelling_a_queued_job_answers_at_once(idle, waiting):
    held = Process(waiting, {"data_source": "noop", "instance_id": "a"}, job_id="one")
    queued(idle, 1)
    status = waiting.status()
    assert (status["running"], status["pending_jobs"], status["jobs"], status["init_queue"]) == (
        True,
        1,
        0,
        1,
    )
    assert waiting.cancel("one") == "cancelled"
    row = held.result()
    assert (row["filter"], row["success"], row["critical_error"]) == (True, False, "init")
    assert row["replayed"] is False, "nobody had it before"
    assert waiting.cancel("one") in ("unknown", "ended") and waiting.cancel("never there") == "unknown"
    assert waiting.status()["pending_jobs"] == 0


def test_stop_cancels_what_is_under_way_and_ids_begin_anew(idle, waiting):
    held = [Process(waiting, {"data_source": "noop", "instance_id": k}, job_id=str(k)) for k in range(3)]
    queued(idle, 3)
    assert waiting.post("/stop").json()["cancelled"] == 3
    assert [call.result()["filter"] for call in held] == [True] * 3
    assert waiting.post("/process", {"instance": {"data_source": "noop"}}).status_code == 409
    assert waiting.status()["running"] is False
    assert waiting.post("/start").status_code == 200
    fresh = Process(waiting, {"data_source": "noop", "instance_id": "other"}, job_id="1")
    queued(idle, 1)
    waiting.cancel("1")
    assert fresh.result()["instance_id"] == "other"


def test_a_killed_gateway_costs_a_job_with_an_id_nothing(idle, waiting):
    held = Process(waiting, {"data_source": "noop", "instance_id": "kept"}, job_id="kept-0")
    (before,) = queued(idle, 1)
    idle.gateway.kill()
    idle.gateway = idle.start_gateway()
    # Its client sends the same again by itself; here it did, once the gateway has one that waits.
    wait_until(lambda: waiters(idle) == 1, PATIENCE_S, "the client to come back")
    assert [rollout.id for rollout in queued(idle, 1)] == [before.id]
    answer = waiting.post("/process", {"instance": {"data_source": "noop", "run_s": 1}, "job_id": "kept-0"})
    assert answer.status_code == 409 and answer.json()["errors"][0]["field"] == "job_id"
    waiting.cancel("kept-0")
    assert held.result()["instance_id"] == "kept"


def test_a_client_that_hangs_up_cancels_a_job_that_nobody_could_ask_for_again(idle, waiting):
    cancelled = idle.client.status()["states"]["cancelled"]
    hang_up(idle, '{"instance": {"data_source": "noop"}, "job_id": "named"}')
    (named,) = queued(idle, 1)
    hang_up(idle, '{"instance": {"data_source": "noop"}}')
    wait_until(lambda: idle.client.status()["states"]["cancelled"] == cancelled + 1, PATIENCE_S, "its end")
    assert [rollout.id for rollout in queued(idle, 1)] == [named.id]
    assert waiting.cancel("named") == "cancelled"


@pytest.mark.parametrize("job", [{"job_id": "left"}, {"job_id": "task-9"}])
def test_a_cancelled_job_that_nobody_waited_for_runs_anew_under_its_id(idle, waiting, job):
    instance = {"data_source": "noop", "instance_id": "task-9", "trajectory_id": 4}
    hang_up(idle, json.dumps({"instance": instance} | job))
    (left,) = queued(idle, 1)
    assert waiting.cancel(job["job_id"]) == "cancelled"
    held = Process(waiting, instance, **job)
    (anew,) = queued(idle, 1)
    assert anew.id != left.id
    assert waiting.cancel(job["job_id"]) == "cancelled" and held.result()["filter"]


def test_cancelling_a_name_that_several_repeats_share_ends_all_of_them(idle, waiting):
    instance = {"data_source": "noop", "instance_id": "task-1"}
    held = [Process(waiting, instance, job_id="task-1") for _ in range(2)]
    held.append(Process(waiting, instance | {"trajectory_id": 3}, job_id="task-1"))
    assert len({rollout.id for rollout in queued(idle, 3)}) == 3
    assert waiting.cancel("task-1") == "cancelled"
    assert [call.result()["filter"] for call in held] == [True] * 3
    assert waiting.cancel("task-1") == "ended" and waiting.cancel("task-2") == "unknown"
