"""Numbered operations: one whose worker has gone runs on, and the next worker collects its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import connection
from sandbox.client import SandboxClient
from sandbox.connection import BlockingConnection
from sandbox.errors import SandboxAhead, SandboxError, SandboxRequestError, SandboxTaken, SandboxTimeout
from sandbox.server import wire
from tests.helpers.blocking import SyncHostClient, sandbox_of
from tests.helpers.stack import ROOT
from tests.sandbox.conftest import run, why_not

PATIENCE_S = 120.0
"""Far more than anything here takes, for a machine that does ten other things."""
WORK = "echo x >>begun; until [ -e go ]; do sleep 0.05; done; echo x >>ended; echo said"
CELL = """
import os, time
print("x", file=open("begun", "a"), flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
print("x", file=open("ended", "a"), flush=True)
print("said")
"""
OPERATIONS = {
    "bash": lambda client: client.bash(WORK, PATIENCE_S),
    "exec": lambda client: client.exec(["sh", "-c", WORK], PATIENCE_S),
    "ipython": lambda client: client.ipython(CELL, PATIENCE_S),
}
"""What says in files that it has begun and ended, and goes on in between until it is told to."""
long_ones = pytest.mark.parametrize("operation", OPERATIONS)
KILLED = f"""
import sys
from sandbox.connection import BlockingConnection
with BlockingConnection(sys.argv[1], {PATIENCE_S}) as line:
    line.ask("bash", command={WORK!r}, timeout={PATIENCE_S}, number=1, fence=1, known=0)
"""


class Notebook:
    """A journal in memory. `record`: reply frames by number; the next worker's notebook goes on with them."""

    def __init__(self, fence: int, record: dict[int, dict] | None = None, leaves: bool = True):
        self.fence, self.leaves = fence, leaves
        self.record = {} if record is None else record
        self.count = 0

    @property
    def known(self) -> int:
        return next(number for number in range(len(self.record) + 1) if number + 1 not in self.record)

    def recall(self) -> dict | None:
        reply = self.record.get(self.count + 1)
        self.count += reply is not None
        return reply

    def number(self) -> int:
        self.count += 1
        return self.count

    def keep(self, number: int, reply: dict) -> None:
        self.record[number] = reply


@pytest.fixture(scope="module")
def host(shared_state):
    return SyncHostClient(shared_state)


@pytest.fixture(params=["apptainer", "local-unsafe"])
def info(request, host):
    """A sandbox of each test's own, for numbers begin with it."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    if request.param == "local-unsafe" and "ipython" in request.node.name:
        request.node.add_marker(pytest.mark.may_skip)
        pytest.skip("only the image is sure to have a kernel")
    with sandbox_of(host, runtime=request.param) as (info, _):
        yield info


@contextlib.asynccontextmanager
async def worker(info, journal: Notebook):
    """A client of a worker that has taken the sandbox over."""
    async with SandboxClient(info.socket) as client:
        assert await client.take(journal.fence) is not None
        client.journal = journal
        yield client


async def seen(info, path: str) -> None:
    """Until something is there."""
    async with SandboxClient(info.socket) as client, asyncio.timeout(PATIENCE_S):
        while (await client.stat(path)).kind is None:
            await asyncio.sleep(0.02)


async def cancelled(info, call) -> None:
    """A call that is cancelled once it has begun."""
    task = asyncio.create_task(call)
    await seen(info, "begun")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def go(info) -> None:
    """Let those that have begun end."""
    async with SandboxClient(info.socket) as client:
        await client.write_file("go", "")


async def lines(info, path: str) -> int:
    async with SandboxClient(info.socket) as client:
        return (await client.read_file(path)).count(b"\n")


def said(result) -> str:
    return result.stdout if hasattr(result, "stdout") else result.output


@long_ones
@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_an_operation_whose_worker_has_gone_is_done_once_and_collected(info, operation, ended):
    call = OPERATIONS[operation]

    async def scenario():
        async with worker(info, Notebook(1)) as first:
            await cancelled(info, call(first))
        if ended:
            await go(info)
            await seen(info, "ended")
        second = Notebook(2)
        async with SandboxClient(info.socket) as client:
            assert await client.take(2) == (1, 0)  # at once, whatever runs
            client.journal = second
            collected = asyncio.create_task(call(client))
            await go(info)
            result = await collected
        assert said(result).replace("\r", "") == "said\n"
        assert not result.interrupted and not result.timed_out
        assert (await lines(info, "begun"), await lines(info, "ended")) == (1, 1)
        assert second.known == 1

    run(scenario())


def test_a_killed_process_leaves_its_command_running(info):
    ask = {"command": WORK, "timeout": PATIENCE_S, "number": 1, "known": 0}
    process = subprocess.Popen([sys.executable, "-c", KILLED, info.socket], cwd=ROOT)
    run(seen(info, "begun"))
    process.kill()
    process.wait()
    run(go(info))
    with BlockingConnection(info.socket, PATIENCE_S) as line:
        assert line.ask("bash", **ask, fence=2)["output"] == "said\n"
    assert run(lines(info, "ended")) == 1


def test_two_that_ask_for_the_same_are_told_the_same(info):
    async def scenario():
        async with worker(info, Notebook(1)) as one, worker(info, Notebook(1)) as other:
            both = [asyncio.create_task(OPERATIONS["bash"](client)) for client in (one, other)]
            await seen(info, "begun")
            await go(info)
            results = await asyncio.gather(*both)
        assert results[0] == results[1]
        assert await lines(info, "ended") == 1

    run(scenario())


def test_what_was_taken_over_is_closed_to_an_older_fence(info):
    async def scenario():
        old, new = Notebook(1, leaves=False), Notebook(2)
        async with worker(info, old) as first, worker(info, new) as second:
            for call in (
                first.bash("touch late"),
                first.reset(),
                first.write_file("late", ""),
                first.take(1),
            ):
                with pytest.raises(SandboxTaken, match="fence 2"):
                    await call
            assert old.record == {}, "a refusal is no outcome"
            running = asyncio.create_task(OPERATIONS["bash"](second))
            await seen(info, "begun")
            with pytest.raises(SandboxTaken):
                await connection.exchange(info.socket, {"op": "abandon", "number": 1, "fence": 1}, 30.0)
            await go(info)
            assert (await running).exit_code == 0
            assert (await second.stat("late")).kind is None
            with pytest.raises(SandboxTaken):
                await first.bash("touch late")
            assert await second.take(2) == (1, 0)

    run(scenario())


def test_an_operation_of_the_old_worker_that_ends_late_is_an_outcome_for_the_new_one_alone(info):
    async def scenario():
        old = Notebook(1)
        async with worker(info, old) as first:
            late = asyncio.create_task(OPERATIONS["bash"](first))
            await seen(info, "begun")
            async with worker(info, Notebook(2)) as second:
                collected = asyncio.create_task(OPERATIONS["bash"](second))
                await go(info)
                assert await late == await collected  # who had asked in time is told, too
            with pytest.raises(SandboxTaken):
                await first.bash("true")

    run(scenario())


def test_another_request_under_the_same_number_is_refused(info):
    async def scenario():
        async with worker(info, Notebook(1)) as first:
            await first.bash("echo x >>count")
        async with worker(info, other := Notebook(2)) as second:
            with pytest.raises(SandboxAhead, match="operation 1"):
                await second.bash("echo x >>count", 31.0)
            assert other.record == {}
        assert await lines(info, "count") == 1

    run(scenario())


def test_an_outcome_is_dropped_once_it_is_known_and_then_refused(info):
    async def scenario():
        journal = Notebook(1)
        async with worker(info, journal) as client:
            for _ in range(3):
                await client.bash("echo x >>count")
            assert await client.take(1) == (3, 2)
        async with worker(info, Notebook(2, {1: journal.record[1]})) as client:
            await client.bash("echo x >>count")  # of the record
            with pytest.raises(SandboxAhead):
                await client.bash("echo x >>count")  # what the record has lost
            assert (await client.bash("echo x >>count")).exit_code == 0  # the third's outcome is still there
        assert await lines(info, "count") == 3

    run(scenario())


def test_an_outcome_of_the_record_is_not_asked_for(info):
    async def scenario():
        journal = Notebook(1)
        async with worker(info, journal) as client:
            kept = [await client.bash("echo x >>count"), await client.exec(["true"])]
        client = SandboxClient("/nowhere")
        client.journal = Notebook(2, journal.record)
        assert kept == [await client.bash("echo x >>count"), await client.exec(["true"])]
        with pytest.raises(SandboxError):
            await client.bash("echo y")
        assert await lines(info, "count") == 1

    run(scenario())


def test_an_error_is_an_outcome(info):
    async def scenario():
        journal = Notebook(1)
        async with worker(info, journal) as first:
            with pytest.raises(SandboxRequestError) as refused:
                await first.send_input("hello")
        for record in ({}, journal.record):
            async with worker(info, Notebook(2, record)) as second:
                with pytest.raises(SandboxRequestError) as again:
                    await second.send_input("hello")
            assert str(again.value) == str(refused.value)

    run(scenario())


def test_requests_may_overtake_each_other(info):
    with BlockingConnection(info.socket, PATIENCE_S) as line:
        for number in (3, 1, 2):
            line.ask("bash", command=f"echo {number} >>order", timeout=30, number=number, fence=1, known=0)
        assert line.ask("take", fence=1) == {"last": 3, "known": 0}
        assert line.ask("bash", command="cat order", timeout=30)["output"] == "3\n1\n2\n"


@long_ones
@pytest.mark.parametrize("numbered", [False, True], ids=["unnumbered", "numbered"])
def test_a_cancelled_call_interrupts_its_command(info, operation, numbered):
    async def scenario():
        async with worker(info, Notebook(1)) as client:
            client.journal = Notebook(1, leaves=False) if numbered else None
            await cancelled(info, OPERATIONS[operation](client))
            then = client.ipython("1") if operation == "ipython" else client.bash("echo 1")
            assert (await then).output == "1\n"
            await go(info)
            assert (await client.bash("sleep 0.3; cat ended")).exit_code == 1

    run(scenario())


def test_a_command_that_outlasts_its_clients_wait_is_interrupted(info, monkeypatch):
    async def scenario():
        async with worker(info, Notebook(1, leaves=False)) as client:
            with monkeypatch.context() as patch:
                patch.setattr("sandbox.client.REPLY_GRACE_S", 2.0 - PATIENCE_S)
                with pytest.raises(SandboxTimeout):
                    await OPERATIONS["bash"](client)
            assert (await client.bash("echo next", PATIENCE_S)).output == "next\n"

    run(scenario())


def test_a_call_that_is_cancelled_twice_interrupts_its_command_too(info):
    async def scenario():
        async with worker(info, Notebook(1, leaves=False)) as client:
            call = asyncio.create_task(OPERATIONS["bash"](client))
            await seen(info, "begun")
            call.cancel()
            asyncio.get_running_loop().call_soon(call.cancel)
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await client.bash("echo next")).output == "next\n"

    run(scenario())


def test_to_abandon_comes_in_time_however_early_and_does_no_harm_late(info):
    with BlockingConnection(info.socket, PATIENCE_S) as line:
        line.ask("abandon", number=1, fence=1)
        early = line.ask("bash", command="sleep 600", timeout=600, number=1, fence=1, known=0)
        assert early["interrupted"]
        line.ask("abandon", number=1, fence=1)
        second = {"command": "echo 2", "timeout": 30, "number": 2, "fence": 1}
        assert line.ask("bash", **second, known=1)["output"] == "2\n"
        line.ask("abandon", number=1, fence=1)
        line.ask("abandon", number=2, fence=1)
        assert line.ask("bash", **second, known=1)["output"] == "2\n"


def test_a_client_that_hangs_up_an_unnumbered_request_still_interrupts_it(info):
    async def scenario():
        line = await connection.connect(info.socket)
        line.transport.write(wire.encode({"op": "bash", "command": WORK, "timeout": PATIENCE_S}))
        await seen(info, "begun")
        line.transport.close()
        async with worker(info, Notebook(1)) as client:
            assert (await client.bash("echo next")).output == "next\n"

    run(scenario())


def test_shell_and_background_jobs_survive_a_takeover(info):
    async def scenario():
        journal = Notebook(1)
        async with worker(info, journal) as first:
            await first.bash("variable=kept; cd /tmp; sleep 600 & job=$!")
        async with worker(info, Notebook(2, journal.record)) as second:
            await second.bash("of the record")
            result = await second.bash(
                'echo $variable; pwd; kill -0 $job && kill $job; [ "$job" ] && echo alive'
            )
        assert result.output == "kept\n/tmp\nalive\n"

    run(scenario())


def test_variables_of_the_ipython_kernel_survive_a_takeover(info):
    async def scenario():
        journal = Notebook(1)
        async with worker(info, journal) as first:
            await first.ipython("variable = 'kept'", PATIENCE_S)
        async with worker(info, Notebook(2, journal.record)) as second:
            await second.ipython("of the record")
            assert (await second.ipython("variable", PATIENCE_S)).output == "'kept'\n"

    run(scenario())


def test_what_changes_something_is_numbered(info):
    async def scenario():
        async with worker(info, journal := Notebook(1)) as client:
            changes = [
                client.setup({"A": "b"}),
                client.bash("read line", on_timeout="keep", quiet_timeout=0.1),
                client.send_input("line"),
                client.interrupt(),
                client.reset(),
                client.exec(["true"]),
                client.write_file("file", "text"),
                client.editor("view", f"{info.workspace}/file"),
            ]
            for number, call in enumerate(changes, 1):
                await call
                assert journal.known == journal.count == number
            await client.ping()
            await client.read_file("file")
            await client.stat("file")
            await client.list_dir()
            await client.note_tree(".")
            await client.changed_tree(".")
            assert journal.count == len(changes)

    run(scenario())


def test_cells_and_what_ends_them_are_numbered_with_ipython(info):
    async def scenario():
        async with worker(info, journal := Notebook(1)) as client:
            await client.ipython_warm()
            assert journal.count == 0
            for call in (
                client.ipython("1", PATIENCE_S),
                client.ipython_interrupt(),
                client.ipython_restart(),
            ):
                await call
            assert journal.known == journal.count == 3

    run(scenario())


def test_a_server_of_an_earlier_release_cannot_be_taken(tmp_path):
    names = "bash, exec"

    async def answer(reader, writer):
        while request := await connection.receive(reader):
            message = f"unknown operation {request['op']!r}; known are {names}"
            error = {"type": "SandboxRequestError", "message": message}
            await connection.send(writer, {"ok": False, "error": error})
        writer.close()

    async def scenario():
        path = Path(tmp_path / "s").as_posix()
        async with await asyncio.start_unix_server(answer, path), SandboxClient(path) as client:
            assert await client.take(1) is None

    run(scenario())
