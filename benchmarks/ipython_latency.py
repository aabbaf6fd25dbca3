"""Time of one IPython cell, `1+1`: our sandbox, and Jupyter's Kernel Gateway with a websocket, in one run.

Ours is SandboxClient.ipython in an Apptainer sandbox; the gateway runs on this machine, outside of any
container, and its client acknowledges at once (TCP_QUICKACK), which is its best: docs/benchmarks.md says
why. They take turns of ten cells, in each round with a fresh sandbox and a fresh gateway; a result is lost
when the call returns without it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp

from benchmarks import harness
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.helpers.llm_servers import free_port

Cell = Callable[[], Awaitable[str]]
"""Runs the cell once; its result."""

TURN = 10
CODE, RESULT = "1+1", "2"
START_S, CELL_S = 120.0, 60.0


@asynccontextmanager
async def sandbox_cell(host: HostClient) -> AsyncIterator[Cell]:
    """Cells in a sandbox of our own."""
    info = await host.start(SandboxSpec(runtime="apptainer"))

    async def run_cell() -> str:
        # Ours marks a result with its number, as IPython does.
        return (await client.ipython(CODE, CELL_S)).output.strip().rpartition(" ")[2]

    async with SandboxClient(info.socket) as client:
        yield run_cell
    await host.release(info.id)


@asynccontextmanager
async def gateway_cell(directory: Path) -> AsyncIterator[Cell]:
    """Cells in a kernel of a gateway of our own on a free loopback port; `directory` is for all its files."""
    token, port = secrets.token_hex(16), free_port()
    url = f"http://127.0.0.1:{port}/api/kernels"
    names = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    process = subprocess.Popen(
        [sys.executable, "-m", "kernel_gateway", "--ip=127.0.0.1", f"--port={port}"],
        env=dict.fromkeys(names, str(directory)) | {"PATH": os.environ["PATH"], "KG_AUTH_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stderr=(directory / "gateway.log").open("wb"),
        start_new_session=True,
    )
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"token {token}"}) as http:
            async with asyncio.timeout(START_S):
                kernel = await _make_kernel(http, url, process)
            async with http.ws_connect(f"{url}/{kernel}/channels") as websocket:
                yield partial(_run_cell, websocket)
    finally:
        for member in harness.family([process.pid]):
            member.kill()
        process.wait()


async def _make_kernel(http: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes]) -> str:
    """Id of a new kernel, as soon as the gateway answers."""
    while process.poll() is None:
        try:
            async with http.post(url, json={}, raise_for_status=True) as answer:
                return (await answer.json())["id"]
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.01)
    raise RuntimeError(f"the Kernel Gateway ended with {process.returncode}; run make setup-bench")


async def _run_cell(websocket: aiohttp.ClientWebSocketResponse) -> str:
    header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "username": "", "session": ""}
    content = {"code": CODE, "silent": False, "store_history": False, "user_expressions": {}}
    rest = {"parent_header": {}, "metadata": {}, "buffers": {}, "channel": "shell"}
    await websocket.send_json({"header": header | {"version": "5.0"}, "content": content, **rest})
    result, awaited = "", {"execute_reply", "idle"}
    while awaited:
        # Linux forgets it now and then, so it is said before each message.
        websocket.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        message = await websocket.receive_json(timeout=CELL_S)
        if message["parent_header"].get("msg_id") != header["msg_id"]:
            continue
        content = message["content"]
        awaited -= {message["msg_type"], content.get("execution_state")}
        if message["msg_type"] == "execute_result":
            result = content["data"]["text/plain"]
    return result


def main(options: harness.Options) -> harness.Report:
    seconds: dict[str, list[float]] = {"ours": [], "gateway": []}
    lost = dict.fromkeys(seconds, 0)

    def time_cell(name: str) -> float:
        results: list[str] = []
        taken = harness.timed(lambda: results.append(runner.run(cells[name]())))
        lost[name] += results != [RESULT]
        return taken

    with harness.private_directory() as directory, harness.private_host(directory / "host", warm=0) as host:
        for number in range(options.rounds):
            files = directory / str(number)
            files.mkdir()
            with asyncio.Runner() as runner:
                stack = AsyncExitStack()
                try:
                    cells = {
                        "ours": runner.run(stack.enter_async_context(sandbox_cell(host))),
                        "gateway": runner.run(stack.enter_async_context(gateway_cell(files))),
                    }
                    methods = {name: partial(time_cell, name) for name in cells}
                    for method in methods.values():
                        method()  # once without being counted: the kernel is ready then
                    repetitions = dict.fromkeys(methods, options.count)
                    for name, values in harness.take_turns(methods, repetitions, TURN).items():
                        seconds[name] += values
                finally:
                    runner.run(stack.aclose())
            cell_ms = {name: harness.spread_ms(values) for name, values in seconds.items()}
            harness.say(f"round {number + 1}: {cell_ms}")
    results = {
        "speedup_vs_gateway_acking_at_once": cell_ms["gateway"]["p50_ms"] / cell_ms["ours"]["p50_ms"],
        "p50_ms": cell_ms["ours"]["p50_ms"],
    }
    return {"results": results, "cells": cell_ms, "lost": lost}


if __name__ == "__main__":
    harness.run(main, count=50, rounds=3)
