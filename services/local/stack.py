"""Start and end the stack of one machine.

Invariant: every process is in `stack.json` and carries the stack's mark in its environment before
anybody waits for it, so that whatever happens to `up`, `down` finds and ends them all.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from rollout.client import KEY_VARIABLE, Client, RolloutError
from services import flower
from services.gateway.compat.port import Compat
from services.local import keys, paths, plan, ports, redis
from services.local.errors import StackError
from services.local.plan import Options, Part
from services.local.processes import MARK, SANDBOX_MARK, Process, end, end_marked, spawn, tail
from services.local.record import Record, locked
from services.local.supervise import Parts, parts_file, read_parts, write_parts
from services.settings import ENV_PREFIX, Settings

START_TIMEOUT_S = 120.0
"""For one part to answer: importing torch from a cold disk takes half a minute."""
POLL_S = 0.05
LAST_LINES = 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """What `down` did."""

    processes: list[str]
    """Those that were alive, in the order in which they were ended."""
    strays: int
    """Further processes of the stack, started by its parts (the sandbox host, containers)."""


class Stack:
    """The stack whose records are in `options.state_dir`."""

    def __init__(self, state_dir: Path, say: Say) -> None:
        self.dir = state_dir
        self.say = say
        self.record = Record()
        self._file = state_dir / "stack.json"
        self._logs = state_dir / "logs"
        self._taken: set[int] = set()
        self.api_key = ""
        """Of the scope admin, made by `up`."""
        self._parts: Parts = {}
        self._ports = Ports(state_dir / "ports.json")

    # ------------------------------------------------------------------------------ up

    def up(self, options: Options) -> Record:
        """Start everything and wait until rollouts can be worked on.

        Raises:
            StackError: A stack runs here already, or a part did not start; then everything that
                was started has been ended again.
        """
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.dir.chmod(0o700)
        self._logs.mkdir(exist_ok=True)
        with locked(self.dir):
            self._refuse_second()
            try:
                self._start(options)
            except BaseException:
                with quiet_signals():
                    self._end(self.record)
                raise
        return self.record

    def _refuse_second(self) -> None:
        old = Record.load(self._file)
        if old is None:
            return
        if old.live:
            if old.supervisor is not None and not old.supervisor.alive:
                self.record = old
                self._supervise()
                self.say("the supervisor had ended and looks after the stack again")
            raise StackError(f"a stack runs already: gateway at {old.url}. `rollout down` ends it")
        self._end(old)  # `up` or the machine was killed: sweep what is left

    def _start(self, options: Options) -> None:
        settings = Settings.from_env()
        record = self.record
        record.grace_s, record.node = settings.shutdown_grace_s, settings.node
        port = self._gateway_port(options, settings)
        # 0.0.0.0 is where it listens, not where one reaches it.
        host = "127.0.0.1" if settings.gateway_host in ("0.0.0.0", "::") else settings.gateway_host
        record.url = f"http://{host}:{port}"
        env = self._environment(options, port)
        self._prepare_compat(options, env)
        self._prepare_flower(options, settings, env)
        env["ROLLOUT_REDIS_URL"] = self._start_redis(env)
        self.api_key = keys.accepted(env["ROLLOUT_REDIS_URL"], self.dir)
        keys.announce(self.dir, record.url, self.api_key, private=options.private_ports)
        if not os.environ.get(redis.URL_VARIABLE):
            # Of a life that nobody ended in order: its sandboxes are gone. In a Redis of yours they may be
            # those of workers that were started by hand.
            self._hand_back(record, env)

        # All at once: most of their time is imports, and each waits for the others by itself.
        begun = time.monotonic()
        gateway = self._spawn(plan.gateway(), env)
        fleets = [
            self._spawn(plan.fleet(stage, options.slots_of(stage, settings), settings.node), env)
            for stage in plan.STAGES
        ]
        backend = self._start_backend(options, env)
        monitor = self._start_flower(env)
        # It ends by itself, so it is no part of the stack; should `up` fail, its mark gives it away.
        sandbox = subprocess.Popen(
            plan.sandbox_check(settings, options.sandbox_runtime).command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=paths.REPO,
        )

        self._check_sandbox(sandbox, begun, required=options.require_sandbox)
        self._await(gateway, lambda: answers(f"{record.url}/health"), begun, record.url)
        self._await(fleets[0], self._fleets_missing, begun, self._slots_text(options, settings), fleets[1:])
        if backend:
            assert record.backend_url
            self._await(backend, lambda: answers(f"{record.backend_url}/health"), begun, record.backend_url)
        if record.backend_url:
            self._register(record.backend_url)
        if monitor:
            assert record.flower_url
            # The page itself asks for the password.
            healthy = f"{record.flower_url}/healthcheck"
            text = f"{record.flower_url}, user and password in {record.flower_auth_file}"
            self._await(monitor, lambda: answers(healthy), begun, text)
        self._supervise()

    def _supervise(self) -> None:
        """Have a process of its own, which outlives this one and its terminal, start anew what ends."""
        command = [sys.executable, "-m", "services.local.supervise", str(self.dir)]
        log = self._logs / "supervisor.log"
        env = {**os.environ, MARK: self.record.mark, "PYTHONPATH": str(paths.REPO)}
        env.pop(KEY_VARIABLE, None)
        self.record.supervisor = spawn("supervisor", command, env, paths.REPO, log)
        self.record.save(self._file)

    def _gateway_port(self, options: Options, settings: Settings) -> int:
        if options.port:
            if not ports.is_free(settings.gateway_host, options.port):
                raise StackError(f"--port {options.port} is taken; leave it out to get a free one")
            self._taken.add(options.port)
            return options.port
        return self._port("gateway", settings.gateway_port, options)

    def _port(self, name: str, preferred: int, options: Options) -> int:
        if options.private_ports:
            return ports.pick(0, self._taken)
        last = self._ports.last(name, preferred)
        port = ports.pick(last or preferred, self._taken)
        if port not in (last, preferred):
            self.say(f"port {last or preferred} is taken: {name} gets {port}")
        elif port != preferred:
            self.say(f"{name} keeps port {port}, which it had before")
        self._ports.note(name, preferred, port)
        return port

    def _environment(self, options: Options, port: int) -> dict[str, str]:
        env = {**os.environ, MARK: self.record.mark, "PYTHONUNBUFFERED": "1"}
        env["ROLLOUT_URL"] = self.record.url
        env["ROLLOUT_GATEWAY_PORT"] = str(port)
        env["ROLLOUT_STACK_RECORD"] = str(self._file)
        # Children run in the checkout, and what is installed may be another version of it.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(paths.REPO), os.environ.get("PYTHONPATH")]))
        # The key is for calls of ours: no part needs it, and what runs beside handlers should not have it.
        env.pop(KEY_VARIABLE, None)
        # torch would make one in /tmp and leave it there.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.dir / "torchinductor"))
        # It holds keys, logs and Redis' data: no sandbox shows it.
        env["ROLLOUT_SANDBOX_CLOSED"] = ":".join(
            filter(None, [env.get("ROLLOUT_SANDBOX_CLOSED"), str(self.dir)])
        )
        if options.sandbox_runtime:
            env["ROLLOUT_SANDBOX_RUNTIME"] = options.sandbox_runtime
        if not env.get("ROLLOUT_SANDBOX_DIR"):
            self.record.sandbox_dir = env["ROLLOUT_SANDBOX_DIR"] = str(paths.sandbox_dir(self.dir))
            env[SANDBOX_MARK] = self.record.mark  # a host in a directory of yours may serve others too
        return env

    def _prepare_compat(self, options: Options, env: dict[str, str]) -> None:
        """The port that needs no key, if there is to be one: said before anything listens."""
        for name in ("compat_port", "compat_tenant", "compat_host", "compat_servers"):
            if (value := getattr(options, name)) is not None:
                env[ENV_PREFIX + name.upper()] = str(value)
        compat = Compat.of(Settings.from_env(env))
        if compat is None:
            return
        if not ports.is_free(compat.host, compat.port):
            raise StackError(f"--compat-port {compat.port} is taken on {compat.host}; choose another one")
        self._taken.add(compat.port)
        self.say(str(compat))

    def _start_redis(self, env: dict[str, str]) -> str:
        choice = redis.choose()
        begun = time.monotonic()
        if choice.url:
            reason = redis.ping(choice.url)
            if reason:
                address = redis.hide_password(choice.url)
                raise StackError(
                    f"{redis.URL_VARIABLE}={address} does not answer ({reason}); start it, or unset it "
                    "and `rollout up` runs one by itself"
                )
            self._done("redis", begun, choice.label)
            return choice.url
        port = ports.pick(0, self._taken)
        server = redis.prepare(choice, self.dir / "redis", port)
        process = self._spawn(Part("redis", server.command), env)
        self._await(process, lambda: redis.ping(server.url), begun, f"{choice.label}, 127.0.0.1:{port}")
        return server.url

    def _start_backend(self, options: Options, env: dict[str, str]) -> Process | None:
        if options.backend_url:
            self.record.backend_url = options.backend_url
            return None
        if not options.embedded_backend:
            return None
        if not paths.DEMO_CHECKPOINT.is_dir():
            raise StackError(
                f"the demo model is missing at {paths.DEMO_CHECKPOINT}; use --backend or --no-backend"
            )
        port = self._port("backend", plan.BACKEND_PORT, options)
        self.record.backend_url = f"http://127.0.0.1:{port}"
        return self._spawn(plan.embedded_backend(port), env)

    def _prepare_flower(self, options: Options, settings: Settings, env: dict[str, str]) -> None:
        """Its port and its password file, before the gateway starts, which links to it."""
        if not options.flower:
            return
        port = self._port("flower", plan.FLOWER_PORT, options)
        self.record.flower_url = f"http://127.0.0.1:{port}"
        try:
            file = flower.ensure_auth_file(Path(settings.flower_auth_file or self.dir / "flower.auth"))
        except flower.FlowerAuthError as error:
            raise StackError(str(error)) from error
        self.record.flower_auth_file = str(file)
        database = Path(settings.flower_db or self.dir / "flower.db")
        env.update(flower.environment(file, database))
        env.setdefault(flower.URL_VARIABLE, self.record.flower_url)

    def _start_flower(self, env: dict[str, str]) -> Process | None:
        if self.record.flower_url is None:
            return None
        return self._spawn(plan.flower(int(self.record.flower_url.rpartition(":")[2])), env)

    def _check_sandbox(self, check: subprocess.Popen[str], begun: float, *, required: bool) -> None:
        """Say which runtime the sandboxes get and what it lacks; without any, say that loudly."""
        try:
            said = check.communicate(timeout=START_TIMEOUT_S)[0].strip()
        except subprocess.TimeoutExpired:
            check.kill()
            check.wait()
            said = f"none has started within {START_TIMEOUT_S:.0f} s"
        if check.returncode == 0:
            self._done("sandbox", begun, said)
            return
        problem = f"NO SANDBOX WORKS ON THIS MACHINE: {said}"
        if required:
            raise StackError(problem)
        self.say(f"{problem}\nHandlers that use none work; all others will fail.")

    def _register(self, url: str) -> None:
        begun = time.monotonic()
        try:
            with Client(self.record.url, api_key=self.api_key) as client:
                backend = client.add_backend(url)
        except RolloutError as error:
            raise StackError(f"backend {url} could not be registered: {error}") from error
        self._done("registered", begun, f"{backend.model}, {backend.max_model_len} tokens of context")

    def _slots_text(self, options: Options, settings: Settings) -> str:
        return ", ".join(f"{stage} {options.slots_of(stage, settings)}" for stage in plan.STAGES) + " slots"

    def _fleets_missing(self) -> str | None:
        with Client(self.record.url, timeout=5.0, api_key=self.api_key) as client:
            said = client.ready()
        return None if said["ready"] else str(said.get("missing") or said)

    # ------------------------------------------------------------------------------ one part

    def _spawn(self, part: Part, env: dict[str, str]) -> Process:
        self._parts[part.name] = {"command": part.command, "env": dict(env)}
        write_parts(self.dir, self._parts)
        log = self._logs / f"{part.name.replace(' fleet', '')}.log"
        process = spawn(part.name, part.command, env, paths.REPO, log)
        self.record.processes.append(process)
        self.record.save(self._file)
        return process

    def _await(
        self,
        process: Process,
        missing: Callable[[], str | None],
        begun: float,
        text: str,
        others: list[Process] | None = None,
    ) -> None:
        """Wait until `missing` gives None, as long as the process (and `others`) live."""
        together = [process, *(others or [])]
        deadline = time.monotonic() + START_TIMEOUT_S
        while (reason := missing()) is not None:
            for each in together:
                if not each.alive:
                    raise self._failure(each, "ended")
            if time.monotonic() > deadline:
                raise self._failure(process, f"is not ready after {START_TIMEOUT_S:.0f} s ({reason})")
            time.sleep(POLL_S)
        self._done("fleets" if others else process.name, begun, text)

    def _hand_back(self, record: Record, env: dict[str, str]) -> None:
        """Rollouts that wait with a sandbox of this stack begin anew: it ends, or has ended, by no fault of
        theirs."""
        if not (record.sandbox_dir and record.node and env.get("ROLLOUT_REDIS_URL")):
            return
        from services.handback import (
            hand_back,  # Celery, which a `down` that has nothing to end need not load
        )

        try:
            count = hand_back(Settings.from_env(env), record.node)
        except Exception as error:  # as where Redis was killed: the next `up` does it
            self.say(f"rollouts that wait with a sandbox were not handed back: {error!r:.300}")
            return
        if count:
            self.say(f"handed back {count} rollouts that waited with a sandbox; no attempt is used up")

    def _failure(self, process: Process, what: str) -> StackError:
        lines = tail(process.log, LAST_LINES)
        return StackError(f"{process.name} {what}. The end of {process.log}:\n{lines}")

    def _done(self, name: str, begun: float, text: str) -> None:
        self.say(f"{name:<10} {time.monotonic() - begun:5.1f} s  {text}")

    def wait(self) -> None:
        """Stay as long as the stack is looked after, for `--foreground`.

        Raises:
            StackError: The supervisor ended by itself.
        """
        assert self.record.supervisor is not None
        while self.record.supervisor.alive:
            time.sleep(0.5)
        if self._file.exists():
            raise self._failure(self.record.supervisor, "ended")

    # ------------------------------------------------------------------------------ down

    def down(self) -> Ended | None:
        """End exactly what `up` started; None when nothing is recorded here."""
        if not self._file.exists():
            return None
        with locked(self.dir), quiet_signals():
            record = Record.load(self._file)
            if record is not None and record.supervisor is not None:
                # First, or it would start anew what is ended; it may just have done so.
                end([record.supervisor], 5.0)
                record = Record.load(self._file)
            return self._end(record) if record else None

    def _end(self, record: Record) -> Ended:
        """Fleets first, for they hand back their rollouts through Redis; Redis last."""
        keys.withdraw(self.dir)
        by_name = {process.name: process for process in record.processes}
        fleets = [process for process in record.processes if process.name.endswith("fleet")]
        rest = [by_name[name] for name in ("flower", "backend", "gateway") if name in by_name]
        if record.supervisor is not None:
            end([record.supervisor], 5.0)
        ended = end(fleets, record.grace_s + 10.0)
        if record.sandbox_dir:
            self._hand_back(record, read_parts(self.dir).get("gateway", {}).get("env", {}))
            stop_sandbox_host(Path(record.sandbox_dir), self.say)
        ended += end(rest, 10.0)
        ended += end([process for process in record.processes if process.name == "redis"], 10.0)
        strays = end_marked(record.mark, 3.0)
        if record.sandbox_dir:
            shutil.rmtree(record.sandbox_dir, ignore_errors=True)
        if record.live:
            raise StackError(
                f"could not be ended: {', '.join(f'{p.name} (pid {p.pid})' for p in record.live)}"
            )
        self._file.unlink(missing_ok=True)
        parts_file(self.dir).unlink(missing_ok=True)
        return Ended([f"{process.name} (pid {process.pid})" for process in ended], strays)


class Ports:
    """Ports that parts had last, for clients know them: they get the same ones where they can be had."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _read(self) -> dict[str, list[int]]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def last(self, name: str, preferred: int) -> int | None:
        """The port that a part got the last time that it wanted this one."""
        match self._read().get(name):
            case [int(wanted), int(got)] if wanted == preferred and 0 < got < 65536:
                return got
        return None

    def note(self, name: str, preferred: int, got: int) -> None:
        self._path.write_text(json.dumps(self._read() | {name: [preferred, got]}))


def stop_sandbox_host(directory: Path, say: Say) -> None:
    """Ask the stack's own sandbox host to end its containers and itself, if it ever ran."""
    if not directory.exists():
        return
    try:
        from sandbox.host_client import HostClient
    except ImportError:  # nothing could have started one
        return
    try:
        asyncio.run(HostClient(directory).stop())
    except Exception as error:  # the strays are ended by their mark all the same
        say(f"sandbox host in {directory} did not stop in order: {error}")


def answers(url: str | None) -> str | None:
    """None when the URL answers with a success; else why not."""
    try:
        reply = httpx.get(str(url), timeout=5.0, trust_env=False, follow_redirects=True)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if reply.is_success else f"it answers {reply.status_code}"


@contextmanager
def quiet_signals() -> Iterator[None]:
    """Ctrl-C during the clean-up would leave processes behind; the clean-up itself is bounded in time."""
    try:
        old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are not ours to set
        old = {}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
