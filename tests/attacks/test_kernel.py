"""Ways into the kernel, and past the filter that stands before it."""

from __future__ import annotations

import os

from tests.attacks import attack
from tests.attacks.calls import succeeds

FILTER = "the filter of system calls"
NAMESPACES = "the filter; no more user namespaces (ucounts)"
INIT = "init is our server, which cannot be traced"
NEWUSER_NEWNS = 0x10020000


# -- namespaces and mounts -------------------------------------------


@attack(stopped_by=NAMESPACES)
def test_get_all_capabilities_in_a_user_namespace(target):
    return succeeds(target, f'won(in_child(lambda: call("unshare", {NEWUSER_NEWNS}) == 0))')


@attack(stopped_by=NAMESPACES)
def test_get_them_by_clone(target):
    return succeeds(
        target,
        """
pid = call("clone", 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: os._exit(0)
won(pid > 0)
""",
    )


@attack(stopped_by="clone3 answers ENOSYS")
def test_get_them_by_clone3_whose_flags_no_filter_can_read(target):
    return succeeds(
        target,
        """
arguments = struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
pid = call("clone3", ctypes.create_string_buffer(arguments), 88)
if pid == 0: os._exit(0)
won(pid > 0)
""",
    )


@attack(stopped_by=FILTER)
def test_join_the_namespaces_of_init(target):
    return succeeds(
        target,
        """
def join():
    fd = os.open("/proc/self/ns/uts", os.O_RDONLY)
    return call("setns", fd, 0) == 0
won(in_child(join))
""",
    )


@attack(stopped_by=FILTER)
def test_mount_a_file_system_the_old_way(target):
    return succeeds(
        target,
        f"""
def mounts():
    call("unshare", {NEWUSER_NEWNS})
    os.makedirs("place", exist_ok=True)
    return call("mount", b"none", b"place", b"tmpfs", 0, b"size=64k") == 0
won(in_child(mounts))
""",
    )


@attack(stopped_by="fsopen answers ENOSYS")
def test_reach_fsconfig_and_its_overflow(target):
    """CVE-2022-0185: legacy_parse_param, reached from a user namespace by fsopen."""
    return succeeds(
        target,
        f"""
def opens():
    call("unshare", {NEWUSER_NEWNS})
    return call("fsopen", b"tmpfs", 0) >= 0
won(in_child(opens))
""",
    )


@attack(stopped_by="open_tree answers ENOSYS")
def test_take_a_tree_of_mounts_along(target):
    return succeeds(
        target,
        f"""
def takes():
    call("unshare", {NEWUSER_NEWNS})
    return call("open_tree", -100, b"/", 0x8001) >= 0  # OPEN_TREE_CLONE | AT_RECURSIVE
won(in_child(takes))
""",
    )


# -- machines in the kernel ---------------------------------------------


@attack(stopped_by=FILTER)
def test_load_something_into_bpf(target):
    """CVE-2021-3490 and its many relatives begin with a map and a program."""
    return succeeds(
        target,
        """
array = struct.pack("IIII", 2, 4, 8, 1) + bytes(112)
won(call("bpf", 0, ctypes.create_string_buffer(array), 128) >= 0)
""",
    )


@attack(stopped_by="io_uring answers ENOSYS")
def test_make_calls_past_the_filter_through_a_ring(target):
    return succeeds(target, 'won(call("io_uring_setup", 2, ctypes.create_string_buffer(120)) >= 0)')


@attack(stopped_by=FILTER)
def test_stop_the_kernel_in_the_middle_of_a_copy(target):
    """userfaultfd, which makes races of the kernel winnable. Without a flag it is for the privileged."""
    return succeeds(target, 'won(max(call("userfaultfd", 0), call("userfaultfd", 1)) >= 0)')


@attack(stopped_by=FILTER)
def test_measure_others_by_performance_counters(target):
    """CVE-2013-2094, and side channels. Here: the machine's software clock."""
    return succeeds(
        target,
        """
attributes = struct.pack("IIQ", 1, 112, 0) + bytes(96)
won(call("perf_event_open", ctypes.create_string_buffer(attributes), 0, -1, -1, 0) >= 0)
""",
    )


@attack(stopped_by=FILTER)
def test_read_the_kernels_messages(target):
    return succeeds(target, 'won(call("syslog", 3, ctypes.create_string_buffer(4096), 4096) > 0)')


@attack(stopped_by=FILTER)
def test_open_a_file_of_the_machine_by_its_number(target):
    """Docker's "shocker": a handle leads to any file of the file system, whatever is mounted where."""
    return succeeds(
        target,
        """
open("mine", "w").close()
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
mount = ctypes.c_int()
call("name_to_handle_at", -100, b"mine", handle, ctypes.byref(mount), 0)
won(call("open_by_handle_at", os.open(".", os.O_RDONLY), handle, 0) >= 0)
""",
    )


@attack(stopped_by=FILTER)
def test_watch_all_files_of_a_file_system(target):
    return succeeds(target, 'won(call("fanotify_init", 0x200, 0) >= 0)')


@attack(stopped_by=FILTER)
def test_make_every_page_executable(target):
    return succeeds(target, 'won(in_child(lambda: call("personality", 0x0400000) >= 0))')


if os.uname().machine == "x86_64":

    @attack(stopped_by="calls of other architectures answer ENOSYS")
    def test_get_around_the_filter_by_calls_of_32_bits(target):
        """`int 0x80` takes i386's numbers: there, 20 is getpid, which is 39 here."""
        return succeeds(
            target,
            """
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("53 b814000000 cd80 5b c3"))  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
won(ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid())
""",
        )

    @attack(stopped_by=FILTER)
    def test_write_segment_descriptors_of_ones_own(target):
        return succeeds(
            target,
            'won(in_child(lambda: call("modify_ldt", 17, '
            'ctypes.create_string_buffer(struct.pack("IIII", 0, 0, 0, 0x51)), 16) == 0))',
        )


# -- terminals ---------------------------------------------


@attack(stopped_by=FILTER)
def test_type_into_the_terminal(target):
    """bubblewrap's CVE-2017-5226: TIOCSTI puts a command where the shell will read it."""
    return succeeds(
        target,
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


@attack(stopped_by=FILTER)
def test_load_a_line_discipline(target):
    """n_hdlc (CVE-2017-2636) and n_gsm: TIOCSETD on any terminal loads the module. Here: the one there is."""
    return succeeds(
        target,
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


@attack(stopped_by=INIT)
def test_act_through_a_process_that_is_under_no_filter(target):
    """The runtime's own init would be one: same user, traceable, no filter. Seized, it would run our code."""
    return succeeds(
        target,
        f"""
own = {_own(target)}
won(any(call("ptrace", 0x4206, pid, 0, 0) == 0 for pid in own))  # PTRACE_SEIZE
""",
    )


SERVER = 'int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])'
"""The parent of the shell."""


def _own(target) -> str:
    """Init and server, which should be one; the machine's own init is left alone by the control."""
    return f"[{SERVER}]" if target.control else f"[1, {SERVER}]"


@attack(stopped_by=INIT)
def test_read_the_servers_memory(target):
    return succeeds(
        target,
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


@attack(stopped_by=INIT)
def test_read_the_runtimes_environment_and_configuration(target):
    """Apptainer's init holds its whole configuration there: directories, binds, the service's user."""
    return succeeds(
        target,
        f"""
read = 0
for pid in {_own(target)}:
    try: read += len(open(f"/proc/{{pid}}/environ", "rb").read())
    except OSError: pass
won(read)
""",
    )


@attack(stopped_by=INIT)
def test_take_the_runtimes_program_to_overwrite_it(target):
    """runc's CVE-2019-5736: /proc/PID/exe of the process that came in from outside."""
    return succeeds(
        target,
        f"""
opened = 0
for pid in {_own(target)}:
    try: os.open(f"/proc/{{pid}}/exe", os.O_RDONLY); opened += 1
    except OSError: pass
won(opened)
""",
    )


@attack(stopped_by=INIT)
def test_find_a_descriptor_that_was_left_open(target):
    """runc's CVE-2024-21626: a directory of the machine in /proc/PID/fd of any process."""
    return succeeds(
        target,
        f"""
import glob
found = []
for link in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/cwd"):
    try: found.append(os.readlink(link))
    except OSError: pass
won(any(name.startswith("{target.state}") for name in found))
""",
    )


@attack(stopped_by="a PID namespace")
def test_signal_a_process_of_the_machine(target):
    return succeeds(
        target,
        f"""
try: os.kill({os.getpid()}, 0); alive = open("/proc/{os.getpid()}/comm").read() == {_own_name()!r}
except OSError: alive = False
won(alive)
""",
    )


def _own_name() -> str:
    with open("/proc/self/comm") as file:  # noqa: PTH123
        return file.read()


@attack(stopped_by="no new privileges; no setuid mounts")
def test_gain_rights_by_a_setuid_program(target):
    return succeeds(
        target,
        """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
won(not int(status["NoNewPrivs"]))
""",
    )


@attack(stopped_by="no capabilities; no devices on its mounts")
def test_make_a_device_of_the_machine(target):
    return succeeds(
        target,
        """
import stat
try:
    os.mknod("device", 0o666 | stat.S_IFCHR, os.makedev(1, 9))
    won(len(os.read(os.open("device", os.O_RDONLY), 1)) == 1)
except OSError:
    won(False)
""",
    )


@attack(stopped_by="/proc/sys read-only or not its own")
def test_have_the_kernel_run_a_program_when_something_crashes(target):
    """core_pattern, as uid 0 without capabilities could write it (CVE-2022-0492's way out). Only opened."""
    return succeeds(
        target,
        """
opened = 0
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger"):
    try: os.close(os.open(path, os.O_WRONLY)); opened += 1
    except OSError: pass
won(opened)
""",
    )
