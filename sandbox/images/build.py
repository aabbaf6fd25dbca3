"""Building images, always without root rights: `$ROLLOUT_HOME/images/NAME.sif`, complete or not at all."""

from __future__ import annotations

import contextlib
import enum
import errno
import lzma
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import paths, trees
from sandbox.errors import ImageError, RuntimeUnavailable
from sandbox.images import locks, squashfs, tool
from sandbox.images.locks import EXCLUSIVE
from sandbox.images.store import NAME, hand_over

DEFAULT_TIMEOUT_S = 3600.0
COMPRESSION = "-comp zstd -Xcompression-level 3"  # measured: 4 s where gzip takes 62 s, 4 % larger
FAKEROOT_USAGE = "fakeroot, create a fake root environment."
WORK_PREFIX = "rollout-build-"
REGISTRIES = ("docker", "oras", "library")
SECTION = re.compile(r"\s*%(\w+)")
ARGUMENT = re.compile(r"{{\s*(\w+)\s*}}")
HEADER = re.compile(r"\s*(bootstrap|from)\s*:\s*(.*?)\s*$", re.IGNORECASE)


def build(
    name: str,
    source: str,
    *,
    force: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    arguments: dict[str, str] | None = None,
    output: Callable[[str], None] | None = None,
) -> Path:
    """Make the image NAME and return its file.

    `source`: a definition file, directory, docker or OCI archive, SIF or squashfs file, or a reference
    `docker://`, `oras://`, `library://`. `force`: replace an image of that name. `timeout`: seconds.
    `arguments`: for `{{ NAME }}` in a definition file. `output`: called with each line of the build.
    Raises ImageError saying what failed and what to do; then there is nothing new in the file system.
    """
    images = paths.image_dir()
    target = images / f"{check_name(name)}.sif"
    recognised = recognise(source)
    if arguments and recognised.kind is not Kind.DEFINITION:
        raise ImageError(f"build arguments are for definition files (*.def), not for {source!r}")
    if (images / name).is_dir():
        raise ImageError(f"{images / name} is an image of that name; remove it or choose another name")
    images.mkdir(parents=True, exist_ok=True)
    with _name_locked(images, name), _work_directory() as work:
        if target.exists() and not force:
            raise ImageError(f"{target} exists; replace it with --force or choose another name")
        for part in ("out", "tmp", "home"):
            (work / part).mkdir()
        made = work / "out" / "image.sif"
        try:
            if recognised.kind is Kind.FILE:
                shutil.copyfile(recognised.reference, made)
            else:
                _run(recognised, made, work, timeout, arguments or {}, output)
        except (ImageError, RuntimeUnavailable) as error:
            raise type(error)(f"cannot build image {name!r} from {source}: {error}") from error
        except OSError as error:
            raise ImageError(f"cannot build image {name!r} from {source}: {error}") from error
        _install(made, target)
    return target


def check_name(name: str) -> str:
    """`name`, if an image can have it; else ImageError."""
    if not NAME.fullmatch(name):
        raise ImageError(
            f"image name {name!r} must begin with a letter or digit and hold only letters, digits, "
            "'.', '_' and '-', at most 128"
        )
    if name.endswith(".sif"):
        raise ImageError(f"give the image name {name!r} without .sif, which is added")
    return name


def remove_leftovers(dry_run: bool = False) -> list[Path]:
    """Remove (or only list) what killed builds left; returns what that is."""
    images = paths.image_dir()
    leftovers = []
    for path in images.glob(".*.building"):
        name = path.name[1 : -len(".building")]
        if _is_free(images / f".{name}.lock"):
            leftovers.append(path)
    for work in Path(tempfile.gettempdir()).glob(f"{WORK_PREFIX}*"):
        # Somebody else's is none of our business, and one without lock file is just being made or removed.
        ours = work.lstat().st_uid == os.geteuid()
        if ours and (work / "lock").is_file() and _is_free(work / "lock"):
            leftovers.append(work)
    locked = [path for path in images.glob(".*.lock") if not dry_run]
    for path in leftovers if not dry_run else []:
        trees.remove(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in locked:
        with contextlib.suppress(locks.LocksUnsupported), locks.locked(path, EXCLUSIVE) as fd:
            if fd is not None:
                path.unlink(missing_ok=True)
    return leftovers


def _is_free(lock: Path) -> bool:
    try:
        with locks.locked(lock, EXCLUSIVE) as fd:
            return fd is not None
    except locks.LocksUnsupported:
        return False  # not to be known


@contextlib.contextmanager
def _name_locked(images: Path, name: str) -> Iterator[None]:
    """One build of a name at a time; on file systems without locks that is up to the user."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(locks.LocksUnsupported):
            lock = images / f".{name}.lock"
            if stack.enter_context(locks.locked(lock, EXCLUSIVE)) is None:
                raise ImageError(f"image {name!r} is being built by another process; wait for it")
            stack.callback(lock.unlink, missing_ok=True)
        yield


@contextlib.contextmanager
def _work_directory() -> Iterator[Path]:
    """A temporary directory that goes whatever happens; by its lock a killed build's can be told."""
    work = Path(tempfile.mkdtemp(prefix=WORK_PREFIX))
    try:
        with locks.locked(work / "lock"):
            yield work
    finally:
        try:
            trees.remove(work)
        except KeyboardInterrupt:
            trees.remove(work)
            raise


def _run(
    source: Source,
    made: Path,
    work: Path,
    timeout: float,
    arguments: dict[str, str],
    output: Callable[[str], None] | None,
) -> None:
    """Have Apptainer make it. Raises ImageError with a hint of what to do."""
    operation, user, reference = "build", None, source.reference
    request: dict[str, Any] = {"image": str(made)}
    if reference.startswith(("oras://", "library://")):
        operation = "pull"
    else:
        arguments = dict(arguments)
        if source.kind is Kind.DEFINITION:
            user = _builder(Path(reference))
            reference = str(_prepared_definition(Path(reference), arguments, work, user))
        elif source.kind is Kind.DIRECTORY:
            reference = str(_own_copy(Path(reference), work / "from", None))
        if user is not None:
            _hand_over(work, user)
        named = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        request["options"] = ["--userns", "--force", "--mksquashfs-args", COMPRESSION, *named]
    request["source"] = reference
    try:
        try:
            tool.run(operation, request, work, timeout, user, output)
        except ImageError as error:
            if operation == "pull" or FAKEROOT_USAGE not in str(error):
                raise
            # The host's fakeroot runs in the image, here one too small to have the tools it calls.
            request["options"].append("--ignore-fakeroot-command")
            tool.run(operation, request, work, timeout, user, output)
    except ImageError as error:
        raise ImageError("; ".join(filter(None, [str(error), _hint(source, str(error))]))) from error


def _builder(definition: Path) -> int | None:
    """The uid that builds it when we are root: in a root's user namespace %post wants capabilities that are
    missing where the bounding set is cut, and knows no other users; a plain user gets both from fakeroot.
    """
    if not has_post(definition):
        return None
    for place in ("user/max_user_namespaces", "kernel/unprivileged_userns_clone"):
        switch = Path("/proc/sys", place)
        if switch.exists() and switch.read_text().strip() == "0":
            raise ImageError(
                f"{definition} has a %post section, which needs user namespaces, but {switch} is 0; ask an "
                "administrator to raise it, or build the image on another machine and copy it"
            )
    return paths.sandbox_user()


def _prepared_definition(definition: Path, arguments: dict[str, str], work: Path, user: int | None) -> Path:
    """The definition with starting points that the builder may read and own. Takes away `arguments` that only
    named these, for Apptainer refuses one that is not used.
    """
    lines = definition.read_text(errors="surrogateescape").splitlines()
    used = arguments_in(lines)
    for number, start in local_images(definition, arguments).items():
        copy = work / f"from-{number}"
        own = _own_copy(start, copy, user) if start.is_dir() else _own_unpacked(start, copy)
        lines[number] = f"From: {own}"
    for name in used - arguments_in(lines):
        arguments.pop(name, None)
    prepared = work / definition.name
    prepared.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    return prepared


def _own_copy(directory: Path, copy: Path, user: int | None) -> Path:
    """The directory itself if all in it belongs to the builder, else a copy: Apptainer keeps owners, and
    cannot give files to users that the namespace does not have.
    """
    if user is None and os.geteuid() == 0:
        return directory
    builder = os.geteuid() if user is None else user
    with_owners = (os.lstat(Path(parent, name)) for parent, d, f in os.walk(directory) for name in d + f)
    if all(info.st_uid == builder for info in with_owners):
        return directory
    try:
        shutil.copytree(directory, copy, symlinks=True, ignore=_without_devices)
    except shutil.Error as error:
        first = error.args[0][0]
        raise ImageError(
            f"cannot copy {first[0]}: {first[2]}; make it readable or run as its owner"
        ) from error
    return copy


def _own_unpacked(image: Path, target: Path) -> Path:
    """The image file as a directory. Apptainer could start from the file, but not one with a C library of its
    own, as the set-up installs it on older machines: it calls itself in a container for that.
    """
    squashfs.unpack(image, target)
    if os.geteuid() == 0:
        hand_over(target, None)
    return target


def _without_devices(parent: str, names: list[str]) -> list[str]:
    """What copytree shall leave out: devices, pipes and sockets, which containers get from elsewhere."""
    kinds = {name: Path(parent, name) for name in names}
    return [n for n, p in kinds.items() if not (p.is_symlink() or p.is_dir() or p.is_file())]


def _hand_over(work: Path, user: int) -> None:
    """What lies in the work directory, to the user that root steps down to; our own lock and wrapper stay."""
    work.chmod(0o711)
    for part in work.iterdir():
        if part.name in ("lock", "bin"):
            continue
        os.chown(part, user, user)
        for parent, directories, files in os.walk(part):
            for name in directories + files:
                os.chown(Path(parent, name), user, user, follow_symlinks=False)


def _hint(source: Source, message: str) -> str:
    """What to do about it, where that can be told."""
    if source.kind is Kind.REGISTRY:
        return (
            "is the registry reachable from here, is the reference right, do you need `apptainer registry "
            "login`? Without a registry: `docker save IMAGE -o IMAGE.tar` elsewhere, and build from that file"
        )
    if source.kind is not Kind.DEFINITION or not has_post(Path(source.reference)):
        return ""
    hints = []
    if (user := paths.sandbox_user()) is not None and "permission denied" in message.lower():
        hints.append(f"root builds as uid {user}, which must be able to read all that the file names")
    if not tool.has_subordinate_ids() and shutil.which("fakeroot", path=paths.tool_path()) is None:
        hints.append(
            "%post ran without fakeroot, so it could not install packages: install the program fakeroot, or "
            "ask an administrator for lines for you in /etc/subuid and /etc/subgid"
        )
    return "; ".join(hints)


def _install(made: Path, target: Path) -> None:
    """Move the image to its name in one step."""
    hidden = target.with_name(f".{target.stem}.building")
    try:
        try:
            made.rename(hidden)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(made, hidden)
        if os.geteuid() == 0:
            os.chown(hidden, 0, 0)
        hidden.chmod(0o755)
        hidden.rename(target)
    except OSError as error:
        raise ImageError(f"cannot write {target}: {error}") from error
    finally:
        hidden.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------- sources


class Kind(enum.Enum):
    """How a source is made into an image."""

    DEFINITION = "definition file"
    DIRECTORY = "directory"
    ARCHIVE = "container archive"
    FILE = "image file"
    REGISTRY = "registry"


@dataclass(frozen=True)
class Source:
    """A source that has been looked at."""

    kind: Kind
    reference: str
    """As Apptainer is told: an absolute path or a URI."""


def recognise(text: str) -> Source:
    """Raises ImageError when it is nothing that an image can be made from."""
    scheme, separator, _ = text.partition("://")
    if separator:
        if scheme not in REGISTRIES:
            known = ", ".join(f"{name}://" for name in REGISTRIES)
            raise ImageError(f"source {text!r}: {scheme}:// is not known; give {known} or a path")
        return Source(Kind.REGISTRY, text)
    path = Path(text).absolute()
    if not path.exists():
        raise ImageError(
            f"source {text!r}: there is no such file; give a path, or a reference like docker://NAME"
        )
    if path.is_dir():
        if not any((path / name).is_dir() for name in ("usr", "bin")):
            raise ImageError(f"source {text!r} is a directory without usr and bin: no root file system")
        return Source(Kind.DIRECTORY, str(path))
    if path.suffix == ".def":
        return Source(Kind.DEFINITION, str(path))
    if tarfile.is_tarfile(path):
        return Source(Kind.ARCHIVE, f"{_archive_kind(path)}:{path}")
    try:
        squashfs.squashfs_offset(path)
    except ImageError as error:
        raise ImageError(
            f"source {text!r} is no definition file (*.def), directory, docker archive, SIF or squashfs "
            f"file: {error}"
        ) from error
    return Source(Kind.FILE, str(path))


def _archive_kind(path: Path) -> str:
    """Apptainer's name for what `docker save` or an OCI tool has written."""
    try:
        with tarfile.open(path) as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ImageError(f"{path} is cut off or damaged ({error}); save or copy it again") from error
    if "manifest.json" in names:
        return "docker-archive"
    if "oci-layout" in names:
        return "oci-archive"
    raise ImageError(
        f"{path} holds neither manifest.json (docker save) nor oci-layout; if it is a plain root file "
        "system, unpack it and give the directory"
    )


def has_post(definition: Path) -> bool:
    """Whether a definition file runs something while the image is built."""
    return any(
        (match := SECTION.match(line)) and match[1].lower() == "post"
        for line in definition.read_text(errors="replace").splitlines()
    )


def arguments_in(lines: list[str]) -> set[str]:
    """The build arguments that a definition file uses."""
    return {name for line in lines for name in ARGUMENT.findall(line)}


def local_images(definition: Path, arguments: dict[str, str]) -> dict[int, Path]:
    """The directories and image files that a definition file starts from, by the number (from 0) of the
    line that names them.

    `arguments`: of the build, for `{{ NAME }}`.
    """
    starts: dict[int, Path] = {}
    bootstrap = ""
    for number, line in enumerate(definition.read_text(errors="replace").splitlines()):
        match = HEADER.match(line)
        if match and match[1].lower() == "bootstrap":
            bootstrap = match[2].lower()
        elif match and bootstrap == "localimage":
            value = ARGUMENT.sub(lambda name: arguments.get(name[1], name[0]), match[2])
            if Path(value).exists():
                starts[number] = Path(value).absolute()
    return starts
