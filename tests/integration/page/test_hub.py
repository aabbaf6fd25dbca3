"""The hub of those who look: one rollout that cannot be read takes nothing from who looks at others."""

from __future__ import annotations

import json
import time

import pytest

from services.gateway.page.hub import Viewer
from services.gateway.waiting import Waiter
from services.state import keys
from tests.helpers.stack import wait_until

PATIENCE_S = 20


class Look:
    """A viewer of a gateway in this process, and all that it was told."""

    def __init__(self, world, **interest):
        self._hub = world.gate.live
        self._viewer = Viewer(Waiter(), **interest)
        self.said = ""
        self._hub.enter(self._viewer, dict)

    def until(self, text: str) -> None:
        def told() -> bool:
            self.said += self._viewer.take().decode()
            return text in self.said

        wait_until(told, PATIENCE_S, f"{text!r} in {self.said!r}")

    def take(self) -> str:
        return self._viewer.take().decode()

    def close(self) -> None:
        self._hub.leave(self._viewer)


@pytest.fixture
def look(world):
    opened = []

    def enter(**interest) -> Look:
        opened.append(Look(world, **interest))
        return opened[-1]

    yield enter
    for one in opened:
        one.close()


@pytest.fixture
def ids(world):
    """A rollout that cannot be read, and one that can."""
    world.key("a")
    return [item["id"] for item in world.submit("a", n=2).json["rollouts"]]


def test_a_damaged_record_keeps_nobody_from_the_states_of_others(world, look, ids):
    broken, fine = ids
    world.redis.hset(keys.record(broken), "attempt", "none")
    viewer = look(tenant="a", ids=frozenset(ids))
    viewer.until(fine)
    assert broken not in viewer.said and "away" not in viewer.said


def test_a_damaged_turn_log_keeps_nobody_from_the_turns_of_others(world, look, ids):
    _, fine = ids
    for rollout_id in ids:
        world.redis.hset(keys.record(rollout_id), mapping={"state": "running", "attempt": 1})
        world.redis.rpush(keys.turns(rollout_id, 1), b"\xc1 of a newer release")
    viewers = [look(tenant="a", rollout=rollout_id) for rollout_id in ids]
    for viewer in viewers:
        viewer.until("event: rollout")
    world.redis.publish(keys.live(fine), "no JSON")
    world.redis.publish(keys.live(fine), json.dumps({"text": "a piece of another release"}))
    piece = {"operation": 1, "kind": "bash", "offset": 0, "end": 2, "text": "hi", "running": True}
    wait_until(lambda: world.redis.publish(keys.live(fine), json.dumps(piece)), PATIENCE_S, "a reader")
    viewers[1].until('"text": "hi"')
    assert not any("away" in viewer.said for viewer in viewers)


def test_what_waits_for_a_viewer_who_takes_nothing_is_bounded_and_then_tells_what_there_is(world, look, ids):
    (name, *_) = ids
    world.redis.hset(keys.record(name), mapping={"state": "running", "attempt": 1})
    viewer = look(tenant="a", rollout=name)
    viewer.until("event: rollout")
    end, zeros = 0, "\0" * 60_000  # each is six characters of JSON
    for _ in range(50):
        piece = {"operation": 1, "kind": "bash", "offset": end, "end": (end := end + 60_000), "text": zeros}
        said = json.dumps(piece | {"running": True})
        wait_until(lambda said=said: world.redis.publish(keys.live(name), said), PATIENCE_S, "a reader")
    world.redis.publish(
        keys.live(name), json.dumps(piece | {"offset": end, "text": "last", "running": False})
    )
    time.sleep(1)
    said = viewer.take()
    assert '"text": "last"' in said and len(said) < 3 << 20


def test_what_nobody_follows_any_more_is_listened_to_no_more(world, look, ids):
    name, stays = ids[0], look(tenant="a", topics=frozenset({"batches"}))
    goes = look(tenant="a", rollout=name)
    goes.until("event: rollout")

    def listeners() -> int:
        return dict(world.redis.pubsub_numsub(keys.live(name)))[keys.live(name)]

    wait_until(lambda: listeners() == 1, PATIENCE_S, "the hub to listen")
    goes.close()
    wait_until(lambda: listeners() == 0, PATIENCE_S, "the hub to listen no more")
    stays.close()


def test_an_id_that_became_another_tenants_is_told_to_its_new_owner_alone(world, look):
    for tenant in "ab":
        world.key(tenant)
    (name,) = (item["id"] for item in world.submit("a", id="used").json["rollouts"])
    former, everybody = look(tenant="a", rollout=name), look(tenant=None, rollout=name)
    for viewer in (former, everybody):
        viewer.until("event: rollout")
    world.redis.delete(*world.redis.keys(f"*{name}*"))
    assert world.submit("b", id=name).status_code == 202
    world.redis.hset(keys.record(name), mapping={"state": "running", "attempt": 1})
    world.redis.xadd(keys.EVENTS, {"id": name})
    everybody.until('"state":"running"')
    piece = {"operation": 1, "kind": "bash", "offset": 0, "end": 2, "text": "secret", "running": True}
    world.redis.publish(keys.live(name), json.dumps(piece))
    everybody.until("secret")
    assert "secret" not in former.take() and '"running"' not in former.said
    owner = look(tenant="b", rollout=name)
    owner.until("secret")
