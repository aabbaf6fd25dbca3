"""The sandbox host: one daemon a node and user, which owns all containers there. `python -m sandbox.host`.

It is not in the way of commands: a client talks to its sandbox's own socket. On its own socket it answers
`start`, `keep_warm`, `release`, `release_owner`, `fate`, `list`, `stats`, `stop` and what snapshots need.
Started by whoever needs it first (`host_client.ensure_host`). Killed, it is missed by nobody who works in a
sandbox, and the next one adopts what runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sandbox import connection, errors, paths, peers
from sandbox.config import HostConfig
from sandbox.containers import Containers
from sandbox.images import locks
from sandbox.server import seccomp
from sandbox.server.wire import FrameTooLarge
from sandbox.spec import SandboxSpec
from sandbox.watchdog import Watchdog

log = logging.getLogger("sandbox.host")

SOCKET_NAME = "host.sock"
LOCK_NAME = "host.lock"
LOG_NAME = "host.log"
GIVEN_UP = ("start", "snapshot")
"""What is given up when whoever asked for it hangs up."""


class Host:
    """Answers requests about the containers of this node."""

    def __init__(self, state: Path, config: HostConfig):
        self.state = state
        self.containers = Containers(state, config)
        self.watchdog = Watchdog(self.containers.claimed, self.containers.end_for, state)
        self._started = time.monotonic()
        self._stop = asyncio.Event()

    async def run(self, on_ready: Any = None) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; then end every sandbox and remove what it left."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self.containers.reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        await self.containers.take_over()
        path = self.state / SOCKET_NAME
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, paths.check_socket_path(str(path)), backlog=512)
        guards = [asyncio.create_task(guard()) for guard in (self.containers.janitor, self.watchdog.run)]
        path.chmod(0o600)
        log.info("sandbox host %d serves %s", os.getpid(), path)
        if on_ready is not None:
            on_ready()
        await self._stop.wait()
        server.close()
        path.unlink(missing_ok=True)  # from here on a newcomer waits for our lock and starts the next host
        for guard in guards:
            guard.cancel()
        await self.containers.close()
        log.info("sandbox host %d stopped", os.getpid())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if refusal := peers.refusal(writer.get_extra_info("socket")):
                log.warning("somebody who is not ours has connected: %s", refusal)
                problem = f"the sandbox host answers its own user's programs alone: {refusal}"
                error = errors.to_wire(errors.NotAllowed(problem))
                await connection.send(writer, {"ok": False, "error": error})
                return
            while (request := await connection.receive(reader)) is not None:
                task = asyncio.create_task(self._answer(request))
                gone = asyncio.create_task(
                    reader.read(1) if request.get("op") in GIVEN_UP else asyncio.Event().wait()
                )
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    task.cancel()  # release what was started
                    await asyncio.wait({task})
                    return
                gone.cancel()
                await asyncio.wait({gone})
                reply = task.result()
                await self._deliver(writer, request, reply)
                if request.get("op") == "stop" or (not gone.cancelled() and request.get("op") in GIVEN_UP):
                    return
        except (ConnectionError, ValueError, FrameTooLarge) as error:
            log.info("a connection was dropped: %s", error)
        finally:
            writer.close()

    async def _deliver(
        self, writer: asyncio.StreamWriter, request: dict[str, Any], reply: dict[str, Any]
    ) -> None:
        """A sandbox whose owner cannot be told of it is released at once."""
        try:
            await connection.send(writer, reply)
        except ConnectionError:
            if request.get("op") == "start" and reply["ok"]:
                await self.containers.release(reply["result"]["id"])
            raise

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, "result": await self._carry_out(request)}
        except Exception as error:
            if not isinstance(error, errors.SandboxError):
                log.exception("request %r failed", request.get("op"))
            return {"ok": False, "error": errors.to_wire(error)}

    async def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        containers = self.containers
        match request:
            case {"op": "start", "spec": dict(spec)}:
                if self._stop.is_set():
                    raise errors.SandboxGone("the sandbox host is stopping; ask again for a new one")
                return (await containers.start(SandboxSpec.from_json(spec))).to_json()
            case {"op": "keep_warm", "spec": dict(spec), "count": int(count)}:
                await containers.keep_warm(SandboxSpec.from_json(spec), count)
                return {}
            case {"op": "fate", "id": str(sandbox_id)}:
                fate = containers.fate(sandbox_id)
                return fate.to_json() if fate else {}
            case {"op": "release", "id": str(sandbox_id)}:
                return {"released": int(await containers.release(sandbox_id, request.get("wait", True)))}
            case {"op": "release_owner", "owner": str(owner)}:
                return {"released": await containers.release_owner(owner)}
            case {"op": "snapshot" | "forget_snapshots"}:
                return await containers.snapshots.answer(request)
            case {"op": "list"}:
                disk = self.watchdog.on_disk
                return {"sandboxes": [box | {"on_disk": disk(box["id"])} for box in containers.list()]}
            case {"op": "stats"}:
                uptime = round(time.monotonic() - self._started, 1)
                own = {"pid": os.getpid(), "uptime_s": uptime, "breaches": self.watchdog.breaches}
                return containers.stats() | own
            case {"op": "stop"}:
                self._stop.set()
                return {"pid": os.getpid()}
        raise errors.SandboxRequestError(
            f"unknown or incomplete request {request.get('op')!r} to the sandbox host"
        )


def take_lock(state: Path) -> int:
    """Hold the state directory for the life of this process; the open lock. Raises SandboxError if held."""
    fd = os.open(state / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise errors.SandboxError(f"another sandbox host holds {state / LOCK_NAME}") from error
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def main() -> int:
    """Entry point of the daemon."""
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.host", description="One sandbox host a node and user."
    )
    parser.add_argument("--state-dir", type=Path, default=paths.state_dir())
    parser.add_argument("--detach", action="store_true", help="go to the background")
    parser.add_argument("--ready-fd", type=int, help="write 'ok' here when serving, or what is wrong")
    options = parser.parse_args()
    if options.detach:
        # An orphan in a session of its own: whoever starts us may end, or wait for its children.
        if os.fork():
            os._exit(0)
        os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def tell(text: str) -> None:
        if options.ready_fd is not None:
            with contextlib.suppress(OSError):
                os.write(options.ready_fd, text.encode())
            os.dup2(2, options.ready_fd)  # so that whoever reads comes to its end
            options.ready_fd = None

    seccomp.join_own_keyring()  # what a runtime starts before our walls are up has no key of this user's
    try:
        # Root's sandboxes run as another user, who must get through to its own directories below.
        state = paths.own_directory(options.state_dir, 0o711 if paths.sandbox_user() is not None else 0o700)
        config = HostConfig.from_environment()
        lock, shield = take_lock(state), locks.shield(state)
        # Two descriptors a sandbox, and one for each that waits for one.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(Host(state, config).run(lambda: tell("ok")))
        os.close(shield)
        os.close(lock)
    except (errors.SandboxError, OSError) as error:
        log.error("%s", error)
        tell(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
