"""Building the image of a Dockerfile: layers, of the node's image cache or made now, and a file of them."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from sandbox import memory, paths, processes, room, trees
from sandbox.config import HostConfig
from sandbox.errors import ImageError
from sandbox.images import build as building
from sandbox.images import locks
from sandbox.images.dockerfile import context
from sandbox.images.dockerfile.lines import Instruction
from sandbox.images.dockerfile.plan import Stage, Step
from sandbox.images.dockerfile.source import Source, hash_of, load
from sandbox.images.environment import ImageConfig, add_trailer, image_config
from sandbox.images.store import KEY_CHARS, ImageStore
from sandbox.images.tool import REPOSITORY
from sandbox.spec import Limits

POLL_S = 0.1
SLOWEST_S = 2.0  # between two looks at what a step takes, where looking is slow itself
DRAIN_S = 10.0
RESERVED_BYTES = 256 << 20
"""What a RUN is taken to need, until it has run."""
LINES_SHOWN, LINE_CHARS = 20, 2000
MOST_LAYERS = 100
APT = 'APT::Sandbox::User "root";\n'
"""There is no other user that could fetch what is installed."""
ARCHIVES = (".tar", ".sif", ".def")
MAX_NAME = 120


def build(
    place: Path,
    name: str | None = None,
    *,
    network: bool = False,
    output: Callable[[str], None] | None = None,
    timeout: float = building.DEFAULT_TIMEOUT_S,
    arguments: Mapping[str, str] | None = None,
    force: bool = False,
    beside: Path | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Make the image NAME of a Dockerfile, or of the one in a directory, and return its file.

    `name`: None = `image_name`'s. `network`: whether RUN has the machine's network, and FROM a registry.
    `output`: called with each line. `timeout`: seconds. `force`: build all layers anew, and replace another
    image of that name; one that was built of the same is left as it is. `beside`: a directory whose
    NAME.tar, NAME.sif or NAME.def an image NAME is made of that FROM names and that is missing. `cancelled`:
    asked all the time. Blocking. Raises ImageError; then there is nothing new under the name.
    """
    if os.geteuid() == 0 and paths.sandbox_user() is None:
        raise ImageError("ROLLOUT_SANDBOX_UID=0: images are not built as root; name another user")
    source = load(place, arguments)
    named = building.check_name(name) if name else source.name()
    target = paths.image_dir() / f"{named}.sif"
    target.parent.mkdir(parents=True, exist_ok=True)
    watch = Watch(timeout, cancelled, output or (lambda _: None))
    with watch.turn(target.with_name(f".{named}.lock")), contextlib.ExitStack() as leases:
        builder = Builder(source, network, watch, beside, leases, force)
        last = len(builder.plan.stages) - 1
        config = builder.config(last)
        if target.exists() and not force:
            if image_config(target).digest == config.digest:
                watch.output(f"{named} is built of the same already")
                return target
            if name is not None:
                raise ImageError(f"{target} exists; replace it with --force or choose another name")
        for notice in builder.plan.notices:
            watch.output(notice)
        builder.pack(last, config, target)
        builder.store.cache.prune()
    return target


class Watch:
    """What bounds a build: time, the limits of a sandbox, somebody who has changed their mind."""

    def __init__(
        self,
        timeout: float,
        cancelled: Callable[[], bool],
        output: Callable[[str], None] = lambda _: None,
    ):
        self.timeout, self.cancelled, self.output = timeout, cancelled, output
        self.deadline = time.monotonic() + timeout
        config = HostConfig.from_environment()
        self.limits, self.floors = config.limits(Limits()), config.floors

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.1, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raises ImageError when the build has to end."""
        if self.cancelled():
            raise ImageError("the build was cancelled")
        if time.monotonic() > self.deadline:
            raise ImageError(f"the build took longer than {self.timeout:g} s; allow more with --timeout")

    @contextlib.contextmanager
    def turn(self, lock: Path) -> Iterator[None]:
        """Hold the lock, as soon as nobody else does; where file systems have none, users see to it."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(locks.LocksUnsupported):
                while stack.enter_context(locks.locked(lock, locks.EXCLUSIVE)) is None:
                    self.check()
                    time.sleep(POLL_S)
                stack.callback(lock.unlink, missing_ok=True)
            yield

    def wait_for(self, process: subprocess.Popen[bytes], layer: Path) -> int:
        """The status of a step's process. Raises ImageError where it goes over a limit."""
        pause, survey = POLL_S, memory.Survey()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(pause)
            self.check()
            begun = time.monotonic()
            self.check_usage(processes.usages(process.pid), survey, layer)
            pause = min(SLOWEST_S, max(POLL_S, 4 * (time.monotonic() - begun)))

    def check_usage(self, usages: list[processes.Usage], survey: memory.Survey, layer: Path) -> None:
        """Raises ImageError naming what is short, or the limit that is passed."""
        for reason in room.shortages(layer, self.floors).values():
            raise ImageError(f"{reason}; free some, or build elsewhere")
        limits = self.limits
        assert limits.disk_mb and limits.files and limits.memory_mb and limits.processes
        used, files = trees.usage(layer, limits.disk_mb << 20, limits.files)
        holding = survey.held(usages, None, limits.memory_mb << 20)
        held, unlinked = (holding.total, holding.unlinked) if holding else (0, 0)
        for what, amount, most in (
            ("disk_mb", used + unlinked >> 20, limits.disk_mb),
            ("files", files, limits.files),
            ("memory_mb", held >> 20, limits.memory_mb),
            ("processes", sum(usage.threads for usage in usages), limits.processes),
        ):
            if amount > most:
                variable = f"ROLLOUT_SANDBOX_{what.upper()}"
                raise ImageError(
                    f"it went over the limit of {most} {what}; raise {variable} if it needs more"
                )


class Builder:
    """The layers of one Dockerfile's stages."""

    def __init__(
        self,
        source: Source,
        network: bool,
        watch: Watch,
        beside: Path | None,
        leases: contextlib.ExitStack,
        anew: bool,
    ):
        self.source, self.network, self.watch, self.beside = source, network, watch, beside
        self.store = ImageStore()
        self.store.cache.make()
        self.leases = leases
        self.salt = uuid.uuid4().hex if anew else ""
        self.user = paths.sandbox_user()
        self.images: dict[str, Path] = {}
        named = source.plan().stages
        for number in _needed(named):
            for instruction, reference in _references(named[number]):
                self.images.setdefault(reference, self.find(instruction, reference))
        self.plan = source.plan({name: image_config(path) for name, path in self.images.items()})
        self.done: dict[int, tuple[str, list[str]]] = {}

    # -- what it is built of -------------------------------------------------------------

    def find(self, instruction: Instruction, reference: str) -> Path:
        """The image of that reference, made here if it can be. Raises ImageError saying what to do."""
        name = local_name(reference)
        with contextlib.suppress(ImageError):
            return self.store.find(name)
        places = [self.beside / f"{name}{ending}" for ending in ARCHIVES] if self.beside else []
        sources = [str(place) for place in places if place.exists()]
        if not sources and self.network:
            sources = [f"docker://{reference}"]
        if not sources:
            instruction.refuse(
                f"there is no image {name!r} here for {reference!r}; run `rollout images build {name} "
                f"docker://{reference}`, or `docker save {reference} -o {name}.tar` where Docker is, and put "
                "that beside the Dockerfile"
            )
        self.watch.output(f"{instruction.place}: making image {name} of {sources[0]}")
        return building.build(name, sources[0], timeout=self.watch.left, output=self.watch.output)

    def identity(self, reference: str) -> str:
        """Of an image's content."""
        path = self.images[reference]
        if path.is_file():
            return self.store.content_hash(path)
        info = path.stat()
        return f"{path}:{info.st_ino}:{info.st_ctime_ns}"

    def digest(self, number: int) -> str:
        """Of all that a stage is made of, whatever of it has been built."""
        stage = self.plan.stages[number]
        total = self.origin_digest(stage.base)
        for step in stage.steps:
            network = self.network and step.request.get("network", False)
            total = hash_of(total, self.source.digest(step), self.origin_digest(step.origin), network)
        return total

    def origin_digest(self, origin: int | str | None) -> str:
        """Of a stage, an image, or nothing."""
        if isinstance(origin, int):
            return self.digest(origin)
        return "" if origin is None else self.identity(origin)

    def config(self, number: int) -> ImageConfig:
        """What the image of a stage says of itself."""
        declared = asdict(self.plan.stages[number].config) | {"digest": ""}
        digest = hash_of(self.digest(number), declared)
        return ImageConfig(**declared | {"digest": digest})

    # -- layers ----------------------------------------------------------------------------

    def origin(self, origin: int | str | None) -> tuple[str, list[str]]:
        """Identity, and the directories from top to bottom, of a stage, an image or nothing."""
        if origin is None:
            return "", []
        if isinstance(origin, str):
            rootfs = self.store.rootfs(local_name(origin), self.user)
            owner, builder = rootfs.stat().st_uid, os.geteuid() if self.user is None else self.user
            if owner != builder:
                raise ImageError(
                    f"image {rootfs} is a directory of uid {owner}, and builds run as uid {builder}, who "
                    f"cannot change it; pack it under another name: rollout images build NAME {rootfs}"
                )
            self.leases.enter_context(self.store.hold(rootfs))
            return self.identity(origin), [str(rootfs)]
        if origin not in self.done:
            stage = self.plan.stages[origin]
            state = self.origin(stage.base)
            for number, step in enumerate(stage.steps, 1):
                state = self.layer(step, state, f"[{number}/{len(stage.steps)}]")
            self.done[origin] = state
        return self.done[origin]

    def layer(self, step: Step, below: tuple[str, list[str]], count: str) -> tuple[str, list[str]]:
        """With the step's layer on top, which is made unless it is there."""
        key, lowers = below
        instruction = step.instruction
        if len(lowers) >= MOST_LAYERS:
            instruction.refuse(f"more than {MOST_LAYERS} layers; do more in one RUN")
        request = dict(step.request)
        feed = None
        if request["operation"] == "run":
            request |= {"network": self.network and request["network"], "user_name": request.pop("user")}
            request["env"] = {**step.free, **request["env"]}
        source_key, source_lowers = self.origin(step.origin)
        key = hash_of(key, self.source.digest(step), source_key, request.get("network", False), self.salt)
        if step.origin is not None:
            feed = self.taking(step, source_lowers)
        elif "target" in request:
            feed = self.sending(step)
        name = key[:KEY_CHARS] + ("" if self.user is None else f"-{self.user}")
        tree, told = self.store.cache.tree(name), f"{count} {instruction.place}: {instruction.keyword}"
        self.watch.output(f"{told} {instruction.rest[:80]}{' (cached)' if tree.is_dir() else ''}")

        def make(layer: Path, _: int) -> int:
            self.prepare(layer, request)
            status, said = self.inside(request, layer, lowers, feed)
            if status != 0:
                instruction.refuse(f"it ended with status {status}; it said: {said or '(nothing)'}")
            for part in ("work", "merged", "empty", "shm", "pipes"):
                trees.remove(layer / part)
            (layer / "id").write_text(uuid.uuid4().hex)
            return trees.usage(layer, sys.maxsize, sys.maxsize)[0]

        while True:
            with self.watch.turn(self.store.cache.directory / f"{name}.turn"):
                try:
                    self.store.cache.fill(name, Path(instruction.place), RESERVED_BYTES, make)
                except ImageError as error:
                    place = "" if str(error).startswith(instruction.place) else f"{instruction.place}: "
                    raise ImageError(f"{place}{error}") from error
            lease = self.store.cache.hold(name)
            if lease is not None:
                self.leases.enter_context(lease)
                # Made anew it is another one: what was built on the first may not go with the second.
                return hash_of(name, (tree / "id").read_text()), [f"{name}/upper", *lowers]

    def prepare(self, layer: Path, request: Mapping[str, Any]) -> None:
        """Make the directories of a layer, or of what only looks at some."""
        layer.chmod(0o711)
        for part in ("upper", "work", "merged", "empty", "shm", "pipes"):
            (layer / part).mkdir()
            (layer / part).chmod(0o1777 if part == "shm" else 0o755)
            if self.user is not None and part != "pipes":
                os.chown(layer / part, self.user, self.user)
        for name, text in {"apt.conf": APT, **request.get("files", {})}.items():
            if "/" not in name:
                (layer / "pipes" / name).write_text(text)
                (layer / "pipes" / name).chmod(0o755)

    # -- steps -----------------------------------------------------------------------------

    def sending(self, step: Step) -> Callable[[IO[bytes]], None]:
        """What COPY takes of the context."""
        found = self.source.found(step)
        return lambda stream: context.send(found, stream, exact=False)

    def taking(self, step: Step, lowers: list[str]) -> Callable[[IO[bytes]], None]:
        """What COPY takes of another image."""

        def feed(stream: IO[bytes]) -> None:
            with self.scratch() as layer:
                request = {"operation": "get", "sources": step.sources}
                status, said = self.inside(request, layer, lowers, None, stream)
            if status != 0:
                raise ValueError(said)

        return feed

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A place for what makes no layer."""
        with building._work_directory() as work:
            work.chmod(0o711)
            (work / "layer").mkdir()
            self.prepare(work / "layer", {})
            yield work / "layer"

    def inside(
        self,
        request: Mapping[str, Any],
        layer: Path,
        lowers: list[str],
        feed: Callable[[IO[bytes]], None] | None,
        take: IO[bytes] | None = None,
    ) -> tuple[int, str]:
        """Have a step done; its status, and the last lines that it said. `feed`: writes its input; `take`:
        where its output goes. Raises ImageError where it goes over a limit.
        """
        limits = {name: getattr(self.watch.limits, name) for name in ("processes", "disk_mb", "memory_mb")}
        whole = {
            **request,
            "user": self.user,
            "limits": limits,
            "cache": str(self.store.cache.directory),
            "layer": str(layer),
            "lowers": lowers,
            "writable": request["operation"] in ("run", "put"),
            "bwrap": _program("bwrap"),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "sandbox.images.dockerfile.inside"],
            env={"PATH": paths.tool_path(), "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=take or subprocess.PIPE,
            stderr=subprocess.PIPE if take else subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )
        said: collections.deque[str] = collections.deque(maxlen=LINES_SHOWN)
        wrong: list[Exception] = []
        source = process.stderr if take else process.stdout
        assert source is not None and process.stdin is not None
        threads = [
            threading.Thread(target=self._feed, args=(process.stdin, whole, feed, wrong), daemon=True),
            threading.Thread(target=self._listen, args=(source, said), daemon=True),
        ]
        try:
            for thread in threads:
                thread.start()
            status = self.watch.wait_for(process, layer)
            for thread in threads:
                thread.join(DRAIN_S)
        finally:
            _end(process)
        if wrong and not isinstance(wrong[0], BrokenPipeError):
            return 1, str(wrong[0])
        return status, "\n".join(said)

    @staticmethod
    def _feed(
        stream: IO[bytes],
        request: Mapping[str, Any],
        feed: Callable[[IO[bytes]], None] | None,
        wrong: list[Exception],
    ) -> None:
        try:
            with stream:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()  # another process may write what follows
                if feed is not None:
                    feed(stream)
        except Exception as error:
            wrong.append(error)

    def _listen(self, stream: IO[bytes], said: collections.deque[str]) -> None:
        with stream:
            while line := stream.readline(LINE_CHARS):
                text = line.decode(errors="replace").rstrip()
                if text:
                    said.append(text)
                    self.watch.output(text)

    # -- the image -------------------------------------------------------------------------

    def pack(self, number: int, config: ImageConfig, target: Path) -> None:
        """Make the image's file of a stage."""
        own = {"rollout.json": config.as_json().decode()}
        step = Step(
            Instruction("the image", "CONFIG", (), ""),
            {"operation": "put", "target": "/.singularity.d", "into": True, "mode": None, "files": own},
        )
        _, lowers = self.layer(step, self.origin(number), "[image]")
        with self.scratch() as layer:
            made = layer / "shm" / "image"
            argv = [_program("mksquashfs"), "ROOT", str(made), *building.COMPRESSION.split()]
            argv += ["-all-root", "-no-xattrs", "-noappend", "-quiet", "-no-progress", "-mem", "512M"]
            status, said = self.inside({"operation": "pack", "argv": argv}, layer, lowers, None)
            if status != 0:
                raise ImageError(f"cannot make {target}: {said}")
            add_trailer(made, config)
            building._install(made, target)


def local_name(reference: str) -> str:
    """Under which an image of a registry lies here; as `rollout.image_names` has it."""
    short = reference.removeprefix("docker.io/").removesuffix(":latest")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", short)
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 13]}-{hashlib.sha256(short.encode()).hexdigest()[:12]}"


def _needed(stages: tuple[Stage, ...]) -> list[int]:
    """The last stage, and those that it is made of."""
    needed, pending = [], [len(stages) - 1]
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.append(number)
            origins = [stages[number].base, *(step.origin for step in stages[number].steps)]
            pending += [origin for origin in origins if isinstance(origin, int)]
    return needed


def _references(stage: Stage) -> list[tuple[Instruction, str]]:
    """The images that a stage takes something of."""
    origins = [(stage.start, stage.base), *((step.instruction, step.origin) for step in stage.steps)]
    return [(instruction, origin) for instruction, origin in origins if isinstance(origin, str)]


def _program(name: str) -> str:
    program = shutil.which(name, path=paths.tool_path())
    if program is None:
        raise ImageError(f"{name} is missing, which builds need; run deploy/setup/apptainer.sh")
    return program


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all below it have ended after this."""
    below = [(pid, processes.start_time(pid)) for pid in processes.descendants(process.pid)]
    processes.send([process.pid, *(pid for pid, _ in below)] if process.poll() is None else [])
    process.wait()
    deadline = time.monotonic() + DRAIN_S
    while any(processes.is_alive(*child) for child in below) and time.monotonic() < deadline:
        time.sleep(0.01)
