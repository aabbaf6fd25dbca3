"""Turns that are kept while a rollout runs, and forks that go on from them, with real parts.

The diary of `tests.helpers.diary` tells all: its lines are numbered by a variable of the shell and marked
with words that are drawn anew, so what is a fork's own, another one's, or of a later turn shows in it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from rollout.schema import Blame, Origin, Rollout, RolloutRequest, State, new_id
from services.settings import Settings
from services.state import keys
from services.state.checkpoints import CheckpointStore, Kept
from services.state.fleet import FleetStore
from services.state.rollouts.store import ABSENT
from tests.helpers.chores import services
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import NODE, wait_until
from tests.integration.test_takeover import PATIENCE_S, Service, notes

EVERY = {"checkpoints": "every_turn"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            with Service(tmp_path_factory.mktemp("stack"), Path(sandbox_dir)) as service:
                service.of_run(1)
                yield service
                wait_until(lambda: not service.host.list(), PATIENCE_S, "the sandboxes to be gone")
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture(scope="module")
def parts(service):
    """Stores on the service's Redis, and a way to submit what the gateway would refuse."""
    return services(service.redis.client, Settings(redis_url=service.redis.url))


@pytest.fixture(scope="module")
def store(service):
    return CheckpointStore(service.redis.client, Settings(redis_url=service.redis.url))


def submit(
    service, lines: int, pause_s: float = 0.0, handler: str = "diary", gates: Path | None = None, **fields
) -> str:
    """With gates it is one that stays in RUN until it is let go, however slow the machine is."""
    task = {"lines": lines, "pause_s": pause_s}
    if gates:
        handler, task = "gated_diary", task | {"gates": str(gates)}
        for stage in ("init", "eval"):
            (gates / stage).touch()
    request = RolloutRequest(handler=handler, id=new_id(), task=task, **EVERY | fields)
    service.client.submit(request)
    return request.id


def fork(service, rollout_id: str, turn: int, n: int = 1, **options) -> list[str]:
    """As a trainer does it, which takes a node that has told of its host."""
    nodes = FleetStore(service.redis.client).nodes
    wait_until(lambda: NODE in nodes(), PATIENCE_S, "the node's host to be known")
    return [item.id for item in service.client.fork(rollout_id, turn, n, **options)]


def turns_of(service, rollout_id: str) -> list[int]:
    return [kept.turn for kept in service.client.checkpoints(rollout_id) if not kept.error]


def diary(item: Rollout) -> list[str]:
    return item.trajectory.artifacts["diary"].splitlines()


def require_fork(item: Rollout, source: Rollout, turn: int, lines: int) -> Rollout:
    """It has what was shared, id for id and line for line, and learns from the rest alone."""
    assert (item.state, item.reward, item.attempt, item.drop) == (State.COMPLETED, 1.0, 1, False), (
        item.error,
        item.notes,
    )
    assert diary(item)[:turn] == diary(source)[:turn] and len(diary(item)) == lines
    assert not set(diary(item)[turn:]) & set(diary(source)[turn:])
    trajectory, branch = item.trajectory, item.trajectory.branch
    assert (branch.rollout, branch.turn) == (source.id, turn)
    ids, theirs = trajectory.chain.token_ids, source.trajectory.chain.token_ids
    assert ids[: branch.tokens] == theirs[: branch.tokens] and ids != theirs
    segments = trajectory.chain.segments
    own = next(at for at, segment in enumerate(segments) if segment.sampled)
    assert sum(len(segment.token_ids) for segment in segments[:own]) == branch.tokens
    # Prompt, and of each shared turn what was sampled and what was answered.
    assert own == 1 + 2 * turn
    assert branch.sampled_tokens == sum(len(segment.token_ids) for segment in segments[1:own:2])
    numbers = item.metrics
    assert numbers["shared_turns"] == turn and numbers["shared_tokens"] == branch.sampled_tokens
    assert [numbers[name] for name in ("turns", "model_calls", "tool_calls")] == [lines + 1 - turn] * 3
    assert numbers["sampled_tokens"] == trajectory.sampled_tokens == sum(trajectory.loss_mask)
    assert len([call for call in trajectory.calls if call.kind == "model"]) == lines + 1 - turn
    assert not [name for name in numbers if name.startswith("shared_") and "calls" in name]
    return item


def test_forks_of_an_ended_rollout_begin_with_the_files_of_that_turn_and_share_nothing_later(service):
    rollout_id = submit(service, lines=5)
    source = service.ended(rollout_id)
    assert source.reward == 1.0 and source.trajectory.branch is None
    kept = service.client.checkpoints(rollout_id)
    assert [one.turn for one in kept] == [1, 2, 3, 4, 5]
    assert all(one.way in ("copy", "reflink") and one.node == NODE and one.bytes for one in kept)
    asked = service.done()
    ids = fork(service, rollout_id, 2, n=3)
    items = [require_fork(service.ended(item), source, 2, lines=5) for item in ids]
    assert service.done() - asked == 3 * 4, "no shared turn is asked for again"
    lines = [line for item in items for line in diary(item)[2:]]
    assert len(set(lines)) == len(lines) == 9, "none sees what another one wrote"
    assert "begins behind turn 2 of rollout " + rollout_id in notes(items[0])
    assert service.client.get(rollout_id).trajectory == source.trajectory


def test_a_fork_of_a_running_rollout_is_taken_over_and_forked_again(service, tmp_path):
    rollout_id = submit(service, lines=9, pause_s=0.5, gates=tmp_path)
    wait_until(lambda: 2 in turns_of(service, rollout_id), PATIENCE_S, "the second turn")
    (fork_id,) = fork(service, rollout_id, 2)
    wait_until(lambda: 4 in turns_of(service, fork_id), PATIENCE_S, "turns of the fork's own")
    assert not service.field(rollout_id, "finished")
    so_far = service.client.get(fork_id).trajectory
    assert so_far.branch.turn == 2 and so_far.turns >= 1 and len(so_far.chain.segments) > 5
    service.kill_holder(fork_id)
    (tmp_path / "run").touch()
    service.of_run(1)
    source = service.ended(rollout_id)
    item = require_fork(service.ended(fork_id), source, 2, lines=9)
    assert (source.reward, source.resumed, item.resumed) == (1.0, 1, 1)
    assert turns_of(service, fork_id) == list(range(3, 10)), "what is shared is the other one's to fork"
    assert turns_of(service, rollout_id) == list(range(1, 10))
    (again_id,) = fork(service, fork_id, 5, limits={"max_turns": 12})
    require_fork(service.ended(again_id), item, 5, lines=9)


def test_without_a_sandbox_the_turns_are_all_there_is(service):
    source = service.ended(submit(service, lines=3, handler="spoken_diary", checkpoints="on_tools"))
    assert [(one.turn, one.way) for one in service.client.checkpoints(source.id)] == [
        (1, "none"),
        (2, "none"),
        (3, "none"),
    ]
    item = service.ended(fork(service, source.id, 1)[0])
    assert (item.reward, item.sandbox, item.metrics["turns"]) == (1.0, None, 3)
    branch, theirs = item.trajectory.branch, source.trajectory.chain.token_ids
    assert item.trajectory.chain.token_ids[: branch.tokens] == theirs[: branch.tokens]
    # So much is shared that nothing is left to sample.
    spent = service.ended(fork(service, source.id, 2, limits={"max_response_tokens": 10})[0])
    assert (spent.state, spent.reward, spent.error.blame) == (State.FAILED, None, Blame.TASK)
    assert "2 shared turns" in spent.error.message


def test_files_that_cannot_be_kept_harm_nobody(service, store):
    """What the host keeps them in is no directory for a while."""
    place = service.sandbox_dir / "snapshots"
    aside = place.rename(service.sandbox_dir / "aside")
    place.touch()
    try:
        item = service.ended(submit(service, lines=3))
    finally:
        place.unlink()
        aside.rename(place)
    assert item.reward == 1.0 and notes(item).count("no checkpoint of turn") == 1
    kept = store.list(item.id)
    assert [one.turn for one in kept] == [1, 2, 3] and all(one.error and not one.snapshot for one in kept)


def test_a_fork_that_cannot_begin_where_it_was_to_fails_and_is_never_scored(service, parts, store):
    source = service.ended(submit(service, lines=3))
    kept = store.get(source.id, 2)

    def put(**fields) -> None:
        changed = kept.model_copy(update=fields).model_dump_json()
        service.redis.client.hset(keys.checkpoints(source.id), "2", changed)

    def failed(turn: int, what: str, blame: Blame = Blame.INFRASTRUCTURE) -> Rollout:
        request = source.request.model_copy(
            update={"id": new_id(), "origin": Origin(rollout=source.id, turn=turn)}
        )
        parts.dispatcher.submit([request])
        item = service.ended(request.id)
        assert (item.state, item.reward, item.drop) == (State.FAILED, None, True)
        assert (item.error.blame, item.attempt) == (blame, 1) and what in item.error.message
        return item

    service.redis.client.hset(keys.record(source.id), "survives", "nothing")
    failed(2, "diary: it cannot be forked", Blame.TASK)
    service.redis.client.hdel(keys.record(source.id), "survives")
    failed(9, "turn 9 of rollout " + source.id + " is not kept")
    put(error="disk full")
    failed(2, "were not kept: disk full")
    put(node="gone")
    failed(2, "node gone, which keeps the files")
    put(entries=kept.entries + 50)
    failed(2, "has begun anew, or was forgotten")
    put()
    service.host.forget_snapshots(source.id)
    failed(2, "cannot begin with the files")


def test_a_fork_waits_for_the_node_that_has_its_files(service, parts, store):
    source = service.ended(submit(service, lines=2))
    kept = store.get(source.id, 1)

    def put(node: str) -> None:
        changed = kept.model_copy(update={"node": node}).model_dump_json()
        service.redis.client.hset(keys.checkpoints(source.id), "1", changed)

    put("far")
    parts.fleet.announce("init@far", ["init"], "far", 1)
    request = source.request.model_copy(update={"id": new_id(), "origin": Origin(rollout=source.id, turn=1)})
    parts.dispatcher.submit([request])
    wait_until(lambda: service.field(request.id, ABSENT + NODE), PATIENCE_S, "this node to hand it on")
    item = service.client.get(request.id)
    assert (item.state, item.attempt, item.error) == (State.QUEUED, 1, None)
    assert f"the files of turn 1 of rollout {source.id} are on node far" in notes(item)
    # Here they are: it is this node's.
    put(NODE)
    service.redis.client.hdel(keys.record(request.id), ABSENT + NODE)
    parts.dispatcher.ring()
    require_fork(service.ended(request.id), source, 1, lines=2)
    parts.fleet.leave("init@far")


def test_checkpoints_live_as_long_as_forks_may_need_them_and_no_longer(service, parts, store, tmp_path):
    """And those of an attempt that was given up are gone."""
    client = service.redis.client
    source = service.ended(submit(service, lines=1))
    names = keys.checkpoints(source.id), keys.turns(source.id, 1)
    retention_s = parts.settings.retention_s
    left = [client.ttl(name) for name in names]
    most = retention_s + source.request.limits.deadline_s
    assert all(client.ttl(keys.record(source.id)) <= ttl <= most for ttl in left), left
    until = time.time() + 2 * retention_s + 7200
    assert store.hold(source.id, 1, until) and not store.hold(source.id, 2, until)
    assert all(client.ttl(name) > 2 * retention_s for name in names)
    assert not store.hold("nobody", 1, until)
    assert not store.put(source.id, Kept(turn=9, at=0.0, attempt=1, entries=1), 99), "an old fence"
    # Its sandbox is lost once a turn is kept: it begins anew.
    rollout_id = submit(service, lines=6, pause_s=0.4, gates=tmp_path)
    wait_until(lambda: 2 in turns_of(service, rollout_id), PATIENCE_S, "the second turn")
    first = store.get(rollout_id, 1)
    service.host.release(service.sandbox(rollout_id)["id"])
    (tmp_path / "run").touch()
    wait_until(lambda: service.field(rollout_id, "attempt") == "2", PATIENCE_S, "another attempt")
    item = service.ended(rollout_id)
    assert (item.reward, item.attempt) == (1.0, 2)
    assert {one.attempt for one in store.list(rollout_id)} == {2} and first.attempt == 1
    assert not client.exists(keys.turns(rollout_id, 1)) and client.exists(keys.turns(rollout_id, 2))
