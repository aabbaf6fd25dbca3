"""`python -m services.capture --port N`: a process of the fleet, of which several share a port."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading

import structlog
from aiohttp import web

from services import logs
from services.capture.app import create_app
from services.capture.serving import Service
from services.settings import Settings
from services.state.backends.store import BackendStore, PlacementPolicy
from services.state.capture.store import CaptureStore
from services.state.redis import LoopConnection, connect
from workers.agent.llm import session
from workers.agent.placement import Placements
from workers.agent.vocabulary import Keeper

log = structlog.get_logger("capture")

# Tokenizers do without, and where it is installed transformers would import it: 150 MB.
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]

BACKLOG = 1024


async def serve(host: str, port: int, settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    client = connect(settings.redis_url)
    connection = LoopConnection(settings.redis_url)
    backends = BackendStore(client, PlacementPolicy(weigh=settings.backend_load))
    placements, store = Placements(backends, connection), CaptureStore(client)
    async with session() as http:
        service = Service(store, placements, http)
        secret = await asyncio.to_thread(store.secret)
        app = create_app(service, secret, store, placements.send, settings.max_body_bytes)
        # A program that goes away is noticed at once; its turn goes on in a task of its own.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=True)
        await site.start()
        living = asyncio.create_task(service.live())
        threading.Thread(target=Keeper(client).run, name="vocabulary", daemon=True).start()
        log.info("capture listens", host=host, port=port)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        await site.stop()
        await service.close(settings.shutdown_grace_s)
        living.cancel()
        await runner.cleanup()
        await connection.close()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m services.capture", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="where it listens; keys are checked")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    settings = Settings.from_env()
    logs.configure(settings)
    logs.identify(worker=f"capture@{settings.node}", node=settings.node)
    asyncio.run(serve(args.host, args.port, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
