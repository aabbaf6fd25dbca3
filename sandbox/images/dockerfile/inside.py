"""One step of a build, in namespaces of its own: `python -m sandbox.images.dockerfile.inside`.

A line of JSON on standard input says what is to be done. The process becomes the sandboxes' user, is root of
a user namespace that knows nobody else, and mounts there the layers so far under the one that the step makes.
What RUN says is run by bubblewrap, behind the walls of a sandbox; the rest is done here, with the image as
the root, so that no link of it leads out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tarfile
from importlib.machinery import BuiltinImporter, FrozenImporter
from pathlib import Path
from typing import Any

from sandbox.images.dockerfile import context
from sandbox.images.dockerfile.plan import PIPES
from sandbox.server import seccomp, writable_root
from sandbox.server.writable_root import CLONE_NEWNS, CLONE_NEWUSER, MS_NODEV, MS_NOSUID, escaped, libc

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
MS_RDONLY = 0x1
OPEN_FILES = 4096
NICENESS = 10  # builds yield to the workers
CAPABILITIES = ("CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP", "CAP_SYS_CHROOT")
"""Over files of the namespace's one user: what root of an image expects when it installs something."""
# Name → its number on x86_64 and on aarch64. They answer 0 and do nothing, for there is no other user that a
# file or a process could be given to; installers insist (Charliecloud, "seccomp root emulation").
PRETENDED = {
    "capset": (126, 91),
    "chown": (92, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "lchown": (94, None),
    "setfsgid": (123, 152),
    "setfsuid": (122, 151),
    "setgid": (106, 144),
    "setgroups": (116, 159),
    "setregid": (114, 143),
    "setresgid": (119, 149),
    "setresuid": (117, 147),
    "setreuid": (113, 145),
    "setuid": (105, 146),
}


def main() -> None:
    """Do what standard input asks for; what went wrong is said on standard error."""
    request = json.loads(sys.stdin.buffer.readline())
    try:
        step_down(request["user"], request["limits"])
        root = mount(request)
        {"run": run, "put": put, "get": get, "pack": pack}[request["operation"]](request, root)
    except (OSError, ValueError, tarfile.TarError) as error:
        raise SystemExit(str(error)) from None


def step_down(user: int | None, limits: dict[str, int]) -> None:
    """Become the sandboxes' user, bounded, and root of a namespace that has nobody else."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    seccomp.prctl(PR_SET_DUMPABLE, 1)  # else /proc/self stays root's
    seccomp.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    seccomp.join_own_keyring()
    os.nice(NICENESS)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "no user namespace: it takes one to build an image")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    writable_root.forbid_user_namespaces(but=1)  # bubblewrap's
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] << 20),
        (resource.RLIMIT_DATA, limits["memory_mb"] << 20),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def mount(request: dict[str, Any]) -> Path:
    """The image so far, under the new layer's upper directory, if there is one; returns its root."""
    layer = Path(request["layer"])
    root = layer / "merged"
    os.chdir(request["cache"])  # names of layers are short from here: all options have to fit into a page
    lowers = ":".join(map(escaped, [*request["lowers"], str(layer / "empty")]))
    options, flags = f"lowerdir={lowers},userxattr", MS_NOSUID | MS_NODEV
    if request["writable"]:
        options += f",upperdir={escaped(str(layer / 'upper'))},workdir={escaped(str(layer / 'work'))}"
    else:
        flags |= MS_RDONLY
    if libc.mount(b"overlay", os.fsencode(root), b"overlay", flags, os.fsencode(options)) != 0:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"no overlay of {len(request['lowers'])} layers ({os.strerror(number)}): it takes Linux 5.11 or "
            "newer and an image cache (ROLLOUT_IMAGE_CACHE) on a disk of the node, itself no overlay",
        )
    return root


def enter(root: Path) -> None:
    """Make the image the root. Nothing is loaded from then on: neither Python's modules nor, for names of
    users, the C library's, which would be those of the image.
    """
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter]
    tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]
    os.chroot(root)
    os.chdir("/")
    os.umask(0o022)


def directory(path: str | Path) -> Path:
    """A directory of the image, made if it is missing, by its path without links: for bubblewrap, which comes
    from outside, one leads elsewhere.
    """
    place = Path(path).resolve()
    place.mkdir(parents=True, exist_ok=True)
    return place


# -- RUN -------------------------------------------------------------------------------


def run(request: dict[str, Any], root: Path) -> None:
    """Become what RUN says."""
    back = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    enter(root)
    directory(request["directory"])
    environment = {"HOME": _home(request["user_name"]), "HOSTNAME": "build", **request["env"]}
    environment["APT_CONFIG"] = f"{PIPES}/apt.conf"
    names = [_name_file(f"/etc/{name}") for name in ("resolv.conf", "hosts") if request["network"]]
    empty = [str(directory(target)) for target in request["empty"]]
    for name in ("/proc", "/dev"):
        if Path(name).is_symlink():  # bubblewrap would mount where it leads
            Path(name).unlink()
    os.fchdir(back)
    os.chroot(".")
    os.close(back)
    layer = Path(request["layer"])
    flags = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    flags += ["--hostname", "build", "--new-session", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    flags += [part for name in CAPABILITIES for part in ("--cap-add", name)]
    if not request["network"]:
        flags.append("--unshare-net")
    flags += ["--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"]
    flags += ["--bind", str(layer / "shm"), "/dev/shm", "--ro-bind", str(layer / "pipes"), PIPES]
    for number, target in enumerate(empty):
        (layer / "shm" / f".{number}").mkdir()
        flags += ["--bind", str(layer / "shm" / f".{number}"), target]
    for name in ("/proc/keys", "/proc/key-users"):
        flags += ["--ro-bind-try", "/dev/null", name]
    for source, name in names:
        flags += ["--ro-bind-try", source, name]
    flags += ["--remount-ro", "/dev", "--clearenv", "--chdir", request["directory"]]
    for name, value in environment.items():
        flags += ["--setenv", name, value]
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(_filter())
    os.set_inheritable(reading, True)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    command = [request["bwrap"], *flags, "--seccomp", str(reading), "--", *request["argv"]]
    os.execve(request["bwrap"], command, {"PATH": "/usr/bin:/bin"})


def _filter() -> bytes:
    """The sandboxes' own, but that root's calls succeed."""
    machine = os.uname().machine
    column = seccomp.MACHINES.index(machine)
    pretended = [numbers[column] for numbers in PRETENDED.values()]
    program = seccomp.program(machine, pretended=[number for number in pretended if number is not None])
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _home(user: str) -> str:
    """Of a user, by name or number, in the image's list of them."""
    wanted = user.partition(":")[0] or "0"
    with contextlib.suppress(OSError):
        for line in Path("/etc/passwd").read_text(errors="replace").splitlines():
            fields = line.split(":")
            if len(fields) > 5 and wanted in (fields[0], fields[2]) and fields[5].startswith("/"):
                return fields[5]
    return "/root" if wanted in ("0", "root") else "/"


def _name_file(path: str) -> tuple[str, str]:
    """The machine's file, and where the image has it, links followed; made if it is missing."""
    place = Path(path).resolve()
    directory(place.parent)
    place.touch()
    return path, str(place)


# -- COPY, ADD, WORKDIR ----------------------------------------------------------------


def put(request: dict[str, Any], root: Path) -> None:
    """Make a directory, or the files that come as `context.send` writes them."""
    bases = json.loads(sys.stdin.buffer.readline()) if "target" in request else []
    enter(root)
    if "directory" in request:
        directory(request["directory"])
        return
    into = request["into"] or len(bases) + len(request["files"]) > 1
    tops: dict[str, Path] = {}
    for number, (name, is_directory) in enumerate(bases):
        tops[str(number)] = _top(request["target"], name, into, is_directory)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            number, _, name = member.name.partition("/")
            _extract(archive, member, tops[number] / name, tops, request["mode"])
    for name, text in request["files"].items():
        place = _top(request["target"], name, into, False)
        _clear(place)
        place.write_text(text)
        place.chmod(request["mode"] or 0o644)


def _top(target: str, name: str, into: bool, is_directory: bool) -> Path:
    """Where a source goes: the contents of a directory, and a file under its own name, into a directory."""
    place = Path(target)
    if not is_directory and (into or place.is_dir()):
        place = place / name
    elif not is_directory:
        place = place.resolve()
    directory(place if is_directory else place.parent)
    return place


def _clear(place: Path) -> None:
    """Make room for a file or link; raises OSError where there is a directory."""
    if place.is_symlink() or place.exists():
        place.unlink()


def _extract(
    archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path, tops: dict[str, Path], mode: int | None
) -> None:
    mode = member.mode & 0o7777 if mode is None else mode
    if member.isdir():
        if not place.is_dir():
            _clear(place)
            place.mkdir(parents=True)
            place.chmod(mode)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    _clear(place)
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.islnk():
        number, _, name = member.linkname.partition("/")
        place.hardlink_to(tops[number] / name)
    else:
        source = archive.extractfile(member)
        assert source is not None
        with place.open("xb") as file:
            shutil.copyfileobj(source, file, context.CHUNK)
        place.chmod(mode)
        os.utime(place, (member.mtime, member.mtime))


# -- the other way -----------------------------------------------------------------------


def get(request: dict[str, Any], root: Path) -> None:
    """Write what COPY takes from an image."""
    enter(root)
    found = context.find(Path("/"), request["sources"])
    context.send(found, sys.stdout.buffer, exact=True)


def pack(request: dict[str, Any], root: Path) -> None:
    """Become the program that makes a file of the image; its root comes in the place of `ROOT`."""
    command = [str(root) if part == "ROOT" else part for part in request["argv"]]
    os.execve(command[0], command, {"PATH": "/usr/bin:/bin"})


if __name__ == "__main__":
    main()
