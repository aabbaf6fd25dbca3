"""The system calls that a sandbox may not make: a filter of the kernel (seccomp), assembled here.

Everything that is not named is allowed, so that any program of a task runs; what is named has no use in a
sandbox and reaches beyond it, hides memory from the watchdog, or is where the kernel has had its holes. Calls
newer than this list, those of other architectures (i386, x32) and those that programs have a substitute for
answer ENOSYS, as an older kernel does; the others answer what a kernel says to somebody without the right.

A filter is inherited by all that a process starts, and can never be taken off.
"""

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
KEYCTL_JOIN_SESSION_KEYRING = 1
ALLOW, ERRNO = 0x7FFF0000, 0x00050000

INSTRUCTION_BYTES = 8
LOAD, JUMP, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x05, 0x15, 0x25, 0x45, 0x06
"""Operations of the kernel's filter machine (linux/bpf_common.h), each with a constant as operand."""
NUMBER, ARCHITECTURE = 0, 4
"""Offsets in what the filter looks at, `struct seccomp_data`."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = ("x86_64", "aarch64")
"""The columns of NUMBERS."""
NEWEST = 469
"""The newest call that this list knows (file_setattr, Linux 6.17); numbers above it answer ENOSYS."""

# Name → its number on x86_64 and on aarch64; None where there is no such call.
NUMBERS = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "listmount": (458, 458),
    "lookup_dcookie": (212, 18),
    "memfd_secret": (447, 447),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "statmount": (457, 457),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}

# (errno, names): refused whatever the arguments, to sandboxes and to builds of images.
KERNEL = (
    # Keys belong to the user outside, and are shared by all sandboxes of his.
    (errno.EPERM, "add_key request_key keyctl"),
    # Programs and probes in the kernel, and the kernel's own memory and messages.
    (errno.EPERM, "bpf perf_event_open kexec_load kexec_file_load init_module finit_module delete_module"),
    (errno.EPERM, "syslog"),
    # Lets one thread stop the kernel in the middle of a copy: half of all exploits of races.
    (errno.EPERM, "userfaultfd"),
    # A file by its number instead of its path leads around every mount (Docker's "shocker").
    (errno.EPERM, "open_by_handle_at"),
    # Switches of the machine. They take a capability that nobody here has; there is no need to try.
    (errno.EPERM, "acct swapon swapoff reboot iopl ioperm quotactl quotactl_fd vhangup fanotify_init"),
    # Rings do what they are told past this filter, and had a hole every few weeks; libuv, Node and liburing
    # users fall back to epoll.
    (errno.ENOSYS, "io_uring_setup io_uring_enter io_uring_register"),
    # Memory that not even the kernel's own accounting shows.
    (errno.ENOSYS, "memfd_secret"),
    # Of use to Wine and to exploits of x86's segments, and what the C library has not called for decades.
    (errno.ENOSYS, "modify_ldt lookup_dcookie _sysctl uselib"),
)
# And to sandboxes, but not to builds, which mount and make namespaces.
CONTAINER = (
    (errno.EPERM, "setns mount umount2 pivot_root"),
    # The new ways to mount; programs fall back to `mount` and to /proc/self/mountinfo.
    (errno.ENOSYS, "open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr"),
    (errno.ENOSYS, "statmount listmount"),
    # Its flags lie in memory, where a filter cannot look; C libraries fall back to `clone`.
    (errno.ENOSYS, "clone3"),
    # Half a gigabyte of messages that belong to no process and that nothing counts.
    (errno.ENOSYS, "msgget"),
)

CLONE_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE_NEWTIME = 0x80  # of unshare; in clone it is part of a signal's number
# Typing into a terminal and the console's selection (bubblewrap's CVE-2017-5226, CVE-2023-28100), and line
# disciplines, which load kernel modules that had many holes (n_gsm, n_hdlc).
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
# TCP, UDP, ping, and what the family itself chooses. The others (SCTP, DCCP, MPTCP, …) load kernel modules.
PROTOCOLS = (0, 1, 6, 17, 58)
SOCKET_TYPES, SOCKET_FLAGS = 0x3, 0x80800  # SOCK_STREAM, SOCK_DGRAM, SOCK_RAW; SOCK_NONBLOCK, SOCK_CLOEXEC
NETLINK_ROUTE = 0
IOPRIO_WHO_PROCESS = 1
# What gdb, setarch and sanitizers set (ADDR_NO_RANDOMIZE), UNAME26, PER_LINUX32. Others make memory
# executable, or map page 0.
PERSONALITY, PERSONALITY_ASK = 0x0040000 | 0x0020000 | 0x8, 0xFFFFFFFF
# Of System V: segments that nobody maps and semaphores are counted by nothing. 4,096 segments of this size
# are 256 MiB, and databases (PostgreSQL: 56 bytes) need no more.
SEGMENT_BYTES, SEMAPHORES = 64 << 10, 32


_assembled = {}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _refuse(number):
    return (RETURN, 0, 0, ERRNO | number)


_ALLOW = (RETURN, 0, 0, ALLOW)


def _low(argument):
    """Load the low half of an argument; the kernel takes no more of any that is looked at here."""
    return (LOAD, 0, 0, 16 + 8 * argument)


def _unless_flags(flags):
    return [_low(0), (ANY_BIT, 0, 1, flags), _refuse(errno.EPERM), _ALLOW]


def _at_most(argument, most):
    """Sizes are 64 bits wide, so the high half counts as well."""
    too_large = _refuse(errno.EINVAL)
    high = (LOAD, 0, 0, 16 + 8 * argument + 4)
    return [high, (EQUAL, 1, 0, 0), too_large, _low(argument), (ABOVE, 0, 1, most), too_large, _ALLOW]


def _none_of(argument, values):
    checks = []
    for value in values:
        checks += [(EQUAL, 0, 1, value), _refuse(errno.EPERM)]
    return [_low(argument), *checks, _ALLOW]


def _personality():
    refuse = _refuse(errno.EPERM)
    ask = (EQUAL, 2, 0, PERSONALITY_ASK)
    return [_low(0), ask, (ANY_BIT, 0, 1, ~PERSONALITY & 0xFFFFFFFF), refuse, _ALLOW]


def _socket():
    """Unix, TCP and UDP, and the netlink that lists addresses. VM sockets reach the hypervisor, packets and
    AF_ALG the kernel.
    """
    # Stream, datagram, raw: by other types protocol 0 is SCTP or DCCP.
    refuse = _refuse(errno.ESOCKTNOSUPPORT)
    internet = [_low(1), (ANY_BIT, 0, 1, ~(SOCKET_TYPES | SOCKET_FLAGS) & 0xFFFFFFFF), refuse, _low(2)]
    for number, protocol in enumerate(PROTOCOLS):
        internet.append((EQUAL, len(PROTOCOLS) - number, 0, protocol))
    internet += [_refuse(errno.EPROTONOSUPPORT), _ALLOW]
    netlink = [_low(2), (EQUAL, 1, 0, NETLINK_ROUTE), _refuse(errno.EPROTONOSUPPORT), _ALLOW]
    unknown = _refuse(errno.EAFNOSUPPORT)
    return [
        _low(0),
        (EQUAL, 0, 1, AF_UNIX),
        _ALLOW,
        (EQUAL, 2, 0, AF_INET),
        (EQUAL, 1, 0, AF_INET6),
        (JUMP, 0, 0, len(internet)),
        *internet,
        (EQUAL, 0, len(netlink), AF_NETLINK),
        *netlink,
        unknown,
    ]


def _own_limits():
    """Limits of the caller itself may be set, those of others read: one that is set on the server ends it."""
    read_only = [_low(2), (EQUAL, 0, 3, 0), (LOAD, 0, 0, 16 + 8 * 2 + 4), (EQUAL, 0, 1, 0), _ALLOW]
    return [_low(0), (EQUAL, 0, 1, 0), _ALLOW, *read_only, _refuse(errno.EPERM)]


def _own_priority():
    """The caller's own alone: the server has the agent's uid, and made to wait it would miss its limits."""
    return [_low(0), (EQUAL, 0, 3, 0), _low(1), (EQUAL, 0, 1, 0), _ALLOW, _refuse(errno.EPERM)]


def _not_of_init(argument=0):
    """The server's main thread, from which it begins what decides a reward, is number 1 of the namespace. Of
    the rest a filter cannot tell whose thread a number is; C libraries name the caller by its own.
    """
    return [_low(argument), (EQUAL, 0, 1, 1), _refuse(errno.EPERM), _ALLOW]


def _io_priority():
    """Of one process or thread, and not of a group or of all of a user's."""
    return [_low(0), (EQUAL, 1, 0, IOPRIO_WHO_PROCESS), _refuse(errno.EPERM), *_not_of_init(1)]


# Name → instructions that end in an answer; those of CONTAINER, then those of all.
CONTAINER_ARGUMENTS = {
    "clone": _unless_flags(CLONE_NAMESPACES),
    "unshare": _unless_flags(CLONE_NAMESPACES | CLONE_NEWTIME),
    "shmget": _at_most(1, SEGMENT_BYTES),
    "semget": _at_most(1, SEMAPHORES),
    "prlimit64": _own_limits(),
    "setpriority": _own_priority(),
    "ioprio_set": _io_priority(),
    "sched_setaffinity": _not_of_init(),
    "sched_setattr": _not_of_init(),
    "sched_setparam": _not_of_init(),
    "sched_setscheduler": _not_of_init(),
    "socket": _socket(),
    "socketpair": _socket(),
}
ARGUMENTS = {
    "ioctl": _none_of(1, (TIOCSTI, TIOCLINUX, TIOCSETD)),
    "personality": _personality(),
}


def program(machine, building=False, pretended=()):
    """The filter as a list of instructions (code, jump if true, jump if false, operand).

    `machine`: as `uname` names it. `building`: the profile of image builds. `pretended`: numbers of calls
    that answer 0 and do nothing. Raises OSError for a machine whose calls are not known here.
    """
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, "no filter of system calls is known for %s" % machine)
    column = MACHINES.index(machine)
    refused = KERNEL if building else CONTAINER + KERNEL
    arguments = ARGUMENTS if building else {**CONTAINER_ARGUMENTS, **ARGUMENTS}
    instructions = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        _refuse(errno.ENOSYS),
        (LOAD, 0, 0, NUMBER),
        (ABOVE, 0, 1, NEWEST),  # x32 sets a high bit, so it is above as well
        _refuse(errno.ENOSYS),
    ]
    for number in pretended:
        instructions += [(EQUAL, 0, 1, number), _refuse(0)]
    for name, body in arguments.items():
        number = NUMBERS[name][column]
        instructions += [(EQUAL, 0, len(body), number), *body]
    for answer, names in refused:
        for name in names.split():
            number = NUMBERS[name][column]
            if number is not None:
                instructions += [(EQUAL, 0, 1, number), _refuse(answer)]
    return [*instructions, _ALLOW]


def assembled(building=False):
    """The filter for this machine as the kernel reads it, made once."""
    if building not in _assembled:
        instructions = program(os.uname().machine, building)
        _assembled[building] = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    return _assembled[building]


def load(building=False, no_new_privs=True):
    """Hold this process and all that it will start to the filter, for good. Call it before making threads.

    `no_new_privs`: also that no setuid program gives them more rights; without it only root may load one.
    Raises OSError where the kernel has no filters.
    """
    code = assembled(building)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // INSTRUCTION_BYTES, ctypes.addressof(buffer))
    if no_new_privs:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header)


def join_own_keyring():
    """Give this process, and what it will start, an empty session keyring in the place of the one inherited,
    which holds the keys of the user who started us.

    Returns whether that was done: not on a kernel without keys, nor where the user's quota of them (200 for
    all but root) is used up.
    """
    if os.uname().machine not in MACHINES:
        return False
    number = NUMBERS["keyctl"][MACHINES.index(os.uname().machine)]
    return _libc.syscall(ctypes.c_long(number), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None) > 0


def prctl(option, value, pointer=None):
    """`prctl(2)`; raises OSError."""
    if _libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "prctl(%d): %s" % (option, os.strerror(number)))


def main():
    """`python seccomp.py PROGRAM ARGUMENT…`: become a program under the filter of sandboxes."""
    load()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
