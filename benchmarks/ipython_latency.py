"""Time of one IPython cell, `1+1`: our sandbox, a bare blocking jupyter_client, and Jupyter's Kernel Gateway
with a websocket, in one run.

Ours is SandboxClient.ipython in an Apptainer sandbox; the others run on this machine, outside of any
container. The bare client speaks to its kernel over ipc; the gateway's acknowledges at once (TCP_QUICKACK),
which is its best: docs/benchmarks.md says why. They take turns of ten cells, in each round with a fresh
sandbox, kernel and gateway; a cell is over at `idle` and `execute_reply`, and a result is lost when it is not
there then.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import aiohttp
import httpx
from jupyter_client.manager import KernelManager

from benchmarks import harness
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.helpers.llm_servers import free_port

Cell = Callable[[], str]
"""Runs the cell once; its result. What it needs ends with a stack."""

TURN = 10
CODE, RESULT = "1+1", "2"
START_S, CELL_S = 120.0, 60.0
HOMES = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")


def sandbox_cell(stack: ExitStack, runner: asyncio.Runner, host: HostClient) -> Cell:
    """Cells in a sandbox of our own."""
    info = runner.run(host.start(SandboxSpec(runtime="apptainer")))
    stack.callback(lambda: runner.run(host.release(info.id)))
    client = SandboxClient(info.socket)
    stack.callback(lambda: runner.run(client.close()))
    # Ours marks a result with its number, as IPython does.
    return lambda: runner.run(client.ipython(CODE, CELL_S)).output.strip().rpartition(" ")[2]


def bare_cell(stack: ExitStack, directory: Path) -> Cell:
    """Cells in a kernel of a bare blocking client over ipc; `directory` is for all its files."""
    env = dict.fromkeys(HOMES, str(directory)) | {"PATH": os.environ["PATH"]}
    manager = KernelManager(transport="ipc", ip=f"{directory}/k", connection_file=f"{directory}/k.json")
    manager.start_kernel(env=env, extra_arguments=["--Kernel._execute_sleep=0"])  # half a millisecond a cell
    stack.callback(manager.shutdown_kernel, now=True)
    client = manager.blocking_client()
    client.start_channels()
    stack.callback(client.stop_channels)
    client.wait_for_ready(START_S)

    def run_cell() -> str:
        number, result, state = client.execute(CODE, store_history=False), "", ""
        while state != "idle":
            message = client.get_iopub_msg(timeout=CELL_S)
            if message["parent_header"].get("msg_id") == number:
                state = message["content"].get("execution_state")
                result = message["content"].get("data", {}).get("text/plain", result)
        while client.get_shell_msg(timeout=CELL_S)["parent_header"].get("msg_id") != number:
            pass
        return result

    return run_cell


def gateway_cell(stack: ExitStack, runner: asyncio.Runner, directory: Path) -> Cell:
    """Cells in a kernel of a gateway of our own on a free loopback port; `directory` is for all its files."""
    token, port = secrets.token_hex(16), free_port()
    url, headers = f"http://127.0.0.1:{port}/api/kernels", {"Authorization": f"token {token}"}
    env = dict.fromkeys(HOMES, str(directory)) | {"PATH": os.environ["PATH"], "KG_AUTH_TOKEN": token}
    argv = [sys.executable, "-m", "kernel_gateway", "--ip=127.0.0.1", f"--port={port}"]
    process = harness.Process("kernel_gateway", argv, directory, env)
    stack.callback(process.kill)
    stack.callback(lambda: [member.kill() for member in harness.family([process.pid])])

    def make_kernel() -> str | None:
        try:
            answer = httpx.post(url, json={}, headers=headers, timeout=START_S)
        except httpx.ConnectError:
            return None
        return answer.raise_for_status().json()["id"]

    async def connect() -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession(headers=headers)
        return session, await session.ws_connect(f"{url}/{kernel}/channels")

    kernel = harness.wait_until(make_kernel, START_S, "the Kernel Gateway, of make setup-bench", process)
    session, websocket = runner.run(connect())
    stack.callback(lambda: runner.run(session.close()))
    return lambda: runner.run(_run_cell(websocket))


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
    seconds: dict[str, list[float]] = {"ours": [], "bare_client": [], "gateway": []}
    lost = dict.fromkeys(seconds, 0)

    def time_cell(name: str) -> float:
        results: list[str] = []
        taken = harness.timed(lambda: results.append(cells[name]()))
        lost[name] += results != [RESULT]
        return taken

    with harness.private_directory() as directory, harness.private_host(directory / "host", warm=0) as host:
        for number in range(options.rounds):
            files = directory / str(number)
            for name in ("bare", "gateway"):
                (files / name).mkdir(parents=True)
            with asyncio.Runner() as runner, ExitStack() as stack:
                cells = {
                    "ours": sandbox_cell(stack, runner, host),
                    "bare_client": bare_cell(stack, files / "bare"),
                    "gateway": gateway_cell(stack, runner, files / "gateway"),
                }
                methods = {name: partial(time_cell, name) for name in cells}
                for method in methods.values():
                    method()  # once without being counted: the kernel is ready then
                repetitions = dict.fromkeys(methods, options.count)
                for name, values in harness.take_turns(methods, repetitions, TURN).items():
                    seconds[name] += values
            cell_ms = {name: harness.spread_ms(values) for name, values in seconds.items()}
            harness.say(f"round {number + 1}: {cell_ms}")
    results = {
        "ratio_to_bare_client": cell_ms["ours"]["p50_ms"] / cell_ms["bare_client"]["p50_ms"],
        "speedup_vs_gateway_acking_at_once": cell_ms["gateway"]["p50_ms"] / cell_ms["ours"]["p50_ms"],
        "p50_ms": cell_ms["ours"]["p50_ms"],
    }
    return {"results": results, "cells": cell_ms, "lost": lost}


if __name__ == "__main__":
    harness.run(main, count=50, rounds=3)
