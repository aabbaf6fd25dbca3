"""A process that has the server imported, of which every sandbox of a node is a clone.

    /proc/self/fd/PYTHON/bin/python3 /proc/self/fd/CODE/template.py STATE [PLACES]

It lives in a container of Apptainer's that shows the places in which sandboxes and images lie, and holds
nothing of any request: for each sandbox it is handed three descriptors and forks. The child reads what is
asked for by itself, puts itself into namespaces of its own, and makes there of the image what Apptainer makes
of it else, before anything of a tenant runs. Then it is the server. In STATE, the host's directory, we have
one of our own.

It begins outside, together with Apptainer, which takes longer than all imports, and joins the container when
that is there. What it is made of goes by the names of two descriptors, which mean in turn the trees outside,
at their PLACES in the container, and at those of each sandbox: never what an image has by the names outside.
Without PLACES it has begun in the container, and leaves Apptainer to become the host's child.

Standard input is a socket over which the descriptors of sandboxes come, standard output one from what holds
the container until it is joined: its pid. A clone runs on when the first is closed, or the template ends. A
request is a dict as `marshal` writes it, the first message on a clone's standard input: `lower, overlay,
points` as in `writable_root.py`, `binds` ((source, target, read-only), …), `config` (see `start.py`). The
answers are the new process's pid, and `entered` once all is mounted.
"""

import _socket  # its namesake makes enumerations, which takes longer than all of this
import ctypes
import fcntl
import gc
import marshal
import os
import select
import struct
import sys
from itertools import accumulate

sys.path[0] = os.path.dirname(__file__)  # the descriptor's name: Python had followed the link
import seccomp  # noqa: E402
import start  # noqa: E402
import writable_root  # noqa: E402
from writable_root import CLONE_NEWNS, CLONE_NEWUSER, MS_NODEV, MS_NOSUID, libc, require  # noqa: E402

CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x00008000, 0x00200000, 0x01000000
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000
CLONE_FLAGS = (CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET) | (
    CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID
)
PR_GET_TID_ADDRESS = 40
MS_NOEXEC, MS_REC, MS_PRIVATE, MNT_DETACH = 0x8, 0x4000, 0x40000, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
OPEN_TREE, MOVE_MOUNT, OPENAT2, MOUNT_SETATTR = 428, 429, 437, 442
OPEN_TREE_CLONE, AT_FDCWD, AT_RECURSIVE, AT_EMPTY_PATH = 1, -100, 0x8000, 0x1000
FROM_FD, TO_FD = 0x4, 0x40  # MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH
NO_LINKS_IN_ROOT = 0x2 | 0x4 | 0x10  # RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_IN_ROOT
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CAPABILITY_VERSION, MOST_CAPABILITIES = 0x20080522, 64
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
DEVICES = ("null", "zero", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
POINTS = ("workspace", "home/sandbox", "sys/devices/system/cpu", "run/sbx", "sbx", "sbx-python")
PLACES = ("/sbx", "/sbx-python")
"""Of our code and of Python, in a sandbox."""
BENEATH = "beneath"
"""A directory with these, which each image lies on: what it lacks need not be made for each sandbox."""
MOST_BYTES = 1 << 18
NAME = "sbx-template"
"""By which the host knows clones of which it was not told (`runtimes/template.py`)."""
USER = os.geteuid(), os.getegid()
locked_libc = ctypes.PyDLL(None, use_errno=True)
"""With Python's lock, which the child then has as well."""
TREES = [int(os.path.basename(place)) for place in (sys.path[0], sys.prefix)]
"""Descriptors of our code and of Python, by whose names these go."""
REST = ("shell", "server", "kernel_life", "editor", "files", "state")
"""What the server imports later than all of the above, for it takes time."""


def main():
    """Be in the container and the host's child, and clone for each sandbox until the socket is closed."""
    with open("/proc/self/comm", "w") as file:
        file.write(NAME)  # of all clones, too
    for name in REST:
        __import__(name)
    seccomp.assembled()
    gc.collect()
    gc.freeze()  # a clone's collector would write to, and so copy, every page
    state, *places = sys.argv[1:]
    home = os.path.join(state, "template")
    os.umask(0o022)  # of what is made here, and of all clones
    for point in POINTS:
        os.makedirs(os.path.join(home, BENEATH, point), mode=0o755, exist_ok=True)
    if places:
        join(os.read(1, MOST_BYTES), places)
    else:
        leave()
    os.chdir(home)
    while True:
        fds = receive()
        if not fds:
            return
        known, told = os.pipe()
        try:
            pid = clone()
            if pid == 0:
                be_clone(fds, known)
            os.write(fds[0], b"%d" % pid)
            os.write(told, b"k")
        except OSError as error:
            report(fds[2], "cannot be cloned: %s" % error)
        for fd in (*fds, known, told):
            os.close(fd)


def leave():
    """Have Apptainer end, and be adopted."""
    first = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == first:  # nobody is answered before, for the host does not adopt for longer
        select.select([], [], [], 0.001)


def join(holder, places):
    """Be in the container in which that process (its pid, as bytes) is, and let it end."""
    if not holder:
        raise SystemExit("the container has ended before it could be joined")
    spaces = [os.open("/proc/%d/ns/%s" % (int(holder), name), os.O_RDONLY) for name in ("user", "mnt")]
    for space in spaces:
        require(libc.setns(space, 0), "the container cannot be joined")
        os.close(space)
    refer(places)
    seccomp.prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def refer(places):
    """Have Python and our code be what is at these places now, and not what was there where we came from."""
    for fd, place in zip(TREES, places):
        tree = os.open(place, os.O_PATH | os.O_DIRECTORY)
        os.dup2(tree, fd, inheritable=False)
        os.close(tree)


def close_from(first):
    """Close all other descriptors from this one on."""
    edges = first - 1, *sorted(TREES), os.sysconf("SC_OPEN_MAX")
    for low, high in zip(edges, edges[1:]):
        os.closerange(low + 1, high)


def receive():
    """Descriptors of a sandbox's standard input, output and error; none at the end."""
    source = _socket.socket(fileno=os.dup(0))
    try:
        _, messages, _, _ = source.recvmsg(1, _socket.CMSG_SPACE(3 * start.FD_BYTES))
    finally:
        source.close()
    return [fd for _, _, data in messages for fd in struct.unpack("=3i", data)]


def clone():
    """As `os.fork`, but into namespaces of the child's own, which is our parent's. Raises OSError.

    What Python does after a fork is for the sake of other threads. There are none, and to do it takes longer.
    """
    number = ctypes.c_ulong()
    seccomp.prctl(PR_GET_TID_ADDRESS, ctypes.addressof(number))  # where the C library keeps the thread's
    # Docker's filter knows no `clone3`. The number is the fourth argument or the fifth, by machine.
    none, call = ctypes.c_long(0), ctypes.c_long(CLONE[os.uname().machine])
    pid = locked_libc.syscall(call, ctypes.c_long(CLONE_FLAGS), none, none, number, number)
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def be_clone(fds, known):
    """Be a sandbox as soon as somebody has been told of it. Does not return."""
    try:
        os.setsid()  # whoever ends the template's process group is not to end this one
        for target, fd in enumerate((*fds, known)):
            os.dup2(fd, target)
        close_from(len(fds) + 1)
        if os.read(len(fds), 1):  # else it would be nobody's
            host = _socket.socket(fileno=0)
            be_sandbox(marshal.loads(host.recv(MOST_BYTES)), host)
    except SystemExit as error:
        report(2, str(error))
    except BaseException as error:  # it must not go on as if it were the template
        sys.__excepthook__(type(error), error, error.__traceback__)
    finally:
        os._exit(1)


def report(fd, text):
    """Say it to the host, if that still listens."""
    try:
        os.write(fd, text.encode(errors="replace"))
    except OSError:
        pass


def be_sandbox(request, host):
    """Be the first process of a sandbox, and its server. Returns when that has ended."""
    writable_root.keep_names(*USER)
    start.prefer_us_when_memory_is_short()
    enter(request)
    raise_loopback()
    drop_capabilities()
    host.send(b"entered")
    host.detach()
    start.serve(marshal.loads(request["config"]))


def enter(request):
    """Make the image this process's root, with all that is shown in it.

    What is shown is taken before anything of the image is there, and put where the image's links led when no
    more was there than itself: by then each is followed, and led nowhere of ours. No link is followed after
    that, for what is mounted may hold any.
    """
    require(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "no private mounts")
    trees = [(taken(source, read_only), target) for source, target, read_only in request["binds"]]
    devices = [(taken("/dev/" + name), "/dev/" + name) for name in DEVICES]
    outside = os.open("/", os.O_PATH)
    lower, overlay, points = request["lower"], request["overlay"], request["points"]
    # No link may lead to what is put beneath the image; and somebody may have cleaned that away.
    links = any(has_links(layer, points) for layer in (lower, overlay + "/upper") if os.path.exists(layer))
    beneath = [BENEATH] if os.path.isdir(BENEATH) and not links else []
    root = writable_root.mount(lower, overlay, *beneath)
    places = writable_root.make_points(root, points)
    os.chroot(root)
    os.chdir("/")
    writable_root.add_user()  # while all that lies here is the image's
    make_devices()
    for tree, target in devices:
        put(tree, target)
    for tree, target in trees:
        if not target.startswith("/proc/"):
            put(tree, places.get(target, target))
    mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    writable_root.forbid_user_namespaces(but=0)
    for tree, target in trees:
        if target.startswith("/proc/"):
            put(tree, target)
        elif target in writable_root.OURS and not os.path.samestat(os.fstat(tree), os.stat(target)):
            raise SystemExit("template: something else than ours is at " + target)
    device = os.open("/dev", os.O_PATH)
    set_attributes(device, ATTR_RDONLY, AT_EMPTY_PATH)  # else its memory would have to be counted
    os.fchdir(outside)
    os.chroot(".")
    os.chdir(root)
    here = ctypes.c_char_p(b".")
    require(libc.syscall(PIVOT_ROOT[os.uname().machine], here, here), "no new root")
    require(libc.umount2(here, MNT_DETACH), "the old root stays")
    os.chdir("/")
    refer(PLACES)
    close_from(3)


def has_links(layer, points):
    """Whether an image, or what an agent has made of one, has a link at one of these places or above."""
    places = {place for point in points for place in accumulate(point.lstrip("=").split("/"), os.path.join)}
    return any(os.path.islink(os.path.join(layer, place)) for place in places)


def taken(source, read_only=None):
    """What is at a place outside, with all that is mounted there, to be put elsewhere. None = a device."""
    name, flags = ctypes.c_char_p(os.fsencode(source)), OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    tree = libc.syscall(OPEN_TREE, AT_FDCWD, name, flags)
    require(min(tree, 0), "nothing to be shown at " + source)
    if read_only is not None:
        attributes = ATTR_NOSUID | ATTR_NODEV | (ATTR_RDONLY if read_only else 0)
        set_attributes(tree, attributes, AT_EMPTY_PATH | AT_RECURSIVE)
    return tree


def put(tree, target):
    """Show it at a place of this process's root, to which no link leads."""
    how = struct.pack("=3Q", os.O_PATH | os.O_CLOEXEC, 0, NO_LINKS_IN_ROOT)
    name = ctypes.c_char_p(os.fsencode(target))
    place = libc.syscall(OPENAT2, AT_FDCWD, name, how, len(how))
    require(min(place, 0), "no place to mount on at " + target)
    nothing = ctypes.c_char_p(b"")
    require(libc.syscall(MOVE_MOUNT, tree, nothing, place, nothing, FROM_FD | TO_FD), "no mount at " + target)
    os.close(place)


def mount(kind, target, flags, options=""):
    """Mount a file system of the kernel's own."""
    name = kind.encode()
    status = libc.mount(name, target.encode(), name, flags, options.encode() or None)
    require(status, "no %s at %s" % (kind, target))


def make_devices():
    """A /dev with nothing in it that leads to the machine, and places for devices."""
    mount("tmpfs", "/dev", MS_NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        os.close(os.open("/dev/" + name, os.O_CREAT | os.O_WRONLY, 0o666))
    for name, target in LINKS.items():
        os.symlink(target, "/dev/" + name)
    for name in ("pts", "shm", "mqueue"):
        os.mkdir("/dev/" + name)
    mount("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,mode=620,ptmxmode=666")
    mount("mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def set_attributes(tree, attributes, flags):
    """Add to what holds for a mount; what it has is kept, which a remount could not."""
    setting = struct.pack("=4Q", attributes, 0, 0, 0)
    nothing = ctypes.c_char_p(b"")
    status = libc.syscall(MOUNT_SETATTR, tree, nothing, flags, setting, len(setting))
    require(status, "cannot protect a mount")


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
