"""Rollouts that leave a node with their sandbox's files, against a real Redis; sandbox hosts are imitated.

With real ones: `test_moved.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.schema import HandlerInfo, RolloutRequest, Stage, State
from rollout.trajectory import Trajectory
from sandbox.errors import ImageError, NodeShort, SnapshotError
from sandbox.spec import SandboxInfo, SnapshotInfo
from services.handback import hand_back
from services.settings import Settings
from services.state import keys
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts.moving import MovingStore
from services.state.rollouts.store import Claim, Finish, NewRollout, RolloutStore
from tests.helpers.chores import services
from workers.arrival import carried
from workers.chores.moving import PACKING_S, Leftovers
from workers.handlers.base import EVERY_STAGE, AgentHandler, Reward
from workers.handlers.harbor.network import leads_out
from workers.handlers.harbor.ready import starts_processes
from workers.handlers.registry import HandlerError, Registry
from workers.held import CANCEL, SHUTDOWN, Held
from workers.services import WorkerServices
from workers.stage import StageRun, work

A, B = "node-a", "node-b"


class Plain(AgentHandler):
    name = "plain"
    repeatable = EVERY_STAGE

    async def evaluate(self, ctx):
        return Reward(1.0)


class Host:
    """A sandbox host as far as moves ask it."""

    def __init__(self, *boxes: str) -> None:
        self.boxes, self.started, self.released, self.packed = list(boxes), [], [], []
        self.fails: Exception | None = None
        self.takes_s = 0.0
        self.together = self.most_together = 0

    async def list(self):
        return [{"id": box} for box in self.boxes]

    async def snapshot(self, sandbox_id, name, *, owner="", wait_s=0.0, ends=False):
        assert ends and sandbox_id in self.boxes
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.together -= 1
        if self.fails:
            raise self.fails
        Path(name).write_bytes(b"files")
        self.packed.append(sandbox_id)
        return SnapshotInfo(name=name, bytes=5_000_000, files=1, way="packed", seconds=0.1)

    async def start(self, spec):
        self.started.append(spec)
        await asyncio.sleep(self.takes_s)
        if self.fails:
            raise self.fails
        return SandboxInfo("s2", "/tmp/s2#key", "apptainer", B, [], 1, 10.0)

    async def release(self, sandbox_id, wait=True):
        self.released.append(sandbox_id)

    async def release_owner(self, owner):
        return 0

    async def fate(self, sandbox_id):
        return None


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def settings(server, directory):
    server.client.flushall()
    directory.mkdir()
    return Settings(redis_url=server.url, node=B, snapshot_dir=str(directory), retry_delay_s=0.0)


@pytest.fixture
def store(settings):
    return RolloutStore(connect(settings.redis_url), settings)


@pytest.fixture
def moving(store, settings):
    return MovingStore(store._redis, settings)


def submit(store, rollout_id, **more):
    request = RolloutRequest(handler="plain", **more)
    store.submit([NewRollout(rollout_id, rollout_id, 0, request, request.model_dump_json(), rollout_id)])


def begun(store, rollout_id, **more):
    """Its claim of INIT on node A, where it has a sandbox."""
    submit(store, rollout_id, **more)
    claim = store.claim_next(f"init@{A}", node=A)
    assert claim.rollout_id == rollout_id
    record = {"id": f"box-{rollout_id}", "runtime": "apptainer", "image": "base", "node": A}
    box = json.dumps({"record": record | {"isolation_missing": []}, "socket": "/tmp/s"})
    store.note(rollout_id, claim.fence, {"sandbox": box, "node": A})
    return claim


def brought(store, rollout_id, to, **more):
    """One that has come so far on node A, with the words of what happened to it."""
    if to == "queued":
        return submit(store, rollout_id, **more)
    claim = begun(store, rollout_id, **more)
    if to == "initializing":
        return None
    assert store.finish(claim, Finish(State.READY)) == State.READY
    if to == "ready":
        return None
    claim = store.claim(rollout_id, 1, Stage.RUN, f"run@{A}")
    if to == "in RUN":
        return None
    if to == "passed on":
        return store.finish(claim, Finish("passed on"))
    assert store.finish(claim, Finish(State.EVALUATING, trajectory=Trajectory())) == State.EVALUATING
    if to == "evaluating":
        return None
    claim = store.claim(rollout_id, 1, Stage.EVAL, f"eval@{A}")
    if to == "completed":
        return store.finish(claim, Finish(State.COMPLETED, {"reward": "1.0"}))
    assert to == "in EVAL"
    return None


WAITS = {"ready": "run", "passed on": "run", "evaluating": "eval"}
WAYS = [*WAITS, "queued", "initializing", "in RUN", "in EVAL", "completed"]


def record(store, rollout_id):
    return store._redis.hgetall(keys.record(rollout_id))


def leave(store, moving, directory, rollout_id, size=5_000_000):
    """Move it off node A, its files in a file."""
    (item,) = [item for item in moving.waiting(A) if item.rollout_id == rollout_id]
    path = directory / item.file_name
    path.write_bytes(b"files")
    assert moving.move(item, A, path, size)
    return path


@pytest.mark.parametrize("to", WAYS)
def test_only_what_waits_for_the_node_under_its_fence_leaves_it(store, moving, directory, to):
    brought(store, "one", to)
    found = moving.waiting(A)
    assert [item.stage for item in found] == ([WAITS[to]] if to in WAITS else [])
    before = record(store, "one")
    fence = int(before["fence"])
    asks = [(A, fence - 1), (A, fence + 1), (B, fence)] + ([] if to in WAITS else [(A, fence)])
    for node, number in asks:
        ask = {"id": "one", "node": node, "fence": number}
        assert moving._do("move", **ask, files="{}", bytes=1) is False
        assert moving._do("stay", **ask, why="none") is False
    assert moving._do("move", id="none", node=A, fence=1, files="{}", bytes=1) is False
    assert record(store, "one") == before and "moved" not in store.totals()
    if to in WAITS:
        leave(store, moving, directory, "one")
        assert moving.waiting(A) == [] and store.vacate([A], lost=True) == []
        assert moving.move(found[0], A, directory / "again.tar", 1) is False, "it has left"


@pytest.mark.parametrize("to", WAITS)
def test_a_moved_rollout_waits_for_any_node_in_its_attempt_and_begins_there_with_its_files(
    store, moving, directory, to
):
    brought(store, "one", to)
    path = leave(store, moving, directory, "one")
    item = store.get("one")
    assert (item.attempt, item.moved, item.sandbox) == (1, 1, None)
    assert item.notes[-1].text == f"its files (5.0 MB) leave node {A}: processes in its sandbox end"
    assert (store.totals()["moved"], store.totals()["moved_bytes"]) == (1, 5_000_000)
    assert store.ahead(A) == (0, int(to == "ready"))
    store._redis.zadd(keys.DUE, {"one": 0})
    (due,) = store.overdue()
    assert (due.action, due.stage, due.node) == ("send", WAITS[to], None), "its message is a generic one"
    claim = store.claim("one", 1, Stage(WAITS[to]), f"x@{B}")
    assert claim.files == {"path": str(path), "node": A, "bytes": 5_000_000, "image": "base"}
    assert (claim.sandbox, claim.node) == (None, None)
    assert store.ahead(A)[1] == 0
    # Begun anew it has nothing of them.
    assert store.finish(claim, Finish("again")) == State.QUEUED
    assert not {"files", "moves", "node"} & record(store, "one").keys()


# -- arriving -----------------------------------------------------------------------------------


@pytest.fixture
def fleet(store):
    fleet = FleetStore(store._redis)
    for node in (A, B):
        fleet.announce(f"run@{node}", ["run", "eval"], node, slots=1)
    return fleet


class Arriving:
    """A worker of node B that claims a moved rollout."""

    def __init__(self, store, settings, stage=Stage.RUN, fails=None, takes_s=0.0) -> None:
        self.host = Host()
        self.host.fails, self.host.takes_s = fails, takes_s
        self.store, self.done = store, []
        claim = store.claim("one", 1, stage, f"run@{settings.node}")
        assert isinstance(claim, Claim), claim
        self.parts = services(
            store._redis, settings, host=self.host, handler=lambda name: Plain(), note=store.note
        )
        self.parts.tenant = self.parts.tenants.get
        self.parts.other_nodes = lambda *ask: WorkerServices.other_nodes(self.parts, *ask)
        self.run = StageRun(self.parts, Held("one", stage, claim.fence), claim)

    async def body(self, run):
        self.done.append(run.claim)
        return Finish(State.EVALUATING, trajectory=Trajectory(warnings=["first"]))

    def work(self, reason=None, after_s=0.1):
        """The outcome, where it is interrupted after so long; and the state that it enters."""

        async def go():
            self.run.held.task = asyncio.ensure_future(work(self.run, carried(self.body)))
            if reason:
                await asyncio.sleep(after_s)
                self.run.held.interrupt(reason)
            return await self.run.held.task

        outcome = asyncio.run(go())
        return outcome, self.store.finish(self.run.claim, outcome)


@pytest.fixture
def moved(store, moving, directory, fleet):
    brought(store, "one", "passed on")
    return leave(store, moving, directory, "one")


def test_the_stage_begins_once_its_sandbox_is_here_and_the_trajectory_says_so(store, settings, moved):
    arriving = Arriving(store, settings)
    outcome, entered = arriving.work()
    (claim,) = arriving.done
    assert (claim.sandbox.id, claim.node, claim.files) == ("s2", B, None)
    assert claim.sandbox_socket == "/tmp/s2#key"
    (spec,) = arriving.host.started
    assert (spec.snapshot, spec.owner, spec.image) == (str(moved), "one/1", "base")
    assert spec.max_lifetime_s > 60 and not moved.exists()
    assert entered == State.EVALUATING
    lost = "processes of its sandbox were lost, files, directory and variables were kept"
    said = f"moved to node {B} before its first turn: {lost}"
    assert outcome.trajectory.warnings == ["first", said]
    # EVAL finds it in its trajectory, and a further move is told beside it.
    claim = store.claim("one", 1, Stage.EVAL, f"eval@{B}")
    assert (claim.node, claim.files, list(claim.moves)) == (B, None, [said])


def test_a_tenant_that_may_not_have_its_image_any_more_does_not_get_it(store, settings, moved):
    tenants = services(store._redis, settings).tenants
    tenants.set(tenants.get("default").model_copy(update={"images": ("other",)}))
    outcome, entered = Arriving(store, settings).work()
    assert entered == State.FAILED and json.loads(outcome.fields["error"])["blame"] == "task"


def test_a_node_that_cannot_start_the_image_hands_it_on_and_that_costs_nothing(store, settings, moved):
    arriving = Arriving(store, settings, fails=ImageError("no image"))
    _, entered = arriving.work()
    assert (entered, arriving.done, arriving.run.claim.node) == (State.RUNNING, [], A)
    item = store.get("one")
    assert item.attempt == 1 and f"node {B} cannot start its image: no image" in [n.text for n in item.notes]
    assert not any("stops" in note.text for note in item.notes[-2:])
    # Its message is for the node that has not tried. That one cannot either.
    other = settings.model_copy(update={"node": A})
    outcome, entered = Arriving(store, other, fails=ImageError("no image")).work()
    assert entered == State.QUEUED and store.get("one").attempt == 2
    assert (
        f"the files that left node {A} are of no use: no image"
        in json.loads(outcome.fields["error"])["message"]
    )


def test_the_only_node_that_is_left_waits_for_room(store, settings, moved, fleet):
    fleet.forget_nodes([A])
    _, entered = Arriving(store, settings, fails=NodeShort("no room")).work()
    assert entered == State.RUNNING and store.get("one").attempt == 1 and moved.exists()
    assert Arriving(store, settings).work()[1] == State.EVALUATING and not moved.exists()


def test_who_has_lost_the_rollout_leaves_the_files_to_whoever_has_it(store, settings, moved):
    arriving = Arriving(store, settings)
    arriving.parts.note = lambda *told: False
    arriving.work()
    assert arriving.done == [] and moved.exists()


def test_damaged_files_are_tried_by_a_few_nodes_and_end_the_attempt(store, settings, moved, fleet):
    for node in ("c", "d", "e"):
        fleet.announce(f"run@{node}", ["run"], node, slots=1)
    for number in range(3):
        node = settings.model_copy(update={"node": f"n{number}"})
        fleet.announce(f"run@n{number}", ["run"], node.node, slots=1)
        outcome, entered = Arriving(store, node, fails=SnapshotError("damaged")).work()
        assert entered == (State.QUEUED if number == 2 else State.RUNNING)
    assert store.get("one").attempt == 2
    error = json.loads(outcome.fields["error"])
    assert error["blame"] == "infrastructure" and f"left node {A} are of no use: damaged" in error["message"]


def test_files_that_take_too_long_end_the_attempt(store, settings, moving, directory, fleet):
    brought(store, "one", "passed on", limits={"init_timeout_s": 0.2})
    leave(store, moving, directory, "one")
    outcome, entered = Arriving(store, settings, takes_s=5.0).work()
    assert entered == State.QUEUED and store.get("one").attempt == 2
    error = json.loads(outcome.fields["error"])
    assert error["blame"] == "timeout" and A in error["message"]


@pytest.mark.parametrize(
    ("reason", "state"), [(CANCEL, State.CANCELLED), (SHUTDOWN, State.RUNNING)], ids=["cancel", "stop"]
)
def test_in_the_middle_it_can_be_cancelled_and_another_worker_does_it_again(
    store, settings, moved, reason, state
):
    arriving = Arriving(store, settings, takes_s=30.0)
    _, entered = arriving.work(reason)
    assert (entered, arriving.done) == (state, []) and moved.exists()
    if reason == SHUTDOWN:
        assert arriving.run.claim.node is None
        assert Arriving(store, settings).work()[1] == State.EVALUATING and not moved.exists()


def test_a_worker_that_was_lost_in_the_middle_costs_nothing(store, settings, moved):
    store._redis.hset(keys.HANDLERS_REPEATABLE, "plain", "init run eval")
    Arriving(store, settings)
    store._redis.hset(keys.record("one"), "lease", 0)
    store._redis.zadd(keys.DUE, {"one": 0})
    (due,) = store.overdue()
    assert (due.action, due.node) == ("resume", None)
    assert Arriving(store, settings).work()[1] == State.EVALUATING
    assert store.get("one").attempt == 1


def test_packed_files_that_nobody_needs_are_removed_and_nothing_else(store, settings, moving, directory):
    for name in ("needed", "cancelled", "anew"):
        brought(store, name, "ready")
        leave(store, moving, directory, name)
    store.cancel("cancelled")
    store.finish(store.claim("anew", 1, Stage.RUN, f"run@{B}"), Finish("again"))
    names = ["foreign.tar", "needed.1.9.tar", "unknown.1.2.tar.part", "young.1.2.tar"]
    for name in names:
        (directory / name).write_bytes(b"x")
    (directory / "linked.1.2.tar").symlink_to(directory / "foreign.tar")
    long_ago = time.time() - PACKING_S - 5
    for path in directory.iterdir():
        if path.name != "young.1.2.tar":
            os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    Leftovers(services(store._redis, settings)).tick()
    left = {path.name for path in directory.iterdir()}
    assert left == {"needed.1.1.tar", "foreign.tar", "unknown.1.2.tar.part", "young.1.2.tar"}


# -- leaving ------------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch):
    host = Host()
    monkeypatch.setattr("services.handback.HostClient", lambda state_dir: host)
    return host


def announce(store, survives="files"):
    FleetStore(store._redis).put_handlers([HandlerInfo(name="plain", task_schema={}, survives=survives)])


def bring_all(store, host, **more):
    for to in WAITS:
        brought(store, to.replace(" ", "-"), to, **more)
    host.boxes = [f"box-{to.replace(' ', '-')}" for to in WAITS]
    store._redis.hset(keys.record("evaluating"), "ms_run", 5000)


def test_a_node_that_ends_packs_what_waits_for_it_first_what_cost_most(store, settings, directory, host):
    announce(store)
    bring_all(store, host)
    store._redis.delete("run", "eval")
    assert hand_back(settings, A) == 3
    assert host.packed == ["box-evaluating", "box-passed-on", "box-ready"]
    assert sorted(host.released) == sorted(host.packed)
    assert (store._redis.llen("run"), store._redis.llen("eval"), store._redis.llen("init")) == (2, 1, 0)
    assert {store.get(to.replace(" ", "-")).moved for to in WAITS} == {1}
    assert sorted(path.name for path in directory.iterdir()) == [
        "evaluating.1.2.tar",
        "passed-on.1.3.tar",
        "ready.1.1.tar",
    ]


@pytest.mark.parametrize(
    "why", ["no directory", "nothing survives", "its task", "driven", "no sandbox", "it fails", "no time"]
)
def test_what_cannot_be_moved_begins_anew_as_ever(store, settings, directory, host, why):
    announce(store, "nothing" if why == "nothing survives" else "files")
    bring_all(store, host)
    if why == "no directory":
        settings = settings.model_copy(update={"snapshot_dir": ""})
    elif why == "its task":
        store._redis.hset(keys.record("ready"), "survives", "nothing")
    elif why == "driven":
        store._redis.hset(keys.capture("passed-on", 1), "harness", "x")
    elif why == "no sandbox":
        host.boxes = []
    elif why == "it fails":
        host.fails = SnapshotError("the disk is full")
    elif why == "no time":
        host.takes_s = 30.0
    assert hand_back(settings, A, within_s=0.5 if why == "no time" else 60.0) == 3
    one = {"driven": ["passed-on"], "its task": ["ready"]}
    anew = one.get(why) or [to.replace(" ", "-") for to in WAITS]
    for rollout_id in anew:
        item = store.get(rollout_id)
        assert (item.state, item.attempt, item.moved) == (State.QUEUED, 1, 0)
        told = [note.text for note in item.notes]
        assert told[-1] == f"handed back: node {A} ends"
        reason = {"it fails": "the disk is full", "no time": "that was not done within 0.5 s"}.get(why)
        assert (f"its files cannot leave node {A}: {reason}" in told) == bool(reason)
    assert store.totals().get("moves_failed", 0) == (3 if why in ("it fails", "no time") else 0)
    assert len(list(directory.iterdir())) == 3 - len(anew)


def test_a_node_is_not_forgotten_while_a_worker_that_was_killed_seems_to_hold_a_rollout(
    store, settings, host
):
    announce(store)
    store._redis.hset(keys.HANDLERS_REPEATABLE, "plain", "init run eval")
    fleet = FleetStore(store._redis)
    fleet.put_node(A, {})
    brought(store, "held", "in RUN")
    assert hand_back(settings, A) == 0 and list(fleet.nodes()) == [A]
    store._redis.hset(keys.record("held"), "lease", 0)
    store._redis.zadd(keys.DUE, {"held": 0})
    (due,) = store.overdue()
    assert (due.action, due.node) == ("resume", A), "nobody is there"
    assert [item.action for item in store.vacate([A], lost=True)] == ["restart"]
    assert hand_back(settings, A) == 0 and not fleet.nodes()


def test_so_many_are_packed_at_once_and_no_more(store, settings, host):
    announce(store)
    for number in range(9):
        brought(store, f"r{number}", "ready")
        host.boxes.append(f"box-r{number}")
    host.takes_s = 0.05
    assert hand_back(settings, A) == 9
    assert (host.most_together, store.totals()["moved"]) == (4, 9)


def test_what_a_handler_survives_is_checked_and_told(settings):
    class Wrong(Plain):
        survives = "everything"

    class Nothing(Plain):
        survives = "nothing"

    with pytest.raises(HandlerError, match="survives is 'everything'"):
        Registry(settings).add(Wrong)
    assert (Plain().info().survives, Nothing().info().survives) == ("files", "nothing")


@pytest.mark.parametrize(
    ("script", "check", "of_step", "needed"),
    [(False, None, None, False), (True, None, None, True), (False, 1, None, True), (False, None, 1, True)],
)
def test_a_task_whose_sandbox_serves_something_needs_its_processes(tmp_path, script, check, of_step, needed):
    if script:
        (tmp_path / "setup.sh").touch()
    plain = SimpleNamespace(workdir=None, healthcheck=None)
    config = SimpleNamespace(environment=SimpleNamespace(healthcheck=check))
    steps = [plain, SimpleNamespace(workdir=tmp_path, healthcheck=of_step)]
    directory = SimpleNamespace(steps=steps, config=config)
    assert starts_processes(SimpleNamespace(directory=directory)) is needed


def test_a_task_that_is_led_out_of_its_sandbox_needs_that_one(monkeypatch):
    monkeypatch.setattr("workers.handlers.harbor.network.settings", lambda: Settings(task_egress=True))
    assert [leads_out(mode) for mode in (None, "no-network", "allowlist", "public")] == [
        False,
        False,
        True,
        True,
    ]
    monkeypatch.setattr("workers.handlers.harbor.network.settings", Settings)
    assert not leads_out("public"), "it has none here"
