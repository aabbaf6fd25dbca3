"""Runtimes, and the choice between them: Apptainer, else bubblewrap, else refuse."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox import paths
from sandbox.errors import RuntimeUnavailable
from sandbox.runtimes.apptainer import Apptainer
from sandbox.runtimes.base import Launch, Places, Runtime
from sandbox.runtimes.bubblewrap import Bubblewrap
from sandbox.runtimes.local_unsafe import LocalUnsafe

__all__ = ["AUTO", "RUNTIMES", "Launch", "Places", "Runtime", "select_runtime"]

log = logging.getLogger(__name__)

RUNTIMES: dict[str, type[Runtime]] = {cls.name: cls for cls in (Apptainer, Bubblewrap, LocalUnsafe)}
AUTO = ("apptainer", "bubblewrap")


def select_runtime(
    name: str = "auto",
    find_rootfs: Callable[[Runtime], Path | None] = lambda runtime: None,
    within: Path | None = None,
    auto: Sequence[str] = AUTO,
) -> Runtime:
    """The runtime of that name, or for `auto` the first of those that really works here.

    `find_rootfs` gives the unpacked base image, with whose Python a runtime is probed, and never a task's
    image (an ImageError of its passes through); `within` is where the scratch of sandboxes will lie. A
    fallback is announced by one warning. Raises RuntimeUnavailable, naming the remedy.
    """
    if name not in RUNTIMES and name != "auto":
        raise RuntimeUnavailable(f"unknown runtime {name!r}; choose auto, {', '.join(RUNTIMES)}")
    failures: list[str] = []
    for candidate in auto if name == "auto" else (name,):
        runtime = RUNTIMES[candidate]()
        try:
            _probe(runtime, find_rootfs, within)
        except RuntimeUnavailable as error:
            failures.append(f"{candidate}: {error}")
            continue
        if failures or candidate == LocalUnsafe.name:
            log.warning(
                "SANDBOX RUNTIME %s IS USED%s; not enforced here: %s",
                candidate,
                f" because of {'; '.join(failures)}" if failures else "",
                ", ".join(runtime.missing_isolation),
            )
        return runtime
    remedy = (
        "run deploy/setup/apptainer.sh, or for trusted code only ask for the runtime local-unsafe by name"
    )
    raise RuntimeUnavailable(f"no container runtime works on this node ({'; '.join(failures)}); {remedy}")


def _probe(runtime: Runtime, find_rootfs: Callable[[Runtime], Path | None], within: Path | None) -> None:
    """Root starts containers as an unprivileged user: of root's own no limit of processes would hold."""
    runtime.check_installed()
    if runtime.needs_image:
        runtime.run_as = paths.sandbox_user()
    rootfs = find_rootfs(runtime)
    if runtime.run_as is None and runtime.needs_image and os.geteuid() == 0:
        runtime.missing_isolation.append("uid (processes run as the machine's root without capabilities)")
    try:
        runtime.probe(rootfs, within)
    except RuntimeUnavailable as error:
        if runtime.run_as is None:
            raise
        message = (
            f"{error}; root's sandboxes run as uid {runtime.run_as} (ROLLOUT_SANDBOX_UID; 0 would run them "
            "as root, for whom no limit of processes holds)"
        )
        if closed := paths.closed_to_others(Path(runtime.program() or "/")):
            message += (
                f", who cannot enter {closed}: run deploy/setup/apptainer.sh, which then unpacks Apptainer "
                f"elsewhere, or `chmod o+x {closed}`, or work as a plain user"
            )
        if within is not None and (closed := paths.closed_to_others(within / "scratch")):
            message += (
                f", who cannot enter {closed}: set ROLLOUT_SANDBOX_DIR to a directory that is not below it, "
                f"or `chmod o+x {closed}`"
            )
        raise RuntimeUnavailable(message) from error
