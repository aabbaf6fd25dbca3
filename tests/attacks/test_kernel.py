"""Ways into the kernel, and past the filter that stands before it."""

from __future__ import annotations

import os

from tests.attacks.calls import scripted

ONE_SANDBOX = True
FILTER = "the filter of system calls"
NAMESPACES = "the filter; no more user namespaces (ucounts)"
INIT = "init is our server, which cannot be traced"
NEWUSER_NEWNS = 0x10020000


# -- namespaces and mounts -------------------------------------------


test_get_all_capabilities_in_a_user_namespace = scripted(
    NAMESPACES, f'won(in_child(lambda: call("unshare", {NEWUSER_NEWNS}) == 0))'
)

test_get_them_by_clone = scripted(
    NAMESPACES,
    """
pid = call("clone", 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: os._exit(0)
won(pid > 0)
""",
)

test_get_them_by_clone3_whose_flags_no_filter_can_read = scripted(
    "clone3 answers ENOSYS",
    """
arguments = struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
pid = call("clone3", ctypes.create_string_buffer(arguments), 88)
if pid == 0: os._exit(0)
won(pid > 0)
""",
)

test_join_the_namespaces_of_init = scripted(
    FILTER,
    """
def join():
    fd = os.open("/proc/self/ns/uts", os.O_RDONLY)
    return call("setns", fd, 0) == 0
won(in_child(join))
""",
)

test_mount_a_file_system_the_old_way = scripted(
    FILTER,
    f"""
def mounts():
    call("unshare", {NEWUSER_NEWNS})
    os.makedirs("place", exist_ok=True)
    return call("mount", b"none", b"place", b"tmpfs", 0, b"size=64k") == 0
won(in_child(mounts))
""",
)


# CVE-2022-0185: legacy_parse_param, reached from a user namespace by fsopen.
test_reach_fsconfig_and_its_overflow = scripted(
    "fsopen answers ENOSYS",
    f"""
def opens():
    call("unshare", {NEWUSER_NEWNS})
    return call("fsopen", b"tmpfs", 0) >= 0
won(in_child(opens))
""",
)

test_take_a_tree_of_mounts_along = scripted(
    "open_tree answers ENOSYS",
    f"""
def takes():
    call("unshare", {NEWUSER_NEWNS})
    return call("open_tree", -100, b"/", 0x8001) >= 0  # OPEN_TREE_CLONE | AT_RECURSIVE
won(in_child(takes))
""",
)


# -- machines in the kernel ---------------------------------------------


# CVE-2021-3490 and its many relatives begin with a map and a program.
test_load_something_into_bpf = scripted(
    FILTER,
    """
array = struct.pack("IIII", 2, 4, 8, 1) + bytes(112)
won(call("bpf", 0, ctypes.create_string_buffer(array), 128) >= 0)
""",
)

test_make_calls_past_the_filter_through_a_ring = scripted(
    "io_uring answers ENOSYS", 'won(call("io_uring_setup", 2, ctypes.create_string_buffer(120)) >= 0)'
)


# userfaultfd, which makes races of the kernel winnable. Without a flag it is for the privileged.
test_stop_the_kernel_in_the_middle_of_a_copy = scripted(
    FILTER, 'won(max(call("userfaultfd", 0), call("userfaultfd", 1)) >= 0)'
)


# CVE-2013-2094, and side channels. Here: the machine's software clock.
test_measure_others_by_performance_counters = scripted(
    FILTER,
    """
attributes = struct.pack("IIQ", 1, 112, 0) + bytes(96)
won(call("perf_event_open", ctypes.create_string_buffer(attributes), 0, -1, -1, 0) >= 0)
""",
)

test_read_the_kernels_messages = scripted(
    FILTER, 'won(call("syslog", 3, ctypes.create_string_buffer(4096), 4096) > 0)'
)


# Docker's "shocker": a handle leads to any file of the file system, whatever is mounted where.
test_open_a_file_of_the_machine_by_its_number = scripted(
    FILTER,
    """
open("mine", "w").close()
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
mount = ctypes.c_int()
call("name_to_handle_at", -100, b"mine", handle, ctypes.byref(mount), 0)
won(call("open_by_handle_at", os.open(".", os.O_RDONLY), handle, 0) >= 0)
""",
)

test_watch_all_files_of_a_file_system = scripted(FILTER, 'won(call("fanotify_init", 0x200, 0) >= 0)')


test_make_every_page_executable = scripted(
    FILTER, 'won(in_child(lambda: call("personality", 0x0400000) >= 0))'
)


if os.uname().machine == "x86_64":
    # `int 0x80` takes i386's numbers: there, 20 is getpid, which is 39 here.
    test_get_around_the_filter_by_calls_of_32_bits = scripted(
        "calls of other architectures answer ENOSYS",
        """
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("53 b814000000 cd80 5b c3"))  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
won(ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid())
""",
    )

    test_write_segment_descriptors_of_ones_own = scripted(
        FILTER,
        'won(in_child(lambda: call("modify_ldt", 17, '
        'ctypes.create_string_buffer(struct.pack("IIII", 0, 0, 0, 0x51)), 16) == 0))',
    )


# -- terminals ---------------------------------------------


# bubblewrap's CVE-2017-5226: TIOCSTI puts a command where the shell will read it.
test_type_into_the_terminal = scripted(
    FILTER,
    """
import fcntl, pty, termios
def types():
    os.setsid()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
    fcntl.ioctl(theirs, termios.TIOCSTI, b"x")
    return 1
def attempt():
    try: return types()
    except OSError: return 0
won(in_child(attempt) == 1)
""",
)


# n_hdlc (CVE-2017-2636) and n_gsm: TIOCSETD on any terminal loads the module. Here: the one there is.
test_load_a_line_discipline = scripted(
    FILTER,
    """
import fcntl, pty
try:
    fcntl.ioctl(pty.openpty()[1], 0x5423, struct.pack("i", 0))
    won(True)
except OSError:
    won(False)
""",
)


# -- the runtime -----------------------------------------------


# The runtime's own init would be one: same user, traceable, no filter. Seized, it would run our code.
test_act_through_a_process_that_is_under_no_filter = scripted(
    INIT,
    lambda target: (
        f"""
own = {_own(target)}
won(any(call("ptrace", 0x4206, pid, 0, 0) == 0 for pid in own))  # PTRACE_SEIZE
"""
    ),
)


SERVER = 'int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])'
"""The parent of the shell."""


def _own(target) -> str:
    """Init and server, which should be one; the machine's own init is left alone by the control."""
    return f"[{SERVER}]" if target.control else f"[1, {SERVER}]"


test_read_the_servers_memory = scripted(
    INIT,
    f"""
byte = ctypes.create_string_buffer(1)
server = {SERVER}
try: start = int(open(f"/proc/{{server}}/maps").readline().split("-")[0], 16)
except OSError: start = 0x400000
ours = struct.pack("PP", ctypes.addressof(byte), 1)
theirs = struct.pack("PP", start, 1)
ours, theirs = map(ctypes.create_string_buffer, (ours, theirs))
won(call("process_vm_readv", server, ours, 1, theirs, 1, 0) == 1)
""",
)


# Apptainer's init holds its whole configuration there: directories, binds, the service's user.
test_read_the_runtimes_environment_and_configuration = scripted(
    INIT,
    lambda target: (
        f"""
read = 0
for pid in {_own(target)}:
    try: read += len(open(f"/proc/{{pid}}/environ", "rb").read())
    except OSError: pass
won(read)
"""
    ),
)


# runc's CVE-2019-5736: /proc/PID/exe of the process that came in from outside.
test_take_the_runtimes_program_to_overwrite_it = scripted(
    INIT,
    lambda target: (
        f"""
opened = 0
for pid in {_own(target)}:
    try: os.open(f"/proc/{{pid}}/exe", os.O_RDONLY); opened += 1
    except OSError: pass
won(opened)
"""
    ),
)


# runc's CVE-2024-21626: a directory of the machine in /proc/PID/fd of any process.
test_find_a_descriptor_that_was_left_open = scripted(
    INIT,
    lambda target: (
        f"""
import glob
found = []
for link in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/cwd"):
    try: found.append(os.readlink(link))
    except OSError: pass
won(any(name.startswith("{target.state}") for name in found))
"""
    ),
)

test_signal_a_process_of_the_machine = scripted(
    "a PID namespace",
    lambda target: (
        f"""
try: os.kill({os.getpid()}, 0); alive = open("/proc/{os.getpid()}/comm").read() == {_own_name()!r}
except OSError: alive = False
won(alive)
"""
    ),
)


def _own_name() -> str:
    with open("/proc/self/comm") as file:  # noqa: PTH123
        return file.read()


test_gain_rights_by_a_setuid_program = scripted(
    "no new privileges; no setuid mounts",
    """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
won(not int(status["NoNewPrivs"]))
""",
)

test_make_a_device_of_the_machine = scripted(
    "no capabilities; no devices on its mounts",
    """
import stat
try:
    os.mknod("device", 0o666 | stat.S_IFCHR, os.makedev(1, 9))
    won(len(os.read(os.open("device", os.O_RDONLY), 1)) == 1)
except OSError:
    won(False)
""",
)


# core_pattern, as uid 0 without capabilities could write it (CVE-2022-0492's way out). Only opened.
test_have_the_kernel_run_a_program_when_something_crashes = scripted(
    "/proc/sys read-only or not its own",
    """
opened = 0
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger"):
    try: os.close(os.open(path, os.O_WRONLY)); opened += 1
    except OSError: pass
won(opened)
""",
)
