"""What a host makes of the records of one before it: containers that run on, or strays to be ended."""

from __future__ import annotations

from pathlib import Path

from sandbox import processes
from sandbox.connection import Address
from sandbox.container import Container, now
from sandbox.records import Record
from sandbox.runtimes import RUNTIMES, Launch, Runtime
from sandbox.spec import Limits, SandboxInfo, SandboxSpec


def may_be_adopted(record: Record) -> bool:
    """Whether somebody was given the sandbox, it still runs and its time is not over."""
    return record.info is not None and record.is_running() and (record.deadline or 0) > now()


def runtime_of(record: Record) -> Runtime:
    """The runtime that started it, or the likeliest where the record does not say."""
    runtime = RUNTIMES.get(record.runtime, RUNTIMES["apptainer"])()
    runtime.run_as = record.run_as
    return runtime


def revive(record: Record, state: Path, payload: Path, interpreter: Path | None) -> Container:
    """The container of a record that may be adopted. Its first process is no child of ours."""
    assert record.spec is not None and record.info is not None
    launch = Launch(
        record.id,
        Path(record.rootfs) if record.rootfs else None,
        record.spec["network"],
        state / record.id / "s",
        payload,
        state / "scratch" / record.id,
        interpreter,
    )
    info = SandboxInfo.from_json(record.info)
    return Container(
        record.id,
        runtime_of(record),
        SandboxSpec.from_json(record.spec),
        launch,
        Limits.from_json(record.limits),
        key=Address.parse(info.socket).key,
        pid=record.pid,
        start_time=record.start_time,
        protected=record.protected,
        deadline=record.deadline,
        info=info,
        ready=True,
    )


async def end_strays(record: Record) -> int:
    """End what a record names and all that carries its id, for it may name nothing. Returns how many."""
    runtime = runtime_of(record)
    pids = runtime.strays(record.id)
    if record.is_running() and record.pid is not None:
        pids.insert(0, record.pid)
    unique = list(dict.fromkeys(pids))
    for pid in unique:
        launch = Launch(record.id, None, "none", Path(), Path(), Path())
        stray = Container(record.id, runtime, SandboxSpec(), launch, Limits(), pid=pid)
        stray.start_time = processes.start_time(pid)
        await stray.kill()
    return len(unique)
