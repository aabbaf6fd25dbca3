"""A node that cannot start an image leaves its rollouts to others, and no attempt is used up."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import pytest

from rollout.schema import Blame, RolloutRequest, Stage, State
from sandbox.errors import ImageError, NotAllowed, RuntimeUnavailable
from sandbox.images import ImageStore
from services.settings import Settings
from services.state import keys
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts import store as rollouts
from services.state.rollouts.store import NewRollout, RolloutStore
from tests.helpers.chores import services
from tests.helpers.sandboxes import require_apptainer, stop_host
from tests.helpers.stack import NODE, Stack
from workers.held import Held
from workers.services import WorkerServices
from workers.stage import StageRun, work


@pytest.fixture
def store(server):
    client = connect(server.url)
    client.flushall()
    return RolloutStore(client, Settings(redis_url=server.url))


def fade(store, node, *ids):
    """So much time has passed that these rollouts may be tried on the node again."""
    at = store._redis.time()[0] * 1000 - int(rollouts.ABSENT_S * 1000)
    for id_ in ids:
        assert not store._redis.hset(keys.record(id_), rollouts.ABSENT + node, at), "it has a mark"


def submit(store, *ids):
    request = RolloutRequest(handler="noop")
    for id_ in ids:
        store.submit([NewRollout(id_, id_, 0, request, request.model_dump_json(), "digest")])


def claim(store, node):
    claim = claimed_by(store, node)
    return claim if isinstance(claim, str) else claim.rollout_id


def claimed_by(store, node):
    return store.claim_next(f"init@{node}", node=node)


def tried(store, node, rollout_id, error):
    """A worker of `node` claims the rollout, and its INIT ends so; the state after it."""
    claim = claimed_by(store, node)
    assert not isinstance(claim, str) and claim.rollout_id == rollout_id, claim

    async def body(run):
        raise error

    settings = Settings(node=node, retry_delay_s=0.0)
    parts = services(store._redis, settings, host=None, handler=lambda name: None)
    parts.other_nodes = lambda rollout_id: WorkerServices.other_nodes(parts, rollout_id)
    outcome = asyncio.run(work(StageRun(parts, Held(rollout_id, Stage.INIT), claim), body))
    return store.finish(claim, outcome)


@pytest.fixture
def fleet(store):
    """Two nodes that do INIT."""
    fleet = FleetStore(store._redis)
    for node in ("bare", "other"):
        fleet.announce(f"init@{node}", ["init"], node, slots=1)
    return fleet


def test_the_node_passes_it_over_and_others_take_it_in_its_turn(store, fleet):
    submit(store, "a", "b")
    assert tried(store, "bare", "a", ImageError("no image")) == State.QUEUED
    assert store.absent_on("a") == {"bare"} and store.absent_on("b") == set()
    assert claim(store, "bare") == "b"
    assert claim(store, "bare") == "passed over"  # somebody waits, and not for this node
    assert claim(store, "other") == "a"
    assert claim(store, "other") == "nobody"
    record = store._redis.hmget(keys.record("a"), "attempt", "state", "error", "finish_reason")
    assert record == ["1", State.INITIALIZING, None, None]
    notes = [note.text for note in store.get("a").notes]
    assert "node bare cannot start its image: no image" in notes


def test_after_a_while_the_node_tries_again_for_the_image_may_have_come(store, fleet):
    submit(store, "a")
    tried(store, "bare", "a", ImageError("no image"))
    assert claim(store, "bare") == "passed over"
    fade(store, "bare", "a")
    assert claim(store, "bare") == "a"


def test_a_mark_of_before_the_clock_went_back_does_not_last_for_hours(store, fleet):
    submit(store, "a")
    tried(store, "bare", "a", ImageError("no image"))
    in_two_hours = (store._redis.time()[0] + 7200) * 1000
    store._redis.hset(keys.record("a"), rollouts.ABSENT + "bare", in_two_hours)
    assert claim(store, "bare") == "a"


@pytest.mark.parametrize(("absent_s", "seconds"), [(60.0, 0.0), (0.1, 0.2)], ids=["soon", "marks have faded"])
def test_one_that_no_node_can_start_fails_with_the_error_and_its_attempts_go_round_the_nodes(
    store, fleet, monkeypatch, absent_s, seconds
):
    """In the second case each node takes longer to find out than the other one passes the rollout over."""
    monkeypatch.setattr(rollouts, "ABSENT_S", absent_s)
    store = RolloutStore(store._redis, Settings())
    submit(store, "a")
    for node, attempt in (("bare", 1), ("other", 1), ("bare", 2), ("other", 3)):
        assert store.get("a").attempt == attempt
        tried(store, node, "a", ImageError(f"there is no image on {node}"))
        time.sleep(seconds)
        ring(store, "a")
        if not seconds and node == "other" and attempt == 1:
            assert claim(store, node) == "passed over"
    record = store.get("a")
    assert (record.state, record.attempt) == (State.FAILED, 3)
    assert (record.error.blame, record.error.stage) == (Blame.SANDBOX, Stage.INIT)
    assert "there is no image on other" in record.error.message


def ring(store, rollout_id):
    """The delay of another attempt is over."""
    store._redis.zadd(keys.DUE, {rollout_id: 0})
    store.overdue()


def test_a_node_that_is_alone_tries_again_after_the_usual_delay(store):
    FleetStore(store._redis).announce("init@bare", ["init"], "bare", slots=1)
    submit(store, "a")
    for entered in (State.QUEUED, State.QUEUED, State.FAILED):
        assert tried(store, "bare", "a", RuntimeUnavailable("no runtime works")) == entered
        ring(store, "a")
    assert store.get("a").attempt == 3 and store.absent_on("a") == set()


def test_another_attempt_waits_out_its_delay(store, fleet):
    submit(store, "a")
    tried(store, "bare", "a", ImageError("no image"))
    tried(store, "other", "a", ImageError("no image"))
    assert claim(store, "bare") == "nobody", "before the reaper rings for it"
    ring(store, "a")
    assert claim(store, "bare") == "a"


def test_what_the_deployment_does_not_allow_is_the_tasks_fault_at_once(store, fleet):
    submit(store, "a")
    assert tried(store, "bare", "a", NotAllowed("the image is not allowed")) == State.FAILED
    assert store.get("a").error.blame is Blame.TASK


def test_one_that_a_live_node_has_yet_to_try_waits_for_it_until_its_deadline(store, fleet):
    """Alive, and closed: no room on it, say. That the first one tries meanwhile does not count."""
    store = RolloutStore(store._redis, Settings(handler_wait_s=0.3))
    submit(store, "taken", "waits")
    for _ in range(4):
        for rollout_id in ("taken", "waits"):
            assert tried(store, "bare", rollout_id, RuntimeUnavailable("no runtime works")) == State.QUEUED
        time.sleep(0.3)
        fade(store, "bare", "taken", "waits")
    assert claim(store, "other") == "taken"
    store._redis.hset(keys.record("waits"), "deadline", 1)
    ring(store, "waits")
    record = store.get("waits")
    assert (record.state, record.attempt, record.error.blame) == (State.TIMED_OUT, 1, Blame.TIMEOUT)
    assert "node bare cannot start its image: no runtime works" in record.error.message
    assert len([note for note in record.notes if "cannot start" in note.text]) == 1


def test_rollouts_run_on_the_node_that_has_their_image(tmp_path, server):
    require_apptainer()
    base = ImageStore().find("base")
    images = tmp_path / "images"
    images.mkdir()
    for name in ("base", "no-such-image"):
        (images / f"{name}.sif").symlink_to(base)
    with (
        tempfile.TemporaryDirectory(prefix="ra-", dir="/tmp") as sockets,
        tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as two,
    ):
        try:
            # A worker that stands still for a stack's usual 3 s would cost an attempt.
            with Stack(tmp_path, Path(sockets), {"ROLLOUT_LEASE_S": "10"}) as stack:
                stack.start_worker("init,run,eval", "bare", env={"ROLLOUT_NODE": NODE})
                more = {
                    "ROLLOUT_NODE": "stocked",
                    "ROLLOUT_IMAGES": str(images),
                    "ROLLOUT_SANDBOX_DIR": two,
                }
                stack.start_worker("init,run.stocked,eval.stocked", "stocked", env=more)
                done = stack.client.run([RolloutRequest(handler="bad_image") for _ in range(6)])
        finally:
            stop_host(Path(sockets))
            stop_host(Path(two))
    assert [(item.state, item.attempt) for item in done] == [(State.COMPLETED, 1)] * 6, done[0].error
    assert {item.sandbox.node for item in done} == {"stocked"}
