"""A receiver of webhooks on loopback that answers as it is told."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from aiohttp import web

ADDRESS = "127.0.0.9"
"""On loopback, and not what `localhost` resolves to."""


@dataclass
class Received:
    """One call."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Answers 200 but at `/fail/N` (500 for the first N calls), `/hang`, `/slow`, `/gone`, `/redirect`."""

    url: str = ""
    calls: list[Received] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    """Set while a call to `/hang` waits."""
    heal: threading.Event = field(default_factory=threading.Event)
    """Once it is set, `/hang` answers at once."""
    release: threading.Event = field(default_factory=threading.Event)
    """Once it is set, `/slow` answers at once."""

    def at(self, path: str) -> list[Received]:
        """Calls to a path, in the order of their arrival."""
        return [call for call in list(self.calls) if call.path == path]

    async def _answer(self, request: web.Request) -> web.Response:
        self.calls.append(Received(request.path, dict(request.headers), await request.read()))
        _, kind, *rest = request.path.split("/")
        if kind == "fail" and len(self.at(request.path)) <= int(rest[0]):
            return web.Response(status=500)
        if kind == "redirect":
            raise web.HTTPTemporaryRedirect(f"{self.url}/after-redirect")
        if kind == "gone":
            return web.Response(status=410)
        while kind == "slow" and not self.release.is_set():
            await asyncio.sleep(0.05)
        if kind == "hang" and not self.heal.is_set():
            self.hanging.set()
            while not self.heal.is_set():
                await asyncio.sleep(0.05)
        return web.Response()

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, ADDRESS, 0)
        await site.start()
        self.url = f"http://{ADDRESS}:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()


class RunningReceiver:
    """Context manager: the receiver in a thread with an event loop of its own."""

    def __enter__(self) -> Receiver:
        self.receiver = Receiver()
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        serving = self.receiver.serve(ready, self._stop)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serving,))
        self._thread.start()
        assert ready.wait(30)
        return self.receiver

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()
