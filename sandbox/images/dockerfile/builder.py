"""Building the image of a Dockerfile: layers, of the node's image cache or made now, and a file of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO

from sandbox import paths, trees
from sandbox.errors import ImageError
from sandbox.images import build as building
from sandbox.images.dockerfile import context
from sandbox.images.dockerfile.lines import Instruction
from sandbox.images.dockerfile.plan import Stage, Step
from sandbox.images.dockerfile.source import Source, hash_of, load
from sandbox.images.dockerfile.steps import PARTS, Feed, Steps, Watch, program
from sandbox.images.environment import ImageConfig, add_trailer, image_config
from sandbox.images.store import KEY_CHARS, ImageStore

RESERVED_BYTES = 256 << 20
"""What a RUN is taken to need, until it has run."""
MOST_LAYERS = 100
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
        self.steps = Steps(watch, self.store.cache.directory, self.user)
        self.images: dict[str, Path] = {}
        self.names: dict[str, str] = {}
        named = source.plan().stages
        for number in _needed(named):
            for instruction, reference in _references(named[number]):
                self.images.setdefault(reference, self.find(instruction, reference))
        self.plan = source.plan({name: image_config(path) for name, path in self.images.items()})
        self.digests: dict[int, str] = {}
        self.done: dict[int, tuple[str, list[str]]] = {}

    # -- what it is built of -------------------------------------------------------------

    def find(self, instruction: Instruction, reference: str) -> Path:
        """The image of that reference, made here if it can be. Raises ImageError saying what to do."""
        name = local_name(reference)
        for known in (name, fetched_name(reference)):
            with contextlib.suppress(ImageError):
                self.names[reference] = known
                return self.store.find(known)
        places = [self.beside / f"{name}{ending}" for ending in ARCHIVES] if self.beside else []
        sources = [str(place) for place in places if place.exists()]
        if not sources and self.network:
            sources, name = [f"docker://{reference}"], fetched_name(reference)
        self.names[reference] = name
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
        if number in self.digests:
            return self.digests[number]
        stage = self.plan.stages[number]
        total = self.origin_digest(stage.base)
        for step in stage.steps:
            network = self.network and step.request.get("network", False)
            total = hash_of(total, self.source.digest(step), self.origin_digest(step.origin), network)
        self.digests[number] = total
        return total

    def origin_digest(self, origin: int | str | None) -> str:
        """Of a stage, an image, or nothing."""
        if isinstance(origin, int):
            return self.digest(origin)
        return "" if origin is None else self.identity(origin)

    def config(self, number: int) -> ImageConfig:
        """What the image of a stage says of itself."""
        declared = self.plan.stages[number].config
        return replace(declared, digest=hash_of(self.digest(number), asdict(declared)))

    # -- layers ----------------------------------------------------------------------------

    def origin(self, origin: int | str | None) -> tuple[str, list[str]]:
        """Identity, and the directories from top to bottom, of a stage, an image or nothing."""
        if origin is None:
            return "", []
        if isinstance(origin, str):
            rootfs = self.store.rootfs(self.names[origin], self.user)
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
            feed = partial(context.send, self.source.found(step), exact=False)
        name = key[:KEY_CHARS] + ("" if self.user is None else f"-{self.user}")
        tree, told = self.store.cache.tree(name), f"{count} {instruction.place}: {instruction.keyword}"
        self.watch.output(f"{told} {instruction.rest[:80]}{' (cached)' if tree.is_dir() else ''}")

        def make(layer: Path, _: int) -> int:
            self.steps.prepare(layer, request)
            status, said = self.steps.inside(request, layer, lowers, feed)
            if status != 0:
                instruction.refuse(f"it ended with status {status}; it said: {said or '(nothing)'}")
            for part in PARTS[1:]:
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
                self.steps.close(tree)
                # Made anew it is another one: what was built on the first may not go with the second.
                return hash_of(name, (tree / "id").read_text()), [f"{name}/upper", *lowers]

    def taking(self, step: Step, lowers: list[str]) -> Feed:
        """What COPY takes of another image."""

        def feed(stream: IO[bytes]) -> None:
            with self.steps.scratch() as layer:
                request = {"operation": "get", "sources": step.sources}
                status, said = self.steps.inside(request, layer, lowers, None, stream)
            if status != 0:
                raise ValueError(said)

        return feed

    # -- the image -------------------------------------------------------------------------

    def pack(self, number: int, config: ImageConfig, target: Path) -> None:
        """Make the image's file of a stage."""
        own = {"rollout.json": config.as_json().decode()}
        step = Step(
            Instruction("the image", "CONFIG", (), ""),
            {"operation": "put", "target": "/.singularity.d", "into": True, "mode": None, "files": own},
        )
        _, lowers = self.layer(step, self.origin(number), "[image]")
        with self.steps.scratch() as layer:
            made = layer / "shm" / "image"
            argv = [program("mksquashfs"), "ROOT", str(made), *building.COMPRESSION.split()]
            argv += ["-all-root", "-no-xattrs", "-noappend", "-quiet", "-no-progress", "-mem", "512M"]
            status, said = self.steps.inside({"operation": "pack", "argv": argv}, layer, lowers, None)
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


def fetched_name(reference: str) -> str:
    """Under which a build puts an image that it fetches: `a/b-c` and `a-b/c` have one local name, and whoever
    owns one of them must not have the other's tasks start from it.
    """
    short = local_name(reference)[: MAX_NAME - 13]
    return f"{short}-{hashlib.sha256(reference.encode()).hexdigest()[:12]}"


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
