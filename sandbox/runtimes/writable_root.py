"""Becomes another program, with a directory in front of it that shows an image and may be changed.

    python3 -c TEXT_OF_THIS_FILE LOWER OVERLAY POINT... -- PROGRAM ARGUMENT...
    python3 -c TEXT_OF_THIS_FILE --serve SOCKET

The second form stays and does the same for each request on the socket, in a new process: Python starts once.

Mounts, in a user and a mount namespace of its own, LOWER under an overlay onto OVERLAY/merged; changes go to
OVERLAY/upper. POINTs are made inside where they are missing, as places to mount on: a directory, or with a
leading `=` a file. Run as the sandboxes' user; the program has no capabilities from it.

Apptainer mounts such an overlay as well, but not with `userxattr`: without it the kernel cannot mark
directories in an unprivileged one, and `rm -r` and `mv` of those of the image end with EIO.
"""
# ruff: noqa: SIM105, PTH101, PTH102, PTH103, PTH108, PTH110, PTH112, PTH114, PTH116, PTH118, PTH120, PTH123

import ctypes
import json
import os
import signal
import socket
import sys

CLONE_NEWNS, CLONE_NEWUSER, CLONE_PARENT = 0x00020000, 0x10000000, 0x00008000
CLONE = {"x86_64": 56, "aarch64": 220}
"""The number of the system call, for which the C library has no function that returns twice."""
MOST_REQUEST_BYTES = 1 << 17
MS_NOSUID, MS_NODEV = 0x2, 0x4
OURS = ("/sbx", "/sbx-python", "/run/sbx", "/etc/ld.so.preload")
"""What the server is made of: nothing is mounted there, or above it, under another name."""

_libc = ctypes.CDLL(None, use_errno=True)


def _require(status: int, what: str) -> None:
    if status != 0:
        raise SystemExit(f"writable_root: {what}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _escaped(path: str) -> str:
    """As an option of a mount: its separators are part of the name."""
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


def mount(lower: str, overlay: str) -> str:
    """Mount the overlay; returns its root."""
    upper, work, root = (os.path.join(overlay, name) for name in ("upper", "work", "merged"))
    for path in (upper, work, root):
        os.makedirs(path, mode=0o755, exist_ok=True)
    _hide(upper, ".singularity.d")
    # Seen through the mount, the image's own root directory is that of the upper layer.
    os.chmod(upper, os.stat(lower).st_mode & 0o7777)
    user, group = os.geteuid(), os.getegid()
    _require(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "no user namespace")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    try:
        _write("/proc/sys/user/max_user_namespaces", "1")  # the container's; none is made inside of that
    except OSError:
        pass  # where /proc/sys is read-only the filter of calls is the only wall
    layers = ",".join(
        f"{name}={_escaped(path)}"
        for name, path in (("lowerdir", lower), ("upperdir", upper), ("workdir", work))
    )
    options = f"{layers},userxattr".encode()
    _require(
        _libc.mount(b"overlay", root.encode(), b"overlay", MS_NOSUID | MS_NODEV, options),
        "no overlay with userxattr",
    )
    return root


def _hide(upper: str, name: str) -> None:
    """Show an empty directory in its place. Apptainer would run the image's scripts for the environment from
    there, before the filter of system calls is loaded; the shell's variables are our own anyway.
    """
    path = os.path.join(upper, name)
    os.makedirs(path, mode=0o755, exist_ok=True)
    os.setxattr(path, "user.overlay.opaque", b"y")


def make_points(root: str, points: list[str]) -> None:
    """Make what is missing, while `root` is this process's: a link of the image must not lead elsewhere."""
    back = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chroot(root)
    os.chdir("/")
    try:
        for point in points:
            _make(point)
            _check(point.lstrip("="))
    except OSError as error:
        raise SystemExit(f"writable_root: a place to mount on cannot be made in the image: {error}") from None
    os.fchdir(back)
    os.chroot(".")
    os.close(back)


def _make(point: str) -> None:
    path = point.lstrip("=")
    # Right below the root a mount cannot be moved. One at the end of a link can: the link, or what holds it.
    if os.path.dirname(path) == "/" and os.path.islink(path):
        os.unlink(path)
    if os.path.exists(path):
        return
    parts = [part for part in path.split("/") if part]
    directories = parts[:-1] if point.startswith("=") else parts
    for depth in range(1, len(directories) + 1):
        directory = "/" + "/".join(directories[:depth])
        if os.path.islink(directory) and not os.path.exists(directory):
            os.unlink(directory)  # it leads nowhere, so nothing of the image is lost
        if not os.path.isdir(directory):
            os.mkdir(directory, 0o755)
    if point.startswith("="):
        _write(path, "")


def _check(path: str) -> None:
    leads_to = os.path.realpath(path)
    for place in OURS if leads_to != path else ():
        if os.path.commonpath([place, leads_to]) in (place, leads_to):
            raise SystemExit(f"writable_root: a link of the image leads from {path} to our {place}")


def serve(connection: socket.socket) -> None:
    """Start a program for each request, as a child of whoever started this process, and answer with its pid.

    A request is a JSON object with `mount` (what `main` takes before `--`), `argv`, `env`; with it come the
    program's standard input, output and error. Input has to be a socket: the program runs once something has
    come there, for who sends it knows the answer, and with it the process. Until then that is of the group
    that this process leads. Ends when the other end is closed.
    """
    number = CLONE[os.uname().machine]
    connection.set_inheritable(False)
    while True:
        text, fds, _, _ = socket.recv_fds(connection, MOST_REQUEST_BYTES, 3)
        if not text:
            return
        # Its parent is ours, who waits for it.
        pid = _libc.syscall(number, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            _become(json.loads(text), fds)
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())


def _become(request: dict, fds: list[int]) -> None:
    """Be the program of a request. Does not return."""
    try:
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        lower, overlay, *points = request["mount"]
        make_points(mount(lower, overlay), points)
        with socket.socket(fileno=os.dup(0)) as source:
            if not source.recv(1, socket.MSG_PEEK):
                return
        os.setsid()
        os.execve(request["argv"][0], request["argv"], request["env"])
    except SystemExit as error:
        os.write(2, f"{error}\n".encode())
    except OSError as error:
        os.write(2, f"writable_root: {error}\n".encode())
    finally:
        os._exit(1)


def main() -> None:
    """See the module's text."""
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
        return
    end = sys.argv.index("--")
    lower, overlay, *points = sys.argv[1:end]
    program = sys.argv[end + 1 :]
    make_points(mount(lower, overlay), points)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
