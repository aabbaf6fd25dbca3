"""What an agent made, changed and deleted, on its way from its sandbox to a fresh one that verifies it.

The sandbox's server tells what is not as it was when INIT ended, which no process inside can keep from it.
What of that would run the verifier does not travel: see `inside/place.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.client import TRUSTED_PYTHON, ExecResult, SandboxClient
from sandbox.errors import SandboxRequestError
from workers.errors import AgentFault, InfrastructureError
from workers.handlers.harbor import rewards

INSIDE = Path(__file__).parent / "inside"
ROOM = "/tmp/.rollout-carry"
ARCHIVE = f"{ROOM}/files.tar"
NOT_NOTED = (
    *("/proc", "/sys", "/dev", "/run", "/sbx", "/sbx-python", "/.singularity.d", ROOM),
    *("/tests", "/solution", "/logs/verifier"),
)
"""What no file of the agent's is in, and what only the service puts there."""
PROMISED = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
MOST_BYTES = 1 << 30
"""Of all files that travel; of their number the sandbox's server allows 100,000."""
PACK_S = 300.0
MAX_ANSWER = 4_000_000
DETAIL_CHARS = 500


@dataclass(frozen=True)
class Luggage:
    """Files on their way."""

    archive: Path
    removed: Sequence[str]
    files: int
    bytes: int


async def note(box: SandboxClient) -> None:
    """Have the sandbox remember what is there now."""
    await box.note_tree("/", exclude=NOT_NOTED, directories=True)


@asynccontextmanager
async def changed(box: SandboxClient) -> AsyncIterator[Luggage]:
    """All that is not as it was noted. The agent's processes are ended.

    Raises:
        AgentFault: There is more of it than may travel, or it cannot be read.
    """
    try:
        await box.exec([TRUSTED_PYTHON, "-c", ""])  # nobody is left who could change it meanwhile
        changes = await box.changed_tree("/")
    except SandboxRequestError as error:
        raise AgentFault(f"what the agent left cannot be told: {error}") from error
    removed = [f"/{path}" for path in changes.removed]
    entries = [(f"/{entry.path}", entry.mode) for entry in changes.changed]
    async with _packed(box, {"entries": entries}, removed) as luggage:
        yield luggage


@asynccontextmanager
async def sources(box: SandboxClient, places: Sequence[tuple[str, Sequence[str]]]) -> AsyncIterator[Luggage]:
    """What is at some places, each with patterns of what is left out.

    Raises:
        AgentFault: There is more of it than may travel, or it cannot be read.
    """
    async with _packed(box, {"sources": places}) as luggage:
        yield luggage


@asynccontextmanager
async def _packed(
    box: SandboxClient, order: dict[str, Any], removed: Sequence[str] = ()
) -> AsyncIterator[Luggage]:
    with tempfile.TemporaryDirectory(prefix="rollout-carry-") as kept:
        archive = Path(kept) / "files.tar"
        what = "what the agent left cannot be taken"
        asked = json.dumps({**order, "out": ARCHIVE, "most": MOST_BYTES})
        argv = [TRUSTED_PYTHON, "-c", (INSIDE / "pack.py").read_text()]
        try:
            done = await box.exec(argv, PACK_S, stdin=asked)
            if done.not_started:
                raise InfrastructureError(f"{what}: {done.not_started}")
            answer = _answer(done)
            if "error" in answer:
                raise AgentFault(f"{what}: {answer['error']}")
            await box.download(ARCHIVE, archive, max_bytes=2 * MOST_BYTES)
        except SandboxRequestError as error:
            raise AgentFault(f"{what}: {error}") from error
        yield Luggage(archive, removed, answer["files"], answer["bytes"])


async def place(
    box: SandboxClient, luggage: Luggage, workdir: str, env: Mapping[str, str], trust: bool
) -> list[str]:
    """Put the files into a fresh sandbox, but for those that would run the verifier; answers which, and why.

    The directories that Harbor promises are made, and reward files that the image has are gone.

    Args:
        env: Of the verifier.
        trust: Leave away only what belongs to the verifier itself.
    """
    await box.upload(luggage.archive, ARCHIVE, max_bytes=2 * MOST_BYTES)
    order = {"archive": ARCHIVE, "removed": luggage.removed, "workdir": workdir, "env": dict(env)}
    argv = [TRUSTED_PYTHON, "-c", (INSIDE / "place.py").read_text()]
    order |= {"directories": [*PROMISED, workdir], "stale": rewards.FILES, "trust": trust}
    answer = _answer(await box.exec(argv, PACK_S, stdin=json.dumps(order), max_output_chars=MAX_ANSWER))
    if "error" in answer:
        raise InfrastructureError(f"the agent's files cannot be put in place: {answer['error']}")
    told = [f"{path.encode('utf-8', 'replace').decode()}: {why}" for path, why in answer["withheld"]]
    more = answer["count"] - len(told)
    return [*told, f"and {more} more"] if more else told


def _answer(done: ExecResult) -> dict[str, Any]:
    """What a script of ours said; `error` where it did not come to its end."""
    if done.exit_code == 0:
        return dict(json.loads(done.stdout))
    why = done.limit_exceeded or done.not_started or done.stderr[-DETAIL_CHARS:]
    return {"error": f"not within {PACK_S:g} s" if done.timed_out else why or f"signal {done.signal}"}
