"""A node that cannot start an image leaves its rollouts to others, and no attempt is used up."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from rollout.schema import RolloutRequest, State
from sandbox.images import ImageStore
from services.settings import Settings
from services.state import keys, rollouts
from services.state.redis import connect
from services.state.rollouts import ABSENT, Finish, NewRollout, RolloutStore
from tests.helpers.sandboxes import require_apptainer, stop_host
from tests.helpers.stack import NODE, Stack


@pytest.fixture
def store(server):
    client = connect(server.url)
    client.flushall()
    return RolloutStore(client, Settings(redis_url=server.url))


def submit(store, *ids):
    request = RolloutRequest(handler="noop")
    for one in ids:
        store.submit([NewRollout(one, one, 0, request, request.model_dump_json(), "digest")])


def claim(store, node):
    got = store.claim_next("-", 1, f"init@{node}", node=node)
    return got if isinstance(got, str) else got.rollout_id


def hand_back(store, node):
    claimed = store.claim_next("-", 1, f"init@{node}", node=node)
    assert store.finish(claimed, Finish("handback", {ABSENT + node: "no image"})) == State.QUEUED


def test_the_node_passes_it_over_and_others_take_it_in_its_turn(store):
    submit(store, "a", "b")
    hand_back(store, "bare")
    assert store.absent_on("a") == {"bare"} and store.absent_on("b") == set()
    assert claim(store, "bare") == "b"
    assert claim(store, "bare") == "passed over"  # somebody waits, and not for this node
    assert claim(store, "other") == "a"
    assert claim(store, "other") == "nobody"
    record = store._redis.hmget(keys.record("a"), "attempt", "state")
    assert record == ["1", State.INITIALIZING]


def test_after_a_while_the_node_tries_again_for_the_image_may_have_come(store, monkeypatch):
    monkeypatch.setattr(rollouts, "ABSENT_S", 0.5)
    store = RolloutStore(store._redis, Settings())
    submit(store, "a")
    hand_back(store, "bare")
    assert claim(store, "bare") == "passed over"
    time.sleep(0.6)
    assert store.absent_on("a") == set()
    assert claim(store, "bare") == "a"


def test_rollouts_run_on_the_node_that_has_their_image(tmp_path, server):
    require_apptainer()
    base = ImageStore().find("base")
    images = tmp_path / "images"
    images.mkdir()
    for name in ("base", "no-such-image"):
        (images / f"{name}.sif").symlink_to(base)
    with (
        tempfile.TemporaryDirectory(prefix="ra-", dir="/tmp") as one,
        tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as two,
    ):
        try:
            with Stack(tmp_path, Path(one)) as stack:
                stack.start_worker("init,run,eval", "bare", env={"ROLLOUT_NODE": NODE})
                more = {
                    "ROLLOUT_NODE": "stocked",
                    "ROLLOUT_IMAGES": str(images),
                    "ROLLOUT_SANDBOX_DIR": two,
                }
                stack.start_worker("init,run.stocked,eval.stocked", "stocked", env=more)
                found = stack.client.run([RolloutRequest(handler="bad_image") for _ in range(6)])
        finally:
            stop_host(Path(one))
            stop_host(Path(two))
    assert [(one.state, one.attempt) for one in found] == [(State.COMPLETED, 1)] * 6, found[0].error
    assert {one.sandbox.node for one in found} == {"stocked"}
