"""A process that has the server imported, of which every sandbox of a node is a clone.

    python3 template.py STATE

It runs in a container of Apptainer's that shows the places in which sandboxes and images lie, and holds
nothing of any request: for each sandbox it is handed three descriptors and forks. The child reads what is
asked for by itself, puts itself into namespaces of its own, and makes there of the image what Apptainer makes
of it else, before anything of a tenant runs. Then it is the server. STATE, the host's directory, only tells
people whose it is.

Standard input is a socket over which the descriptors come. A clone runs on when it is closed, or the template
ends. A request is a dict as `marshal` writes it, the first message on a clone's standard input: `lower,
overlay, points` as in `writable_root.py`, `binds` ((source, target, read-only), …), `config` (for
`start.py`). The answers, in any order, are the new process's pid, and `entered`.
"""

import _signal as signal  # their namesakes make enumerations, which takes longer than all of this
import _socket
import ctypes
import fcntl
import gc
import marshal
import os
import select
import struct

import seccomp
import start
import writable_root
from writable_root import CLONE_NEWNS, MS_NODEV, MS_NOSUID, libc, require

CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000
MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x8, 0x1000, 0x4000, 0x40000, 2
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
AT_FDCWD, ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = -100, 1, 2, 4
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CAPABILITY_VERSION, MOST_CAPABILITIES = 0x20080522, 64
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
DEVICES = ("null", "zero", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
MOST_BYTES = 1 << 18
REST = ("shell", "server", "kernel_life", "editor", "files", "state")
"""What the server imports later than its shell, for it takes time."""


def main():
    """Fork for each sandbox, until the socket is closed. What no first clone needs is imported after that."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel reaps
    rest = list(REST)
    seccomp.assembled()
    while True:
        if rest and not select.select([0], [], [], 0)[0]:
            __import__(rest.pop(0))
            if not rest:
                gc.collect()
                gc.freeze()  # a clone's collector would write to, and so copy, every page
            continue
        fds = receive()
        if not fds:
            return
        if os.fork() == 0:
            be_clone(fds)
        for fd in fds:
            os.close(fd)


def receive():
    """Descriptors of a sandbox's standard input, output and error; none at the end."""
    source = _socket.socket(fileno=os.dup(0))
    try:
        _, messages, _, _ = source.recvmsg(1, _socket.CMSG_SPACE(3 * start.FD_BYTES))
    finally:
        source.close()
    return [fd for _, _, data in messages for fd in struct.unpack("=3i", data)]


def be_clone(fds):
    """Fork once more, into the namespaces of a sandbox; tell who that is, and end. Does not return."""
    try:
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        host = _socket.socket(fileno=0)
        request = marshal.loads(host.recv(MOST_BYTES))
        start.prefer_us_when_memory_is_short()
        writable_root.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET)
        pid = os.fork()
        if pid == 0:
            be_sandbox(request, host)
        host.send(b"%d" % pid)
        os._exit(0)
    except BaseException as error:  # it must not go on as if it were the template
        os.write(2, b"%s: %s\n" % (type(error).__name__.encode(), str(error).encode()))
    finally:
        os._exit(1)


def be_sandbox(request, host):
    """Be the first process of a sandbox, and its server. Returns when that has ended."""
    os.setsid()
    os.umask(0o022)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    enter(request)
    raise_loopback()
    drop_capabilities()
    host.send(b"entered")
    host.detach()
    start.main(request["config"])


def enter(request):
    """Make the image this process's root, with all that is shown in it."""
    require(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "no private mounts")
    # Opened here, for inside these names are the image's; mounted there, for so no link of it leads outside.
    sources = [os.open(source, os.O_PATH) for source, _, _ in request["binds"]]
    devices = [os.open("/dev/" + name, os.O_PATH) for name in DEVICES]
    outside = os.open("/", os.O_PATH)
    root = writable_root.mount(request["lower"], request["overlay"])
    writable_root.make_points(root, request["points"])
    os.chroot(root)
    os.chdir("/")
    writable_root.add_user()  # while all that lies here is the image's
    mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    writable_root.forbid_user_namespaces(but=0)
    mount_devices(devices)
    for fd, (_, target, read_only) in zip(sources, request["binds"]):
        bind(fd, target)
        attributes = ATTR_NOSUID | ATTR_NODEV | (ATTR_RDONLY if read_only else 0)
        set_attributes(target, attributes)
    set_attributes("/dev", ATTR_RDONLY)  # else its memory would have to be counted
    os.fchdir(outside)
    os.chroot(".")
    os.chdir(root)
    here = ctypes.c_char_p(b".")
    require(libc.syscall(PIVOT_ROOT[os.uname().machine], here, here), "no new root")
    require(libc.umount2(here, MNT_DETACH), "the old root stays")
    os.chdir("/")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def mount(kind, target, flags, options=""):
    """Mount a file system of the kernel's own."""
    name = kind.encode()
    status = libc.mount(name, target.encode(), name, flags, options.encode() or None)
    require(status, "no %s at %s" % (kind, target))


def mount_devices(devices):
    """A /dev with nothing in it that leads to the machine."""
    mount("tmpfs", "/dev", MS_NOSUID, "mode=755,size=64k")
    for name, fd in zip(DEVICES, devices):
        os.close(os.open("/dev/" + name, os.O_CREAT | os.O_WRONLY, 0o666))
        bind(fd, "/dev/" + name)
    for name, target in LINKS.items():
        os.symlink(target, "/dev/" + name)
    for name in ("pts", "shm", "mqueue"):
        os.mkdir("/dev/" + name)
    mount("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,mode=620,ptmxmode=666")
    mount("mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def bind(fd, target):
    """Show what is open under another name."""
    source = b"/proc/self/fd/%d" % fd
    require(libc.mount(source, target.encode(), None, MS_BIND | MS_REC, None), "no mount at " + target)


def set_attributes(target, attributes):
    """Add to what holds for a mount; what it has is kept, which a remount could not."""
    setting = struct.pack("=4Q", attributes, 0, 0, 0)
    status = libc.syscall(MOUNT_SETATTR, AT_FDCWD, ctypes.c_char_p(target.encode()), 0, setting, len(setting))
    require(status, "cannot protect " + target)


def raise_loopback():
    """Let programs inside reach each other by it."""
    control = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(control.fileno(), SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    control.close()


def drop_capabilities():
    """Keep none, and nothing to gain them by."""
    for number in range(MOST_CAPABILITIES):
        try:
            seccomp.prctl(PR_CAPBSET_DROP, number)
        except OSError:
            break  # the kernel has no more
    seccomp.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header, none = struct.pack("=Ii", CAPABILITY_VERSION, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0)
    require(libc.capset(header, none), "capabilities stay")


if __name__ == "__main__":
    main()
