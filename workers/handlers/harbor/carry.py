"""What an agent made, changed and deleted, on its way from its sandbox to a fresh one that verifies it.

The sandbox's server tells what is not as it was when INIT ended, which no process inside can keep from it.
What of that would run the verifier does not travel: see `inside/place.py`.
"""

from __future__ import annotations

import asyncio
import json
import stat
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox.client import TRUSTED_PYTHON, SandboxClient
from sandbox.errors import SandboxRequestError
from sandbox.layer import Closed, Layer, LayerChanges
from workers.errors import AgentFault, InfrastructureError
from workers.handlers.harbor import rewards

INSIDE = Path(__file__).parent / "inside"
ROOM = "/tmp/.rollout-carry"
ARCHIVE = f"{ROOM}/files.tar"
NOT_NOTED = (
    *("/proc", "/sys", "/dev", "/run", "/sbx", "/sbx-python", "/.singularity.d"),
    *("/tests", "/solution", "/logs/verifier"),
)
"""What no file of the agent's is in, and what only the service puts there."""
PROMISED = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
MOST_BYTES = 1 << 30
"""Of all files that travel; of their number the sandbox's server allows 100,000."""
PLACE_S = 300.0
OPENINGS = 5
"""How often it is looked for what is closed: all of it is opened the first time."""
OPEN = """
import json, os, stat, sys
modes = {}
def open_up(path):
    info = os.lstat(path)
    directory = stat.S_ISDIR(info.st_mode)
    needed = 0o700 if directory else 0o400 if stat.S_ISREG(info.st_mode) else 0
    if info.st_mode & needed != needed:
        modes[path] = info.st_mode
        os.chmod(path, stat.S_IMODE(info.st_mode) | needed)
    return directory
for top in json.load(sys.stdin):
    if open_up(top):
        for directory, directories, files in os.walk(top):
            for name in directories + files:
                open_up(os.path.join(directory, name))
print(json.dumps(modes))
"""
"""Makes readable what stands on its input, and all below, and tells the modes that it had."""
MAX_ANSWER = 4_000_000


@dataclass(frozen=True)
class Luggage:
    """Files on their way."""

    archive: Path
    removed: Sequence[str]
    replaced: Sequence[str]
    """Directories of which nothing that the image has there is left, but for what travels."""
    paths: frozenset[str]
    """Of what was changed or made; where whole trees travel none is told."""
    bytes: int


async def note(box: SandboxClient) -> None:
    """Remember what is in a sandbox now, as long as it lives."""
    layer = Layer(box.address, NOT_NOTED)
    if layer.there:
        await asyncio.to_thread(layer.note)
    else:
        await box.note_tree("/", exclude=NOT_NOTED, directories=True)


async def settle(box: SandboxClient) -> None:
    """End the agent's processes: nobody is left who could change what is taken."""
    await box.exec([TRUSTED_PYTHON, "-c", ""])


@asynccontextmanager
async def changed(box: SandboxClient) -> AsyncIterator[Luggage]:
    """All that is not as it was noted. The agent's processes are ended.

    Raises:
        AgentFault: There is more of it than may travel, or it cannot be read.
    """
    await settle(box)
    layer = Layer(box.address, NOT_NOTED)
    try:
        changes = await (_of_layer(box, layer) if layer.there else _of_walk(box))
    except SandboxRequestError as error:
        raise AgentFault(f"what the agent left cannot be told: {error}") from error
    entries = [(path[1:], stat.S_IMODE(mode)) for path, mode in changes.changed.items()]
    async with _packed(box, entries, changes.removed, replaced=changes.replaced) as luggage:
        yield luggage


async def _of_walk(box: SandboxClient) -> LayerChanges:
    changes = await box.changed_tree("/")
    removed = [f"/{path}" for path in changes.removed]
    return LayerChanges({f"/{entry.path}": entry.mode for entry in changes.changed}, removed)


async def _of_layer(box: SandboxClient, layer: Layer) -> LayerChanges:
    """Made readable for the sandbox's server, with the modes that they had."""
    modes: dict[str, int] = {}
    for _ in range(OPENINGS):
        try:
            changes = await asyncio.to_thread(layer.changes)
            locked = changes.locked
        except Closed as closed:
            locked = closed.paths
        if not locked:
            changes.changed |= modes  # of which some are as they were noted again, now that they are open
            return changes
        opened = await box.exec([TRUSTED_PYTHON, "-c", OPEN], PLACE_S, stdin=json.dumps(locked))
        if opened.exit_code != 0:
            raise InfrastructureError(f"what the agent closed cannot be opened: {opened.stderr[-500:]}")
        modes = json.loads(opened.stdout) | modes
    raise InfrastructureError("what the agent closed stays closed")


@asynccontextmanager
async def trees(box: SandboxClient, places: Mapping[str, Sequence[str]]) -> AsyncIterator[Luggage]:
    """What is at some places, each with glob patterns of what is left out.

    Raises:
        AgentFault: There is more of it than may travel, or it cannot be read.
    """
    await settle(box)
    roots = {place.strip("/"): globs for place, globs in places.items()}
    exclude = [f"{root}/{way}{glob}" for root, globs in roots.items() for glob in globs for way in ("", "*/")]
    async with _packed(box, [(root, None) for root in roots], exclude=exclude) as luggage:
        yield luggage


@asynccontextmanager
async def _packed(
    box: SandboxClient,
    entries: Sequence[tuple[str, int | None]],
    removed: Sequence[str] = (),
    exclude: Sequence[str] = (),
    replaced: Sequence[str] = (),
) -> AsyncIterator[Luggage]:
    with tempfile.TemporaryDirectory(prefix="rollout-carry-") as kept:
        archive = Path(kept) / "files.tar"
        try:
            moved = await box.archive("/", archive, exclude=exclude, max_bytes=MOST_BYTES, entries=entries)
        except SandboxRequestError as error:
            raise AgentFault(f"what the agent left cannot be taken: {error}") from error
        yield Luggage(archive, removed, replaced, frozenset(f"/{path}" for path, _ in entries), moved.bytes)


async def place(
    box: SandboxClient,
    luggage: Luggage,
    given: Sequence[str],
    workdir: str,
    roots: Sequence[str],
    env: Mapping[str, str],
    trust: bool,
) -> list[str]:
    """Put the files into a fresh sandbox, but for those that would run the verifier; answers which, and why.

    What is there already is the task's, so it shadows nothing. The directories that Harbor promises are made,
    and reward files that the image has are gone.

    Args:
        given: Files that were put there although they were not noted; the agent may have removed some.
        roots: Directories, beside the working directory, where modules may be found before others.
        env: Of the verifier.
        trust: Leave away only what belongs to the verifier itself.
    """
    removed = [*luggage.removed, *(path for path in given if path not in luggage.paths)]
    await box.upload(luggage.archive, ARCHIVE, max_bytes=2 * MOST_BYTES)
    order = {"archive": ARCHIVE, "removed": removed, "replaced": list(luggage.replaced), "workdir": workdir}
    order |= {"roots": list(roots), "env": dict(env), "trust": trust}
    order |= {"directories": [*PROMISED, workdir], "stale": rewards.FILES}
    for name in ("rules.py", "place.py"):
        await box.write_file(f"{ROOM}/{name}", (INSIDE / name).read_bytes())
    done = await box.exec(
        [TRUSTED_PYTHON, f"{ROOM}/place.py"], PLACE_S, stdin=json.dumps(order), max_output_chars=MAX_ANSWER
    )
    if done.exit_code != 0:
        if done.limit_exceeded:
            raise AgentFault(f"what the agent left has no room in a sandbox: {done.limit_exceeded}")
        why = f"not within {PLACE_S:g} s" if done.timed_out else done.not_started or done.stderr[-500:]
        raise InfrastructureError(f"the agent's files cannot be put in place: {why}")
    answer = json.loads(done.stdout)
    told = [f"{path.encode('utf-8', 'replace').decode()}: {why}" for path, why in answer["withheld"]]
    more = answer["count"] - len(told)
    return [*told, f"and {more} more"] if more else told
