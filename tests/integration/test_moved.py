"""Rollouts go on at their turn on another node, with their sandboxes' files: nodes on this machine.

Each has workers, a sandbox host and a scratch directory of its own; a directory of files is all that they
share beside Redis. What single steps do when something goes wrong: `test_moving.py`.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest

from rollout.schema import Rollout, RolloutRequest, State, new_id
from sandbox.host_client import ensure_host
from services.handback import hand_back
from services.settings import Settings
from tests.chaos.harness import Engine, diary_engine
from tests.helpers.blocking import SyncHostClient
from tests.helpers.keys import http
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Process, Stack, wait_until

PATIENCE_S = 120
SHORT = {"ROLLOUT_NODE_MIN_FREE_DISK_MB": "1000000000"}
"""Any disk is too small for this RUN fleet. While there is no other one nothing leaves it for that."""
KEPT = "processes of its sandbox were lost, files, directory and variables were kept"


class Node:
    """Workers, and through them a sandbox host."""

    def __init__(self, service: Service, name: str, *fleets: tuple[str, int, dict[str, str]]) -> None:
        """`fleets`: the queues of each, its slots and variables."""
        self.service, self.name, self.fleets = service, name, fleets
        self.directory = service.sandbox_dir / name
        self.env = {"ROLLOUT_NODE": name, "ROLLOUT_SANDBOX_DIR": str(self.directory)}
        ensure_host(self.directory)  # here, for it takes over what whoever starts it thinks of the disk
        self.workers = [self.start(number) for number in range(len(fleets))]
        self.host = SyncHostClient(self.directory)

    def start(self, number: int) -> Process:
        """One of the fleets."""
        queues, slots, env = self.fleets[number]
        name = f"{queues[:3]}-{self.name}"
        return self.service._launch_worker(queues, name, slots=slots, env=self.env | env)

    def await_workers(self) -> None:
        for worker in self.workers:
            self.service._await_worker(worker)

    def end(self, within_s: float = 30.0) -> int:
        """As a node ends in order; how many rollouts were handed back."""
        for worker in self.workers:
            worker.ask_to_stop()
        for worker in self.workers:
            worker.popen.wait(PATIENCE_S)
        settings = Settings.from_env(self.service.env | self.env)
        count = hand_back(settings, self.name, within_s=within_s, state_dir=self.directory)
        self.host.stop()
        return count


class Service(Stack):
    """A service of nodes that come and go."""

    def __init__(self, directory: Path, sandbox_dir: Path) -> None:
        self.snapshots = directory / "snapshots"
        env = {
            "ROLLOUT_HANDLERS": "tests.helpers.travels:all_handlers",
            "ROLLOUT_SNAPSHOT_DIR": str(self.snapshots),
        }
        super().__init__(directory, sandbox_dir, env)
        self.nodes: list[Node] = []
        self.engine = Engine(
            self, "engine", lambda port: [*diary_engine(port)[:-1], "tests.helpers.travels:script"]
        )

    def node(self, name: str, *fleets: tuple[str, int, dict[str, str]]) -> Node:
        self.nodes.append(Node(self, name, *fleets))
        return self.nodes[-1]

    def submit(self, lines: int, pause_s: float = 0.0, handler: str = "traveller", **more):
        task = {"lines": lines, "pause_s": pause_s} | more
        limits = {"max_turns": 999, "tool_timeout_s": 300}
        request = RolloutRequest(handler=handler, id=new_id(), task=task, limits=limits)
        self.client.submit(request)
        return request.id

    def state(self, rollout_id: str) -> State:
        return self.client.get(rollout_id).state

    def await_state(self, rollout_id: str, state: State) -> None:
        wait_until(lambda: self.state(rollout_id) is state, PATIENCE_S, f"{rollout_id} to be {state}")

    def await_log(self, rollout_id: str, entries: int, attempt: int = 1) -> None:
        """Until its turn log has so many entries: five, and its second call is under way."""

        def done() -> bool:
            return self.redis.client.llen(f"rollout:{{{rollout_id}}}:turns:{attempt}") >= entries

        wait_until(done, PATIENCE_S, f"{entries} entries of {rollout_id}")

    def ended(self, rollout_id: str) -> Rollout:
        key = f"rollout:{{{rollout_id}}}"
        wait_until(lambda: self.redis.client.hget(key, "finished"), PATIENCE_S, f"the end of {rollout_id}")
        return self.client.get(rollout_id)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir,
    ):
        Path(sandbox_dir).chmod(0o711)  # for whom sandboxes run as
        service = Service(tmp_path_factory.mktemp("stack"), Path(sandbox_dir))
        patch.setenv("ROLLOUT_SNAPSHOT_DIR", str(service.snapshots))
        try:
            with service:
                yield service
        finally:
            for node in service.nodes:
                stop_host(node.directory)


def require_whole(item: Rollout, lines: int, attempt: int = 1) -> None:
    """It was completed with the files, the directory and the variable that it had."""
    said = item.trajectory.messages if item.trajectory else ()
    told = "\n".join(map(repr, (item.error, *item.notes, *said)))
    assert (item.state, item.reward, item.attempt) == (State.COMPLETED, 1.0, attempt), told
    assert item.metrics["same_files"] == 1.0, item.trajectory.artifacts["looks"]
    calls = [s.call_id for chain in item.trajectory.chains for s in chain.segments if s.sampled]
    assert len(set(calls)) == lines + 1


def moves(item: Rollout) -> list[str]:
    return [text for text in item.trajectory.warnings if text.startswith("moved to node")]


def test_what_waits_for_a_node_that_ends_goes_on_at_its_turn_on_another_one(service, tmp_path):
    first = service.node("first", ("init,eval", 64, {}), ("run", 3, {}))
    first.await_workers()
    held = tmp_path / "held"
    held.mkdir()
    for gate in (tmp_path / "init", tmp_path / "run", held / "init"):
        gate.touch()
    scored = service.submit(lines=2, gates=str(tmp_path))
    wait_until((tmp_path / f"eval.{scored}").exists, PATIENCE_S, "it to be scored")
    # Were one over before all have come so far, the last one would run in its place.
    between = service.submit(lines=20, pause_s=0.3, gates=str(held))
    in_call = service.submit(lines=3, pause_s=4.0, gates=str(held))
    home = service.submit(lines=3, pause_s=4.0, handler="homebody", gates=str(held))
    for rollout_id in (home, in_call, between):
        service.await_log(rollout_id, 5)
    ready = service.submit(lines=3)
    service.await_state(ready, State.READY)
    # It starts while the first one ends.
    second = service.node("second", ("init,eval", 64, {}), ("run", 64, SHORT))
    so_far = {rollout_id: service.client.get(rollout_id) for rollout_id in (between, in_call)}
    assert first.end() == 5
    assert not first.host.list()
    for gate in (tmp_path / "eval", held / "run", held / "eval"):
        gate.touch()
    second.await_workers()
    # As before a preemption: it shortens what a worker takes to stop, and does nothing else.
    for worker in second.workers:
        worker.popen.send_signal(signal.SIGUSR2)
    items = {it: service.ended(it) for it in (scored, between, in_call, home, ready)}
    for rollout_id, lines in ((scored, 2), (between, 20), (in_call, 3), (home, 3), (ready, 3)):
        require_whole(items[rollout_id], lines)
        assert items[rollout_id].moved == (rollout_id != home)
        assert items[rollout_id].sandbox.node == "second"
    for rollout_id, before in so_far.items():
        its = items[rollout_id]
        ids = before.trajectory.chains[0].token_ids
        assert its.trajectory.chains[0].token_ids[: len(ids)] == ids and its.resumed == 1
        assert len(moves(its)) == 1 and "after turn" in moves(its)[0] and KEPT in moves(its)[0]
    assert moves(items[ready]) == [f"moved to node second before its first turn: {KEPT}"]
    assert moves(items[scored]) == [f"moved to node second before it was scored: {KEPT}"]
    assert moves(items[home]) == []
    assert any("handed back: node first ends" in note.text for note in items[home].notes)
    assert not list(service.snapshots.iterdir()), "what has arrived is deleted"
    assert all(worker.popen.poll() is None for worker in second.workers)
    metrics = http.get(f"{service.url}/metrics").text
    assert "rollout_moved_total 4.0" in metrics and "rollout_moves_failed_total 0.0" in metrics


def test_a_node_short_of_disk_sends_the_largest_on_and_damaged_files_begin_anew(service):
    """After the test above, on the node that it leaves."""
    second = service.nodes[-1]
    small = service.submit(lines=900, pause_s=0.3)
    large = service.submit(lines=900, pause_s=0.3, large=True)

    def counted() -> bool:
        return max((box["on_disk"] for box in second.host.list()), default=0) > 40e6

    wait_until(counted, PATIENCE_S, "what is on disk to be counted")
    third = service.node("third", ("run,eval", 64, {}))
    third.await_workers()

    def left(rollout_id: str) -> list[float]:
        return [note.at for note in service.client.get(rollout_id).notes if "leave node second" in note.text]

    def here(rollout_id: str) -> bool:
        owner = service.redis.client.hget(f"rollout:{{{rollout_id}}}", "owner") or ""
        return owner.startswith("run-third") and service.client.get(rollout_id).sandbox is not None

    wait_until(lambda: here(large) and here(small), PATIENCE_S, "both to have left")
    assert left(large)[0] < left(small)[0], "one at a time"
    notes = "\n".join(note.text for note in service.client.get(large).notes)
    assert "RUN goes on at turn" in notes and "interrupted" not in notes
    assert not second.host.list()
    # The next one has files that are cut in the middle; another one is cancelled before it arrives.
    second.workers[1].stop()
    assert third.end() == 2
    (packed,) = service.snapshots.glob(f"{large}.*.tar")
    packed.write_bytes(packed.read_bytes()[:100_000])
    assert service.client.cancel(small)["state"] == "cancelled"
    second.workers[1] = second.start(1)
    wait_until(lambda: service.client.get(large).attempt == 2, PATIENCE_S, "another attempt")
    item = service.client.get(large)
    told = "\n".join(note.text for note in item.notes)
    assert "infrastructure is blamed" in told and "the files that left node third are of no use" in told
    assert (item.moved, service.client.get(small).moved) == (2, 2)
    service.await_log(large, 5, attempt=2)
    service.client.cancel(large)
    wait_until(lambda: not second.host.list(), PATIENCE_S, "its sandbox to be gone")
