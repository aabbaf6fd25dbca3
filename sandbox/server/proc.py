"""What /proc tells of the sandbox's processes: who waits for the keyboard, and ending them all."""

import os
import signal
import struct
import time

from errors import ServerError

# Calls in which a process waits for input: number → name. On other machines it is not told.
_CALLS = {
    "x86_64": {0: "read", 19: "read", 23: "select", 270: "select", 7: "poll", 271: "ppoll"},
    "aarch64": {63: "read", 65: "read", 72: "select", 73: "ppoll"},
}.get(os.uname().machine, {})
READS = {b"%d" % number for number, name in _CALLS.items() if name == "read"}
_POLLFD = struct.Struct("ihh")
_POLL_IN = 0x1
_MOST_FDS = 64  # a process that watches more is a server, not at a prompt
_TTY_DEVICE = os.makedev(5, 0)  # /dev/tty
_END_TIMEOUT_S = 8.0
_BUSY_S = 2.0  # of a processor; a shell or a kernel is ready after less


def processes():
    """Ids of all processes that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def relations(pid):
    """(parent, process group) of a living process; None when there is none."""
    fields = _stat("/proc/%d/stat" % pid)
    return (int(fields[1]), int(fields[2])) if fields and fields[0] not in (b"Z", b"X") else None


def group_members(group):
    """Living processes of a process group."""
    return [pid for pid in processes() if (relations(pid) or (0, 0))[1] == group]


def working_directory(pid):
    """Path, as bytes, of the directory a process is in; None when that cannot be told. A directory that was
    removed keeps its name.
    """
    try:
        path = os.readlink(b"/proc/%d/cwd" % pid)
    except OSError:
        return None
    deleted = b" (deleted)"
    return path[: -len(deleted)] if path.endswith(deleted) and not os.path.isdir(path) else path


def command_line(pid):
    """Arguments of a process; [] when there is none."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return os.fsdecode(file.read()).split("\0")
    except OSError:
        return []


def description(pid):
    """What a process is and whether it works or waits, for a message."""
    fields = _stat("/proc/%d/stat" % pid)
    state = fields[0].decode() if fields else "gone"
    return "process %d is %r in state %s" % (pid, " ".join(command_line(pid))[:200], state)


def starved(pid):
    """Whether a process that has not got on may only be short of a processor or a disk.

    It, or a child of its, wants to run, and they have hardly run.
    """
    family, states, ticks = {pid}, set(), 0
    for other in sorted(processes()):
        fields = _stat("/proc/%d/stat" % other)
        if fields is not None and (other == pid or int(fields[1]) in family):
            family.add(other)
            states.add(fields[0])
            ticks += sum(map(int, fields[11:15]))  # its own, and those of children that ended
    return bool(states & {b"R", b"D"}) and ticks < _BUSY_S * os.sysconf("SC_CLK_TCK")


# -- waiting for input ----------------------------------------------


def waits_for_terminal(group, terminal):
    """Whether a thread of a process group certainly waits for input from a terminal (device number).

    False also when a member of the group still works, or when it cannot be told: on a machine whose system
    calls are not known here, or without leave to look.
    """
    waits = False
    for pid in group_members(group):
        try:
            threads = [int(name) for name in os.listdir("/proc/%d/task" % pid)]
        except OSError:
            continue
        for thread in threads:
            base = "/proc/%d/task/%d" % (pid, thread)
            fields = _stat(base + "/stat")
            if fields is None:
                continue
            if fields[0] in (b"R", b"D"):
                return False
            waits = waits or (fields[0] == b"S" and _waits_for(pid, base, terminal))
    return waits


def _waits_for(pid, base, terminal):
    try:
        with open(base + "/syscall") as file:
            words = file.read().split()
        call = _CALLS.get(int(words[0]))
        arguments = [int(word, 16) for word in words[1:7]]
        descriptors = _watched(call, arguments, pid) if call else []
        devices = {os.stat("/proc/%d/fd/%d" % (pid, fd)).st_rdev for fd in descriptors}
        return bool(devices) and devices <= {terminal, _TTY_DEVICE}
    except (OSError, ValueError, IndexError, OverflowError, struct.error):
        return False  # it ran just then, has ended, or may not be looked at


def _watched(call, arguments, pid):
    """Descriptors that a call waits for to become readable; [] when it ends by itself."""
    if call == "read":
        return [arguments[0]]
    if call == "select":
        count, readable, timeout = arguments[0], arguments[1], arguments[4]
        if timeout or not readable or count > 8 * _MOST_FDS:
            return []
        bits = int.from_bytes(_memory(pid, readable, (count + 63) // 64 * 8), "little")
        return [fd for fd in range(count) if bits >> fd & 1]
    address, count, timeout = arguments[:3]
    forever = timeout == 0 if call == "ppoll" else bool(timeout & 0x80000000)
    if not forever or count > _MOST_FDS:
        return []
    entries = _POLLFD.iter_unpack(_memory(pid, address, count * _POLLFD.size))
    return [fd for fd, events, _ in entries if fd >= 0 and events & _POLL_IN]


def _memory(pid, address, size):
    fd = os.open("/proc/%d/mem" % pid, os.O_RDONLY)
    try:
        return os.pread(fd, size, address)
    finally:
        os.close(fd)


# -- ending ----------------------------------------------


def end_all(own_namespace):
    """Kill every process of the sandbox but this one, and wait until they are gone. Raises ServerError when
    some do not end.

    `own_namespace`: whether the PID namespace is the sandbox's, so that the kernel itself knows who is meant
    and no fork can escape; else it is all that descends from this process, its subreaper.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    pause = 0.001
    while True:
        if own_namespace:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
            alive = [pid for pid in processes() if pid != os.getpid()]
        else:
            alive = descendants(os.getpid())
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        alive = [pid for pid in alive if relations(pid)]
        if not alive:
            return
        if time.monotonic() > deadline:
            raise ServerError("the processes %s of the sandbox do not end" % alive)
        time.sleep(pause)  # a process that exits frees its memory first, which nothing announces
        pause = min(2 * pause, 0.05)


def descendants(root):
    """Living processes below one."""
    children = {}
    for pid in processes():
        children.setdefault((relations(pid) or (0, 0))[0], []).append(pid)
    below, queue = [], [root]
    while queue:
        young = children.get(queue.pop(), [])
        below += young
        queue += young
    return below


def _stat(path):
    """Fields of a stat file after the name, which may contain anything."""
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None
