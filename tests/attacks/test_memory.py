"""Memory beyond the limit, hidden from whoever counts it: the node falls short, and another is blamed."""

from __future__ import annotations

from collections.abc import Callable

from tests.attacks.calls import scripted

MEMORY_MB = 80
HOST_SETTINGS = {"ROLLOUT_SANDBOX_MEMORY_MB": str(MEMORY_MB)}
HELD_S = 14
"""How long it must be kept to count as unnoticed; the watchdog counts all every five seconds."""
FILTER = "the filter of system calls"
COUNTED = "counted by the watchdog"


def kept(stopped_by: str, hide: str) -> Callable:
    """An attack that holds twice the memory allowed, hidden by a script, longer than the watchdog takes."""

    def script(target) -> str:
        seconds = 0 if target.control else HELD_S
        prelude = f"SIZE, MIB, CONTROL = {2 * MEMORY_MB << 20}, 1 << 20, {target.control}\n"
        return prelude + hide + f"\ntime.sleep({seconds})\ndone()\nwon(True)\n"

    return scripted(stopped_by, script)


test_hold_memory_in_a_file_system_of_a_nested_namespace = scripted(
    "no more namespaces, no mount",
    """
def hides():
    if call("unshare", 0x10020000) != 0: return False
    os.makedirs("place", exist_ok=True)
    if call("mount", b"none", b"place", b"tmpfs", 0, b"size=8m") != 0: return False
    return open("place/x", "wb").write(bytes(4 << 20)) > 0
won(in_child(hides))
""",
)

# /run and / of bubblewrap were a tmpfs without a size, /dev of Apptainer one of a gigabyte.
test_hold_memory_in_the_file_systems_of_the_container = kept(
    "tmpfs read-only (bubblewrap) or counted (Apptainer)",
    """
left, files = SIZE, set()
for line in open("/proc/self/mountinfo"):
    place, kind = line.split()[4], line.partition(" - ")[2].split()[0]
    if kind not in ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"): continue
    if os.path.isdir(place): path = f"{place}/held-{os.getpid()}"
    elif place.startswith("/etc/"): path = place
    else: continue
    if CONTROL and place != "/dev/shm": continue  # the control stays where anybody may write
    try:
        with open(path, "ab") as file:
            files.add(path)
            while left > 0: left -= file.write(bytes(MIB))
    except OSError: pass
def done():
    for path in files: os.path.dirname(path) == "/etc" or os.unlink(path)
if left > 0: print("LOST"); done(); sys.exit()
""",
)

# A file without content takes a kilobyte of the kernel's; a tmpfs of 1 MB may have millions.
test_hold_memory_in_empty_files = kept(
    "tmpfs read-only (bubblewrap) or counted (Apptainer)",
    """
place = "/dev/shm" if CONTROL else "/dev"
directory = f"{place}/held-{os.getpid()}"
def done():
    import shutil
    shutil.rmtree(directory, ignore_errors=True)
try:
    os.mkdir(directory)
    for number in range(SIZE // 1000): os.close(os.open(f"{directory}/{number}", os.O_CREAT | os.O_WRONLY))
except OSError:
    print("LOST"); done(); sys.exit()
""",
)

# Shared memory stays when its pages are dropped from the process; resident size and PSS are zero.
test_hold_memory_that_is_mapped_no_more = kept(
    COUNTED,
    """
held = mmap.mmap(-1, SIZE)
for start in range(0, SIZE, MIB):
    held[start:start + MIB] = b"x" * MIB
    held.madvise(mmap.MADV_DONTNEED, start, MIB)
done = held.close
""",
)

test_hold_memory_in_a_file_without_a_name_that_is_only_mapped = kept(
    COUNTED,
    """
fd = os.memfd_create("held")
for _ in range(SIZE // MIB): os.write(fd, b"x" * MIB)
held = mmap.mmap(fd, 4096)
os.close(fd)
done = held.close
""",
)

# A page that was only read is nobody's, but each two megabytes of addresses read take a table.
test_hold_memory_in_page_tables = kept(
    COUNTED,
    """
STEP = 2 << 20
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 4 * [ctypes.c_int]
tables = SIZE // 4096
NORESERVE, PRIVATE, ANONYMOUS = 0x4000, 2, 0x20
held = libc.mmap(None, tables * STEP, mmap.PROT_READ, NORESERVE | PRIVATE | ANONYMOUS, -1, 0)
if held in (None, 2**64 - 1): print("LOST"); sys.exit()
libc.madvise(ctypes.c_void_p(held), ctypes.c_size_t(tables * STEP), 15)  # MADV_NOHUGEPAGE
for place in range(held, held + tables * STEP, STEP): ctypes.c_char.from_address(place).value
size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmPTE")) << 10
if size < SIZE: print("LOST"); sys.exit()
done = lambda: None
""",
)

test_hold_memory_in_a_segment_that_nobody_has_attached = kept(
    "segments of at most 64 KiB (the filter)",
    """
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
segment = call("shmget", 0, SIZE, 0o1600)
if segment < 0: print("LOST"); sys.exit()
address = libc.shmat(segment, None, 0)
ctypes.memset(address, 1, SIZE)
libc.shmdt(ctypes.c_void_p(address))
done = lambda: call("shmctl", segment, 0, 0)
""",
)

test_hold_memory_in_messages = scripted(
    FILTER,
    """
queue = call("msgget", 0, 0o1600)
won(queue >= 0)
libc.msgctl(queue, 0, None)
""",
)

# 32,000 sets of 32,000: 64 GB of the kernel's memory.
test_hold_memory_in_semaphores = scripted(
    "sets of at most 32 (the filter)",
    """
semaphores = call("semget", 0, 30000, 0o1600)
won(semaphores >= 0)
call("semctl", semaphores, 0, 0, 0)
""",
)

test_hold_memory_that_not_even_the_kernel_shows = scripted(
    "memfd_secret answers ENOSYS",
    """
fd = call("memfd_secret", 0)
won(fd >= 0)
""",
)
