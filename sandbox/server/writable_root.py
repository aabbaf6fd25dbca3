"""Becomes another program, with a directory in front of it that shows an image and may be changed.

    python3 -c TEXT_OF_THIS_FILE LOWER OVERLAY POINT... -- PROGRAM ARGUMENT...

Mounts, in a user and a mount namespace of its own, LOWER under an overlay onto OVERLAY/merged; changes go to
OVERLAY/upper. POINTs are made inside where they are missing, as places to mount on: a directory, or with a
leading `=` a file. Run as the sandboxes' user; the program has no capabilities from it.

Apptainer mounts such an overlay as well, but not with `userxattr`: without it the kernel cannot mark
directories in an unprivileged one, and `rm -r` and `mv` of those of the image end with EIO.
"""

import ctypes
import os
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV = 0x2, 0x4
MOST_NAMES_BYTES = 1 << 20
OURS = ("/sbx", "/sbx-python", "/run/sbx", "/etc/ld.so.preload", "/proc")
"""What the server is made of, and goes by: nothing is mounted there, or above it, under another name."""

libc = ctypes.CDLL(None, use_errno=True)


def require(status: int, what: str) -> None:
    """Raise SystemExit when a call of the C library has failed."""
    if status != 0:
        raise SystemExit(f"writable_root: {what}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(file, text.encode())  # without what a text file costs, for each sandbox
    os.close(file)


def escaped(path: str) -> str:
    """As an option of a mount: its separators are part of the name."""
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


def keep_names(user: int, group: int) -> None:
    """Be who this process was before it came into its user namespace."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def forbid_user_namespaces(but: int) -> None:
    """Have the kernel make no more than so many below this process's."""
    try:
        _write("/proc/sys/user/max_user_namespaces", str(but))
    except OSError:
        pass  # where /proc/sys is read-only the filter of calls is the only wall


def mount(lower: str, overlay: str, *beneath: str) -> str:
    """Mount the overlay, and other directories beneath the image; returns its root."""
    upper, work, root = (os.path.join(overlay, name) for name in ("upper", "work", "merged"))
    for path in (upper, work, root):
        os.makedirs(path, mode=0o755, exist_ok=True)
    _hide(upper, ".singularity.d")
    # Seen through the mount, the image's own root directory is that of the upper layer.
    os.chmod(upper, os.stat(lower).st_mode & 0o7777)
    layers = ",".join(
        f"{name}={':'.join(map(escaped, paths))}"
        for name, paths in (("lowerdir", [lower, *beneath]), ("upperdir", [upper]), ("workdir", [work]))
    )
    options = f"{layers},userxattr".encode()
    status = libc.mount(b"overlay", root.encode(), b"overlay", MS_NOSUID | MS_NODEV, options)
    require(status, "no overlay with userxattr")
    return root


def _hide(upper: str, name: str) -> None:
    """Show an empty directory in its place. Apptainer would run the image's scripts for the environment from
    there, before the filter of system calls is loaded; the shell's variables are our own anyway.
    """
    path = os.path.join(upper, name)
    os.makedirs(path, mode=0o755, exist_ok=True)
    os.setxattr(path, "user.overlay.opaque", b"y")


def make_points(root: str, points: list[str]) -> dict[str, str]:
    """Make what is missing, while `root` is this process's: a link of the image must not lead elsewhere.

    Returns where the image's links lead from each.
    """
    back = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chroot(root)
    os.chdir("/")
    try:
        for point in points:
            _make(point)
            _check(point.lstrip("="))
        places = {path: _check(path) for path in (point.lstrip("=") for point in points)}
    except OSError as error:
        raise SystemExit(f"writable_root: a place to mount on cannot be made in the image: {error}") from None
    os.fchdir(back)
    os.chroot(".")
    os.close(back)
    return places


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


def _check(path: str) -> str:
    leads_to = os.path.realpath(path)
    for place in OURS if leads_to != path else ():
        if os.path.commonpath([place, leads_to]) in (place, leads_to):
            raise SystemExit(f"writable_root: a link of the image leads from {path} to our {place}")
    return leads_to


def add_user() -> None:
    """Name this process's user and group where the root, which is this process's, does not."""
    for path, number, form in (
        ("/etc/passwd", os.getuid(), "sandbox:x:%d:%d::/home/sandbox:/bin/sh\n"),
        ("/etc/group", os.getgid(), "sandbox:x:%d:%.0s\n"),
    ):
        try:
            text = _text(path) if os.path.lexists(path) else b""
            if all(line.split(b":")[2:3] != [b"%d" % number] for line in text.splitlines()):
                with open(path, "a", opener=_without_waiting) as file:
                    file.write("\n" if text and not text.endswith(b"\n") else "")
                    file.write(form % (number, os.getgid()))
        except OSError:
            pass  # an image may do without names


def _text(path: str) -> bytes:
    file = _without_waiting(path, os.O_RDONLY)
    text = os.read(file, MOST_NAMES_BYTES + 1)
    os.close(file)
    if len(text) > MOST_NAMES_BYTES:
        raise OSError("it is too long to be changed")
    return text


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o644)  # a pipe of the image's has nobody at its other end


def main() -> None:
    """See the module's text."""
    end = sys.argv.index("--")
    lower, overlay, *points = sys.argv[1:end]
    program = sys.argv[end + 1 :]
    user, group = os.geteuid(), os.getegid()
    require(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "no user namespace")
    keep_names(user, group)
    forbid_user_namespaces(but=1)  # the container's; none is made inside of that
    make_points(mount(lower, overlay), points)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
