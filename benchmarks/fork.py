"""What it costs to keep a sandbox, to begin another one with it, and to have its files on another node.

fork       from the request to the output of the first command, of a sandbox that begins with a snapshot of
           one with 10 MiB changed: 32 files of 64 KiB, 8 of 1 MiB; half of each beside the image's files
fork_many  the same with 1,280 files of 8 KiB
cold       the same without a snapshot, of the same image; the host keeps none ready
snapshot   of a sandbox with 100 MiB changed: 1,280 files of 16 KiB in 128 directories, 5 of 16 MiB; from the
           request to the answer: asking the server, standing still, copying
tar        `tar --sparse -cf` of the same directories into a file on the same disk
tar_b512   the same in blocks of 256 KiB
move       the same snapshot packed, from the request to the answer, and what a start does with the file to
           have all that is in it
tar_pipe   `tar --sparse -cf - | tar -xpf -` of the same directories into others on the same disk

They take turns, and all but the cold starts read what lies in memory already. What was written is removed
between the measurements, and on its way to the disk before the next.

`tree_tokens_ratio`: ids that an engine samples for a tree of 8 leaves of 8 turns over those for 8 rollouts of
8 turns. Each leaf but the first is a fork of one that there was by then: one at turn 2, two at 4, four at 6.
The whole service, without sandboxes; the engine is scripted. More in docs/benchmarks.md#fork.
"""

from __future__ import annotations

import asyncio
import io
import os
import statistics
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.resume import sampled
from rollout.schema import ForkPoint, ForkRequest, RolloutRequest
from sandbox import trees
from sandbox.client import TRUSTED_PYTHON, SandboxClient
from sandbox.connection import Address
from sandbox.runtimes import RUNTIMES, Launch
from sandbox.snapshots import copying
from sandbox.spec import SandboxInfo, SandboxSpec
from tests.helpers.fake_engine import fake_engine

SPEC = SandboxSpec(runtime="apptainer")
KIB, MIB = 1 << 10, 1 << 20
FILES_A_DIRECTORY = 20
TEN, TEN_MANY = (32, 64 * KIB, 8, MIB), (1280, 8 * KIB, 0, 0)
HUNDRED = (1280, 16 * KIB, 5, 16 * MIB)
"""How many small files, of how many bytes; how many big ones, of how many."""
CHANGE = f"""
import os, sys
small, small_size, big, big_size = map(int, sys.argv[1:])
for number in range(small):
    place = ("/workspace/%d", "/opt/%d")[number % 2] % (number // {FILES_A_DIRECTORY})
    os.makedirs(place, exist_ok=True)
    open("%s/%d" % (place, number), "wb").write(os.urandom(small_size))
for number in range(big):
    open(("/workspace/big%d", "/opt/big%d")[number % 2] % number, "wb").write(os.urandom(big_size))
"""
TURNS, BRANCHES = 8, (2, 4, 6)
SHORT = 5
"""Of everything, the short form does this part only."""


class Bench:
    """A host, with a sandbox of each size that lives as long as `stack`."""

    def __init__(self, stack: ExitStack, share: int):
        """`share`: so many times less is changed."""
        self._directory = stack.enter_context(harness.private_directory())
        self._shared = self._directory / "shared"
        self._shared.mkdir()
        os.environ["ROLLOUT_SNAPSHOT_DIR"] = str(self._shared)
        self._wait = stack.enter_context(asyncio.Runner()).run
        self.host = stack.enter_context(harness.private_host(self._directory / "host", 0))
        self.hundred = self._changed(HUNDRED, share)
        self.kept = {}
        for name, what in {"ten": TEN, "ten_many": TEN_MANY}.items():
            changed = self._changed(what, share)
            self.kept[name] = self._wait(self.host.snapshot(changed.id, name)).to_json()
            self._wait(self.host.release(changed.id))
        self.standing: list[float] = []
        """Seconds for which the sandboxes stood still, of all snapshots of the large one."""
        self.parts: dict[str, list[float]] = {"pack": [], "unpack": []}

    def _changed(self, what: tuple[int, ...], share: int) -> SandboxInfo:
        info = self._wait(self.host.start(SPEC))
        small, small_bytes, big, big_bytes = what
        self._wait(change(info, small // share, small_bytes, big, big_bytes // share))
        return info

    def time_start(self, snapshot: str) -> float:
        """Seconds from the request to the first output; the sandbox is ended."""
        infos: list[SandboxInfo] = []
        spec = SandboxSpec(snapshot=snapshot) if snapshot else SPEC
        seconds = harness.timed(lambda: infos.append(self._wait(harness.first_output(self.host, spec))))
        self._wait(self.host.release(infos[0].id))
        os.sync()
        return seconds

    def time_snapshot(self) -> float:
        """Seconds of a snapshot of the node's own."""
        seconds = harness.timed(lambda: self._snapshot("hundred"))
        self._wait(self.host.forget_snapshots("bench"))
        os.sync()
        return seconds

    def _snapshot(self, name: str) -> None:
        self.standing.append(self._wait(self.host.snapshot(self.hundred.id, name, owner="bench")).seconds)

    def time_tar(self, *options: str) -> float:
        """Seconds of its peer."""
        target = self._directory / "peer.tar"
        seconds = harness.timed(lambda: subprocess.run([*self._tar(str(target)), *options], check=True))
        target.unlink()
        os.sync()
        return seconds

    def time_move(self) -> float:
        """Seconds until the files of a packed snapshot are where a start wants them."""
        packed = self._shared / "hundred.tar"
        self.parts["pack"].append(harness.timed(lambda: self._snapshot(str(packed))))
        launch, runtime = Launch("other", self._directory / "other"), RUNTIMES["apptainer"]()
        runtime.run_as = harness.paths.sandbox_user()
        launch.state.mkdir()
        launch.state.chmod(0o711)
        launch.make_directories(runtime.run_as)
        with io.FileIO(packed) as file:
            unpack = copying.unpack(runtime, launch, file, list(copying.PARTS))
            self.parts["unpack"].append(harness.timed(lambda: self._wait(unpack)))
        self._check(launch.scratch, "overlay/upper")
        packed.unlink()
        trees.remove(launch.state)
        os.sync()
        return self.parts["pack"][-1] + self.parts["unpack"][-1]

    def time_tar_pipe(self) -> float:
        """Seconds of its peer."""
        target = self._directory / "peer"
        target.mkdir()

        def move() -> None:
            with subprocess.Popen(self._tar("-"), stdout=subprocess.PIPE) as sender:
                subprocess.run(["tar", "-C", str(target), "-xpf", "-"], stdin=sender.stdout, check=True)

        seconds = harness.timed(move)
        self._check(target, "upper")
        trees.remove(target)
        os.sync()
        return seconds

    def _tar(self, target: str) -> list[str]:
        """Of what a snapshot of the large sandbox holds."""
        return ["tar", "--sparse", "-cf", target, "-C", str(self._scratch), *BESIDE, "-C", "overlay", "upper"]

    def _check(self, place: Path, upper: str) -> None:
        """That all that was changed has arrived."""
        big = [len(list((place / part).glob("**/big*"))) for part in ("workspace", f"{upper}/opt")]
        if sum(big) != HUNDRED[2]:
            raise RuntimeError(f"{big} large files arrived in {place}, not {HUNDRED[2]}")

    @property
    def _scratch(self) -> Path:
        own = Path(Address.parse(self.hundred.socket).path).parent
        return own.parent / "scratch" / own.name


BESIDE = [part for part in copying.PARTS if part != copying.UPPER]


def tree_tokens() -> tuple[int, int]:
    """Ids sampled for a tree, and for as many rollouts as it has leaves."""
    with (
        fake_engine(script="tests.helpers.diary:script", step_ms=0.001) as engine,
        harness.service(ROLLOUT_HANDLERS="tests.helpers.diary:SpokenDiary") as stack,
    ):
        stack.client.add_backend(engine.url, id="fake")
        stack.start_worker("init,run,eval", slots=8)
        fields = {"handler": "spoken_diary", "task": {"lines": TURNS - 1}}
        leaves = ended(stack, stack.client.submit(RolloutRequest(**fields, checkpoints="every_turn")))
        for turn in BRANCHES:
            points = [ForkPoint(rollout=leaf, turn=turn) for leaf in leaves]
            forks = [ForkRequest(from_=point, checkpoints="every_turn") for point in points]
            leaves += [new for fork in forks for new in ended(stack, stack.client.submit(fork))]
        tree = sampled(engine)
        ended(stack, stack.client.submit(RolloutRequest(**fields, n=len(leaves))))
        return tree, sampled(engine) - tree


def ended(stack: harness.Stack, new: Any) -> list[str]:
    """Ids of rollouts that were submitted, once all have ended."""
    ids = [item.id for item in new]
    for rollout_id in ids:
        item = stack.client.wait(rollout_id, timeout=harness.PATIENCE_S)
        if item.reward != 1.0:
            raise RuntimeError(
                f"rollout {rollout_id} ended as {item.state} with reward {item.reward}: {item.error}"
            )
    return ids


async def change(info: SandboxInfo, *what: int) -> None:
    """Write files in a sandbox."""
    async with SandboxClient(info.socket) as client:
        done = await client.exec([TRUSTED_PYTHON, "-c", CHANGE, *map(str, what)], 300)
    if done.exit_code != 0:
        raise RuntimeError(f"nothing could be written in sandbox {info.id}: {done.stderr}")


def main(options: harness.Options) -> harness.Report:
    short = options.rounds == 1
    with ExitStack() as stack:
        bench = Bench(stack, SHORT if short else 1)
        harness.say(f"kept: {bench.kept}")
        starts = {
            "fork": partial(bench.time_start, "ten"),
            "fork_many": partial(bench.time_start, "ten_many"),
            "cold": partial(bench.time_start, ""),
        }
        copies = {
            "snapshot": bench.time_snapshot,
            "tar": bench.time_tar,
            "tar_b512": partial(bench.time_tar, "-b", "512"),
            "move": bench.time_move,
            "tar_pipe": bench.time_tar_pipe,
        }
        for method in [*starts.values(), *copies.values()]:
            method()  # not counted: it opens what the others find
        bench.standing.clear()
        seconds = harness.take_turns(starts, dict.fromkeys(starts, options.count))
        seconds |= harness.take_turns(copies, dict.fromkeys(copies, max(options.rounds, 2)))
        times = {name: harness.spread_ms(values) for name, values in seconds.items()}
        times |= {name: harness.spread_ms(values[1:]) for name, values in bench.parts.items()}
        harness.say(f"ms: {times}")
        p50_ms = {name: spread["p50_ms"] for name, spread in times.items()}
    tree, plain = tree_tokens()
    return {
        "results": {
            "fork_ratio_to_start": p50_ms["fork"] / p50_ms["cold"],
            "snapshot_ratio_to_tar": p50_ms["snapshot"] / p50_ms["tar"],
            "move_ratio_to_tar": p50_ms["move"] / p50_ms["tar_pipe"],
            "tree_tokens_ratio": tree / plain,
            "still_ms": statistics.median(bench.standing) * 1e3,
            **{f"{name}_p50_ms": p50_ms[name] for name in ("fork", "cold", "snapshot", "move")},
        },
        "times": times,
        "tokens": {"tree": tree, "rollouts": plain},
        "kept": bench.kept,
    }


if __name__ == "__main__":
    harness.run(main, count=30, rounds=9)
