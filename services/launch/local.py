"""The whole service on one machine as plain child processes: no root, no containers, no daemons left.

Invariant: every process is in `stack.json` and carries the stack's mark in its environment before anybody
waits for it, so that whatever happens to `up`, `down` finds and ends them all.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis import RedisError

from rollout import account
from rollout.client import KEY_VARIABLE, Client, RolloutError
from rollout.errors import ApiKeyError
from services import flower
from services.gateway.compat.port import Compat
from services.launch import StackError, parts, paths, redis, watch
from services.launch.parts import STAGES, answers
from services.launch.record import Record
from services.launch.supervisor import MARK, SANDBOX_MARK, Part, Supervisor, end_marked, stop
from services.settings import ENV_PREFIX, Settings
from services.state.api_keys import KeyProblem, KeyStore, Scope, new_text
from services.state.redis import connect
from services.state.tenants import DEFAULT_TENANT

START_TIMEOUT_S = 120.0
"""For one part to answer: importing torch from a cold disk takes half a minute."""
END_S = 10.0
"""For a part to end beyond the grace that it gives its rollouts."""
TELL_S = 5.0
"""Between two words on what one waits for."""
BACKEND_PORT = 8000
KEY_FILE = "api.key"
"""In the run directory; the same from life to life, so that what a trainer holds goes on working."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What a caller of `Stack.up` may choose."""

    state_dir: Path
    slots: dict[str, int | None] = field(default_factory=dict)
    """Rollouts at once by stage; a stage without a number gets the default."""
    backend_url: str | None = None
    """An LLM server of one's own, registered instead of the embedded one."""
    embedded_backend: bool = True
    flower: bool = True
    port: int | None = None
    """Port of the gateway, insisted on; None = that of the settings, or a free one if it is taken."""
    sandbox_runtime: str | None = None
    require_sandbox: bool = False
    """True: a machine on which no sandbox works is an error and not only a warning."""
    compat_port: int | None = None
    """Port for clients that send no key; None = that of the settings, as a rule none."""
    compat_tenant: str | None = None
    compat_host: str | None = None
    compat_servers: bool | None = None
    private_ports: bool = False
    """True: only free ports, so that the stack runs beside any other."""


@dataclass(frozen=True)
class Ended:
    """What `down` did."""

    parts: list[str]
    """Those that were alive, in the order in which they were ended."""
    strays: int
    """Further processes of the stack, started by its parts (the sandbox host, containers)."""


class Stack:
    """The stack whose records are in `state_dir`."""

    def __init__(self, state_dir: Path, say: Say) -> None:
        self.dir = state_dir
        self.say = say
        self.record = Record()
        self.api_key = ""
        """Of the scope admin, made by `up`."""
        self._file = state_dir / "stack.json"
        self._logs = state_dir / "logs"
        self._taken: set[int] = set()

    # -- up ----------------------------------------------------------------------------------

    def up(self, options: Options) -> Record:
        """Start everything and wait until rollouts can be worked on.

        Raises:
            StackError: A stack runs here already, or a part did not start; then everything that
                was started has been ended again.
        """
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.dir.chmod(0o700)
        with self._locked():
            self._refuse_second()
            self._supervisor = Supervisor(self._logs, StackError)
            try:
                self._start(options)
            except BaseException:
                with _quiet_signals():
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
                self._leave_supervisor()
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
        capture = self._prepare_capture(options, settings, host, env)
        env["ROLLOUT_REDIS_URL"] = self._start_redis(env)
        self._make_key(env["ROLLOUT_REDIS_URL"], private=options.private_ports)
        if not os.environ.get(redis.URL_VARIABLE):
            # Of a life that nobody ended in order: its sandboxes are gone. In a Redis of yours they may be
            # those of workers that were started by hand.
            self._hand_back(record, env)

        # All at once: most of their time is imports, and each waits for the others by itself.
        begun = time.monotonic()
        gateway = self._spawn(parts.gateway(), env)
        slots = {stage: parts.slots_of(stage, options.slots) for stage in STAGES}
        fleets = [self._spawn(parts.fleet(stage, slots[stage], settings.node), env) for stage in STAGES]
        for part in capture:
            self._spawn(part, env)
        backend = self._start_backend(options, env)
        monitor = None
        if record.flower_url:
            monitor = self._spawn(parts.flower(int(record.flower_url.rpartition(":")[2])), env)
        # It ends by itself, so it is no part of the stack; should `up` fail, its mark gives it away.
        sandbox = parts.SandboxCheck(env)

        self._check_sandbox(sandbox, begun, required=options.require_sandbox)
        self._await(gateway, lambda: answers(f"{record.url}/health"), begun, record.url)
        capture_url = env.get("ROLLOUT_CAPTURE_URL", "")
        for part in capture:
            self._await(part, lambda part=part: parts.unheard(part, capture_url), begun, capture_url)
        with self._telling("the fleets still start"):
            self._supervisor.wait_for(fleets[0], self._fleets_missing, START_TIMEOUT_S, fleets[1:])
        text = ", ".join(f"{stage} {count}" for stage, count in slots.items())
        self._done("fleets", begun, f"{text} slots")
        if backend:
            url = str(record.backend_url)
            self._await(backend, lambda: answers(f"{url}/health"), begun, url)
        if record.backend_url:
            self._register(record.backend_url)
        if monitor:
            # The page itself asks for the password.
            text = f"{record.flower_url}, user and password in {record.flower_auth_file}"
            self._await(monitor, lambda: answers(f"{record.flower_url}/healthcheck"), begun, text)
        self._leave_supervisor()

    def _leave_supervisor(self) -> None:
        """Have a process of its own, which outlives this one and its terminal, start anew what ends."""
        env = {**os.environ, MARK: self.record.mark, "PYTHONPATH": str(paths.REPO)}
        env.pop(KEY_VARIABLE, None)
        log = str(self._logs / "supervisor.log")
        self.record.supervisor = part = Part("supervisor", watch.command(self.dir), env, log)
        Path(part.log).write_bytes(b"")
        # `rollout upgrade` may come before it listens.
        part.start(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        part.env = {}  # it is started anew by the next `up`, with the environment of that
        self.record.save(self._file)

    def _gateway_port(self, options: Options, settings: Settings) -> int:
        if options.port:
            if not parts.port_is_free(settings.gateway_host, options.port):
                raise StackError(f"--port {options.port} is taken; leave it out to get a free one")
            self._taken.add(options.port)
            return options.port
        return self._port("gateway", settings.gateway_port, options)

    def _port(self, name: str, preferred: int, options: Options) -> int:
        """A port for a part: the one that it had last where it can be had, for clients know it."""
        if options.private_ports:
            return parts.pick_port([], self._taken)
        file = self.dir / "ports.json"
        try:
            known = json.loads(file.read_text())
            usual, last = known.get(name, (preferred, preferred))
        except (OSError, ValueError, TypeError, AttributeError):
            known, usual, last = {}, preferred, preferred
        if usual != preferred:  # somebody wants another one than last time
            last = preferred
        if name in known:
            parts.await_freed("127.0.0.1", last)
        port = parts.pick_port([last], self._taken)
        if port not in (last, preferred):
            self.say(f"port {last} is taken: {name} gets {port}")
        elif port != preferred:
            self.say(f"{name} keeps port {port}, which it had before")
        file.write_text(json.dumps({**known, name: [preferred, port]}))
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
        env["ROLLOUT_SANDBOX_CLOSED"] = parts.closed_to_sandboxes(env, self.dir)
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
        if not parts.port_is_free(compat.host, compat.port):
            raise StackError(f"--compat-port {compat.port} is taken on {compat.host}; choose another one")
        self._taken.add(compat.port)
        self.say(str(compat))

    def _prepare_flower(self, options: Options, settings: Settings, env: dict[str, str]) -> None:
        """Its port and its password file, before the gateway starts, which links to it."""
        if not options.flower:
            return
        self.record.flower_url = f"http://127.0.0.1:{self._port('flower', flower.PORT, options)}"
        file = flower.ensure_auth_file(Path(settings.flower_auth_file or self.dir / "flower.auth"))
        self.record.flower_auth_file = str(file)
        env.update(flower.environment(file, Path(settings.flower_db or self.dir / "flower.db")))
        env.setdefault(flower.URL_VARIABLE, self.record.flower_url)

    def _prepare_capture(
        self, options: Options, settings: Settings, host: str, env: dict[str, str]
    ) -> list[Part]:
        """Its processes, to be started, and their address for gateway and workers; none where there is one.

        Args:
            host: By which others reach what listens on the gateway's address.
        """
        if settings.capture_url or not settings.capture_processes:
            return []
        port = self._port(parts.CAPTURE, parts.CAPTURE_PORT, options)
        env["ROLLOUT_CAPTURE_URL"] = f"http://{host}:{port}"
        return parts.capture(settings.gateway_host, port, settings.capture_processes)

    def _start_redis(self, env: dict[str, str]) -> str:
        choice, begun = redis.choose(), time.monotonic()
        if choice.url:
            redis.require(choice.url, "start it, or unset it and `rollout up` runs one by itself")
            self._done("redis", begun, choice.label)
            return choice.url
        port = parts.pick_port([], self._taken)
        server = redis.prepare(choice, self.dir / "redis", port)
        child = self._spawn(Part("redis", server.command), env)
        self._supervisor.wait_for(child, lambda: redis.ping(server.url), START_TIMEOUT_S)
        self._done("redis", begun, f"{choice.label}, 127.0.0.1:{port}")
        return server.url

    def _make_key(self, redis_url: str, *, private: bool) -> None:
        """The key of the stack's operator; its file keeps it, and clients of this account find both.
        StackError: a file is not ours alone or cannot be written, or Redis does not take the key."""
        file = self.dir / KEY_FILE
        try:
            text = (account.read_private(file) or "").strip()
            with connect(redis_url, max_connections=2) as client:
                store = KeyStore(client)
                try:
                    store.create(DEFAULT_TENANT, [Scope.ADMIN], text=text)
                except KeyProblem:  # none yet, or rotated or revoked since
                    text = new_text()
                    account.write_private(file, text + "\n")
                    store.create(DEFAULT_TENANT, [Scope.ADMIN], text=text)
        except (ApiKeyError, KeyProblem, RedisError, OSError) as error:
            raise StackError(f"the API key of {self.dir} cannot be made: {error}") from error
        self.api_key = text
        home, own_redis = str(paths.home()), "" if os.environ.get(redis.URL_VARIABLE) else redis_url
        service = account.Service(
            self.record.url, text, account.boot(), time.time(), private, home, own_redis
        )
        try:
            account.announce(self._account_name, service)
        except OSError as error:
            raise StackError(
                f"{account.directory()} cannot be written: {error}; XDG_STATE_HOME names another place"
            ) from error

    @property
    def _account_name(self) -> str:
        return hashlib.sha256(str(self.dir).encode()).hexdigest()[:16]

    def _start_backend(self, options: Options, env: dict[str, str]) -> Part | None:
        self.record.backend_url = options.backend_url
        if options.backend_url or not options.embedded_backend:
            return None
        if not paths.DEMO_CHECKPOINT.is_dir():
            raise StackError(
                f"the demo model is missing at {paths.DEMO_CHECKPOINT}; use --backend or --no-backend"
            )
        port = self._port("backend", BACKEND_PORT, options)
        self.record.backend_url = f"http://127.0.0.1:{port}"
        return self._spawn(parts.embedded_backend(port), env)

    def _check_sandbox(self, check: parts.SandboxCheck, begun: float, *, required: bool) -> None:
        """Say which runtime the sandboxes get and what it lacks; without any, say that loudly."""
        with self._telling("the sandbox still starts: the first one unpacks its image"):
            works, verdict = check.verdict(START_TIMEOUT_S)
        if works:
            self._done("sandbox", begun, verdict)
            return
        problem = f"NO SANDBOX WORKS ON THIS MACHINE: {verdict}"
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

    def _fleets_missing(self) -> str | None:
        with Client(self.record.url, timeout=5.0, api_key=self.api_key) as client:
            answer = client.ready()
        return None if answer["ready"] else str(answer.get("missing") or answer)

    def _spawn(self, part: Part, env: dict[str, str]) -> Part:
        part.log = str(self._logs / f"{part.name.removesuffix(' fleet')}.log")
        Path(part.log).write_bytes(b"")
        self._supervisor.start(part, env)
        self.record.parts.append(part)
        self.record.save(self._file)
        return part

    def _await(self, part: Part, missing: Callable[[], str | None], begun: float, text: str) -> None:
        with self._telling(f"{part.name} still starts; its log: {part.log}"):
            self._supervisor.wait_for(part, missing, START_TIMEOUT_S)
        self._done(part.name, begun, text)

    @contextmanager
    def _telling(self, text: str) -> Iterator[None]:
        """Say what one waits for, every few seconds within the block."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(TELL_S):
                self.say(text)

        threading.Thread(target=tell, daemon=True).start()
        try:
            yield
        finally:
            over.set()

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
            raise self._supervisor.failure(self.record.supervisor, "ended")

    # -- down --------------------------------------------------------------------------------

    def down(self) -> Ended | None:
        """End exactly what `up` started; None when nothing is recorded here."""
        if not self._file.exists():
            return None
        with self._locked(), _quiet_signals():
            record = Record.load(self._file)
            if record is not None and record.supervisor is not None:
                # First, or it would start anew what is ended; it may just have done so.
                stop([record.supervisor], END_S)
                record = Record.load(self._file)
            return self._end(record) if record else None

    def _end(self, record: Record) -> Ended:
        """Fleets first, for they hand back their rollouts through Redis; Redis last."""
        account.withdraw(self._account_name)
        by_name = {part.name: part for part in record.parts}
        with self._telling("the stack still ends; its fleets hand their rollouts back first"):
            if record.supervisor is not None:
                stop([record.supervisor], END_S)
            fleets = [part for part in record.parts if part.name.endswith("fleet")]
            ended = stop(fleets, record.grace_s + END_S)
            if record.sandbox_dir:
                self._hand_back(record, by_name["gateway"].env if "gateway" in by_name else {})
                _stop_sandbox_host(Path(record.sandbox_dir), self.say)
            # No program in a sandbox calls it any more; those elsewhere get the answers under way.
            capture = [name for name in by_name if name.startswith(parts.CAPTURE)]
            ended += stop([by_name[name] for name in capture], record.grace_s + END_S)
            for names in (("flower", "backend", "gateway"), ("redis",)):
                ended += stop([by_name[name] for name in names if name in by_name], END_S)
            strays = end_marked(record.mark, 3.0)
            if record.sandbox_dir:
                shutil.rmtree(record.sandbox_dir, ignore_errors=True)
        if record.live:
            raise StackError(
                f"could not be ended: {', '.join(f'{part.name} (pid {part.pid})' for part in record.live)}"
            )
        self._file.unlink(missing_ok=True)
        return Ended([f"{part.name} (pid {part.pid})" for part in ended], strays)

    def _hand_back(self, record: Record, env: dict[str, str]) -> None:
        """Rollouts that wait with a sandbox of this stack begin anew: it ends, or has ended, by no fault of
        theirs."""
        if not (record.sandbox_dir and record.node and env.get("ROLLOUT_REDIS_URL")):
            return
        # Celery, which a `down` that has nothing to end need not load.
        from services.handback import hand_back

        try:
            count = hand_back(Settings.from_env(env), record.node, state_dir=record.sandbox_dir)
        except Exception as error:  # as where Redis was killed: the next `up` does it
            self.say(f"rollouts that wait with a sandbox were not handed back: {error!r:.300}")
            return
        if count:
            self.say(f"handed back {count} rollouts that waited with a sandbox; no attempt is used up")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory for `up` or `down`; StackError where another one holds it."""
        with os.fdopen(os.open(self.dir / "lock", os.O_CREAT | os.O_RDWR, 0o600)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StackError(
                    f"another `rollout up` or `rollout down` is at work on {self.dir}; wait for it"
                ) from None
            yield


def _stop_sandbox_host(directory: Path, say: Say) -> None:
    """Ask the stack's own sandbox host to end its containers and itself, if it ever ran."""
    if not directory.exists():
        return
    try:
        from sandbox.host_client import HostClient

        asyncio.run(HostClient(directory).stop())
    except Exception as error:  # the strays are ended by their mark all the same
        say(f"sandbox host in {directory} did not stop in order: {error}")


@contextmanager
def _quiet_signals() -> Iterator[None]:
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
