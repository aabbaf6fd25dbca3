"""Files that a task wants to be kept (`artifacts`), as texts beside the trajectory."""

from __future__ import annotations

from pathlib import PurePosixPath

from rollout.suites.harbor.directory import StepDirectory
from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from workers.handlers.base import EvalContext, RunContext
from workers.handlers.harbor.task import HarborTask
from workers.handlers.harbor.trial import ARTIFACTS, Trial

MOST_FILES, MAX_FILE_BYTES, MAX_BYTES = 50, 256 << 10, 1 << 20
MAX_LOG_BYTES = 2 << 20
"""Of all logs and lists of a rollout. With its files, which have `MAX_BYTES`, a record has room for them."""


def keep_log(artifacts: dict[str, str], name: str, text: str) -> None:
    """Keep the end of a text, as far as there is room: were it too much, an agent could end its sample so."""
    others = sum(_size(*kept) for kept in artifacts.items() if not kept[0].startswith("artifacts/"))
    room = MAX_LOG_BYTES - others - len(name)
    if room > 0:
        artifacts[name] = text.encode(errors="replace")[-room:].decode(errors="ignore")


def _size(name: str, text: str) -> int:
    return len(name.encode(errors="replace")) + len(text.encode(errors="replace"))


async def keep_artifacts(
    ctx: RunContext[HarborTask] | EvalContext[HarborTask], trial: Trial, step: StepDirectory
) -> None:
    """Keep the texts among a task's artifacts, and those in `/logs/artifacts`, as `artifacts/NAME`.

    What is no text, too long or too much is left out, and told by the metric `artifacts_left_out`.
    """
    assert ctx.sandbox is not None
    declared = (*trial.directory.config.artifacts, *step.config.artifacts)
    wanted = {
        trial.inside(item.source): (item.destination or item.source.strip("/"), item.exclude)
        for item in declared
    }
    kept = sum(_size(*kept) for kept in ctx.artifacts.items() if kept[0].startswith("artifacts/"))
    left_out = 0
    for place, (shown, exclude) in {**wanted, ARTIFACTS: ("", ())}.items():
        for path in await _files(ctx.sandbox, place):
            if any(PurePosixPath(path).match(pattern) for pattern in exclude):
                continue
            text = await _text(ctx.sandbox, path)
            parts = ("artifacts", step.name, shown, path.removeprefix(place).strip("/"))
            name = "/".join(filter(None, parts)).encode(errors="replace").decode()  # a name may be any bytes
            if text is None or kept + _size(name, text) > MAX_BYTES:
                left_out += 1
                continue
            kept += _size(name, text)
            ctx.artifacts[name] = text
    if left_out:
        ctx.metrics["artifacts_left_out"] = ctx.metrics.get("artifacts_left_out", 0) + left_out


async def _files(box: SandboxClient, place: str) -> list[str]:
    """A file, or those in a directory and one below it."""
    found: list[str] = []
    pending = [(place, 2)]
    while pending and len(found) < MOST_FILES:
        path, depth = pending.pop()
        try:
            kind = (await box.stat(path, follow=False)).kind
            if kind == "file":
                found.append(path)
            elif kind == "directory" and depth:
                pending += [(f"{path}/{entry.name}", depth - 1) for entry in await box.list_dir(path)]
        except SandboxRequestError:
            continue
    return sorted(found)[:MOST_FILES]


async def _text(box: SandboxClient, path: str) -> str | None:
    try:
        return (await box.read_file(path, MAX_FILE_BYTES)).decode()
    except (SandboxRequestError, UnicodeDecodeError):
        return None
