"""Time of one IPython cell, `1+1`: our sandbox, and Kernel Gateway with a websocket, in the same run.

Ours is SandboxClient.ipython in an Apptainer sandbox without network; the other runs on this machine, outside
any container, and is read the way OpenHands does it (`_kernel_gateway.py`). Both take turns of ten cells.
A result is lost when the call returns without it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path

from benchmarks._harness import report
from benchmarks._kernel_gateway import KernelGateway
from benchmarks._latency import (
    end_in_order_on_sigterm,
    private_directory,
    private_host,
    say,
    spread_ms,
    take_turns,
    timed,
)
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec

TURN = 10
CELL, RESULT = "1+1", "2"
CELL_S = 60.0


class Pair:
    """A fresh sandbox and a fresh gateway."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: HostClient, gateway: KernelGateway):
        self._loop = loop
        self._host = host
        self._gateway = gateway
        self._client: SandboxClient | None = None
        self._sandbox = ""
        self.lost = {"ours": 0, "gateway": 0}

    def start(self) -> dict[str, float]:
        """Seconds from nothing to the result of the first cell; of ours also those of the sandbox alone."""
        began = timed(lambda: self._wait(self._start_sandbox()))
        return {
            "sandbox": began,
            "ours": began + self.ours(),
            "gateway": timed(lambda: self._wait(self._gateway.start())) + self.gateway(),
        }

    def ours(self) -> float:
        """Seconds of one cell in the sandbox."""
        assert self._client is not None
        client = self._client

        async def cell() -> str:
            return (await client.ipython(CELL, CELL_S)).output

        return self._time("ours", cell)

    def gateway(self) -> float:
        """Seconds of one cell through the gateway."""
        return self._time("gateway", lambda: self._gateway.run(CELL))

    def end(self) -> None:
        """End both."""
        self._gateway.close()
        if self._client is not None:
            self._wait(self._client.close())
        self._wait(self._host.release(self._sandbox))

    async def _start_sandbox(self) -> None:
        info = await self._host.start(SandboxSpec(runtime="apptainer"))
        self._sandbox = info.id
        self._client = SandboxClient(info.socket)

    def _time(self, name: str, cell: Callable[[], Coroutine[None, None, str]]) -> float:
        said = []
        seconds = timed(lambda: said.append(self._wait(cell())))
        self.lost[name] += said[0].strip().rpartition(" ")[2] != RESULT
        return seconds

    def _wait(self, coroutine: Coroutine) -> object:
        return self._loop.run_until_complete(coroutine)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=50, help="cells a round, of each of the two (default 50)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="each with a sandbox and a gateway of its own (default 3)"
    )
    options = parser.parse_args()
    end_in_order_on_sigterm()
    cells: dict[str, list[float]] = {"ours": [], "gateway": []}
    starts: dict[str, list[float]] = {"sandbox": [], "ours": [], "gateway": []}
    lost = {"ours": 0, "gateway": 0}
    with ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        directory.chmod(0o711)  # the container's user passes through
        host = stack.enter_context(private_host(directory / "host", warm=0))
        loop = stack.enter_context(asyncio.Runner()).get_loop()
        for number in range(options.rounds):
            run_round(loop, host, directory / str(number), options.count, cells, starts, lost)
            say(f"round {number + 1}: ours {spread_ms(cells['ours'])}, gateway {spread_ms(cells['gateway'])}")
    ours = spread_ms(cells["ours"])
    report(
        "ipython_latency",
        {
            "p50_ms": ours["p50_ms"],
            "speedup_vs_gateway": round(
                statistics.median(cells["gateway"]) / statistics.median(cells["ours"]), 1
            ),
        },
        cells={name: spread_ms(values) for name, values in cells.items()},
        lost=lost,
        start_ms={name: round(statistics.median(values) * 1e3, 1) for name, values in starts.items()},
        count=options.count,
        rounds=options.rounds,
    )


def run_round(
    loop: asyncio.AbstractEventLoop,
    host: HostClient,
    directory: Path,
    count: int,
    cells: dict[str, list[float]],
    starts: dict[str, list[float]],
    lost: dict[str, int],
) -> None:
    """Add what one fresh pair does to the lists."""
    directory.mkdir()
    pair = Pair(loop, host, KernelGateway(directory))
    try:
        for name, seconds in pair.start().items():
            starts[name].append(seconds)
        methods = {"ours": pair.ours, "gateway": pair.gateway}
        for name, values in take_turns(methods, dict.fromkeys(methods, count), TURN).items():
            cells[name] += values
    finally:
        pair.end()
    for name, number in pair.lost.items():
        lost[name] += number


if __name__ == "__main__":
    main()
