"""The cache of unpacked images: real squashfs files, real processes, real signals."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import paths
from sandbox.errors import ImageError
from sandbox.images import ImageStore, cache

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534
MB = 10**6
PATIENCE_S = 120  # how long a test waits for another process; a busy machine needs a part of it

for program in ("mksquashfs", "unsquashfs"):
    if shutil.which(program, path=paths.tool_path()) is None:
        pytest.skip(f"{program} is missing: run deploy/setup/apptainer.sh", allow_module_level=True)


def make_image(directory: Path, name: str, megabytes: int = 1, mode: int = 0o755) -> Path:
    """A squashfs image that takes a little more than `megabytes` unpacked, in a directory of that mode."""
    tree = directory / f"{name}-tree"
    (tree / "usr/data").mkdir(parents=True)
    (tree / "usr/data/name").write_text(name)
    for number in range(megabytes):
        (tree / f"usr/data/{number}").write_bytes(os.urandom(MB))
    (tree / "usr/data").chmod(mode)
    image = directory / f"{name}.sif"
    mksquashfs = shutil.which("mksquashfs", path=paths.tool_path())
    # One processor, so that all images are of a size.
    options = ["-quiet", "-no-progress", "-all-root", "-noD", "-processors", "1"]
    subprocess.run([mksquashfs, tree, image, *options], check=True, capture_output=True)
    (tree / "usr/data").chmod(0o755)
    shutil.rmtree(tree)
    return image


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> dict[str, str]:
    """Three images of 1 MB, by name."""
    directory = tmp_path_factory.mktemp("images")
    return {name: str(make_image(directory, name)) for name in "abc"}


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """With room for two of them."""
    return ImageStore(tmp_path / "cache", quota=int(2.5 * MB))


def command(code: str, *arguments: object) -> list[str]:
    """Python code in which `store` is an ImageStore in arguments[0], with a quota of 2.5 MB."""
    head = (
        "import sys; from pathlib import Path; from sandbox.images import ImageStore, cache\n"
        "store = ImageStore(Path(sys.argv[1]), quota=2_500_000)\n"
    )
    return [sys.executable, "-c", head + code, *map(str, arguments)]


def python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """Another process that runs `command`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    return subprocess.Popen(command(code, *arguments), **pipes | options)


HOLD = """
lease = store.hold(store.rootfs(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
lease.release()
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def slow_unsquashfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The real unsquashfs behind a gate: unpacking leaves half a tree, says so in the FIFO `started`, and
    goes on when somebody has written to the FIFO `gate`. Gives the directory of both.
    """
    real = shutil.which("unsquashfs", path=paths.tool_path())
    directory = tmp_path / "slow"
    directory.mkdir()
    os.mkfifo(directory / "gate")
    os.mkfifo(directory / "started")
    script = directory / "unsquashfs"
    script.write_text(
        f"""#!/bin/sh
if [ "$1" != -ll ]; then
    for target do [ "$last" = -d ] && break; last="$target"; done
    mkdir -p "$target/usr"
    echo half >"$target/usr/half"
    echo once >>{directory}/log
    echo started >{directory}/started
    read go <{directory}/gate
fi
exec {real} "$@"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    yield directory


# -- eviction ----------------------------------------------------------------------------------


def test_the_least_recently_used_image_makes_room(store, images):
    a, b = store.rootfs(images["a"]), store.rootfs(images["b"])
    store.rootfs(images["a"])
    c = store.rootfs(images["c"])
    assert (a.is_dir(), b.is_dir(), c.is_dir()) == (True, False, True)
    assert store.rootfs(images["b"]).is_dir()
    assert (a.is_dir(), c.is_dir()) == (False, True)
    assert (c / "usr/data/name").read_text() == "c"


def test_releasing_an_image_counts_as_its_last_use(store, images):
    a, b = store.rootfs(images["a"]), store.rootfs(images["b"])
    with store.hold(a):
        store.rootfs(images["b"])
    store.rootfs(images["c"])
    assert (a.is_dir(), b.is_dir()) == (True, False)


def test_an_image_in_use_stays_even_when_nothing_else_can_go(store, images):
    held = [store.hold(store.rootfs(images[name])) for name in "aab"]
    with pytest.raises(
        ImageError, match=r"quota .* is 2\.5 MB, .* 2\.0 MB are in use.*ROLLOUT_IMAGE_CACHE_GB"
    ):
        store.rootfs(images["c"])
    assert [cached.in_use for cached in store.cache.entries()] == ["in use", "in use"]
    assert store.cache.prune(everything=True) == []
    held[0].release()
    held[0].release()  # again: it counts once, and the second lease on the image still holds
    assert store.cache.prune(everything=True) == []
    held[1].release()
    assert [cached.source for cached in store.cache.prune(everything=True)] == [images["a"]]
    assert store.rootfs(images["c"]).is_dir()


def test_an_image_that_another_process_uses_stays(store, images):
    holder = python(HOLD, store.cache.directory, images["a"])
    assert holder.stdout.readline() == "held\n"
    assert store.cache.prune(everything=True) == []
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    assert len(store.cache.prune(everything=True)) == 1  # although the process still runs
    holder.communicate("\n", timeout=PATIENCE_S)


def test_the_images_of_a_killed_host_stay_until_its_sandboxes_are_adopted_or_a_while_has_passed(
    store, images, monkeypatch
):
    holder = python(HOLD, store.cache.directory, images["a"])
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate(timeout=PATIENCE_S)
    assert store.cache.prune(everything=True) == []
    (cached,) = store.cache.entries()
    assert "killed" in cached.in_use
    monkeypatch.setattr(cache, "ORPHAN_GRACE_S", 0)
    adopted = store.hold(cached.tree)
    assert store.cache.prune(everything=True) == []
    adopted.release()
    assert len(store.cache.prune(everything=True)) == 1


def test_an_image_evicted_before_it_is_held_is_unpacked_again(store, images):
    a = store.rootfs(images["a"])
    store.cache.prune(everything=True)
    assert not a.exists()
    with store.hold(a / "usr"):  # a path within it serves as well
        assert (a / "usr/data/name").read_text() == "a"
    second = ImageStore(store.cache.directory, store.cache.quota)
    store.cache.prune(everything=True)
    with pytest.raises(ImageError, match="not in the image cache any more"):
        second.hold(a)


def test_a_directory_image_is_neither_copied_nor_evicted(store, tmp_path):
    own = tmp_path / "own"
    (own / "usr").mkdir(parents=True)
    assert store.rootfs(str(own)) == own
    with store.hold(own):
        assert store.cache.prune(everything=True) == []
    assert own.is_dir()


def test_pruning_stops_at_the_quota_and_a_dry_run_removes_nothing(images, tmp_path):
    large = ImageStore(tmp_path / "cache", quota=10 * MB)
    trees = [large.rootfs(images[name]) for name in "abc"]
    small = ImageStore(tmp_path / "cache", quota=int(2.5 * MB))
    assert [cached.tree for cached in small.cache.prune(dry_run=True)] == trees[:1]
    assert all(tree.is_dir() for tree in trees)
    assert [cached.tree for cached in small.cache.prune()] == trees[:1]
    assert [tree.is_dir() for tree in trees] == [False, True, True]
    assert small.cache.prune() == []


@pytest.mark.parametrize("notes", [None, "{", '{"bytes": "many"}'])
def test_an_image_whose_notes_were_lost_is_measured_and_counts(store, images, notes):
    a = store.rootfs(images["a"])
    file = a.with_name(f"{a.name}.json")
    file.unlink()
    if notes is not None:
        file.write_text(notes)
    (entry,) = store.cache.entries()
    assert MB <= entry.bytes < 1.2 * MB and cache.read_json(file)["bytes"] == entry.bytes
    store.rootfs(images["b"])
    store.rootfs(images["c"])
    assert not a.is_dir()


def test_pruning_clears_away_lock_files_of_images_that_are_gone(store, images):
    store.rootfs(images["a"])
    store.cache.prune(everything=True)
    store.cache.prune()
    names = sorted(path.name for path in store.cache.directory.iterdir())
    assert names == [".guard", "hashes.json", "quota.lock"]


def test_an_image_larger_than_the_quota_is_refused_without_emptying_the_cache(store, images, tmp_path):
    a = store.rootfs(images["a"])
    with pytest.raises(ImageError, match="ROLLOUT_IMAGE_CACHE_GB"):
        store.rootfs(str(make_image(tmp_path, "large", megabytes=3)))
    assert a.is_dir()


@pytest.mark.parametrize("value", ["many", "0", "-1", "nan", "inf"])
def test_a_quota_that_makes_no_sense_is_named(monkeypatch, value):
    monkeypatch.setenv("ROLLOUT_IMAGE_CACHE_GB", value)
    with pytest.raises(ImageError, match="ROLLOUT_IMAGE_CACHE_GB='?" + value):
        cache.default_quota()


def test_the_quota_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ROLLOUT_IMAGE_CACHE_GB", "0.5")
    assert cache.default_quota() == 500 * MB


# -- processes ---------------------------------------------------------------------------------


def test_two_processes_that_need_an_image_first_unpack_it_once(store, images, slow_unsquashfs):
    ask = 'print("asking", flush=True); print(store.rootfs(sys.argv[2]), flush=True)'
    both = [python(ask, store.cache.directory, images["a"]) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["asking\n"] * 2
    assert (slow_unsquashfs / "started").read_text() == "started\n"
    (slow_unsquashfs / "gate").write_text("go\n")
    given = [process.communicate(timeout=PATIENCE_S)[0].strip() for process in both]
    assert given[0] == given[1]
    assert (Path(given[0]) / "usr/data/name").read_text() == "a"
    assert (slow_unsquashfs / "log").read_text() == "once\n"


def test_what_a_process_killed_while_unpacking_left_is_replaced(store, images, slow_unsquashfs, monkeypatch):
    victim = python("store.rootfs(sys.argv[2])", store.cache.directory, images["a"])
    assert (slow_unsquashfs / "started").read_text() == "started\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=PATIENCE_S)
    (half,) = store.cache.directory.glob(".*.unpacking")
    assert (half / "usr/half").exists()
    # Its unsquashfs still runs and keeps the lock; nobody else may write there until it has ended.
    assert store.cache.prune(everything=True) == []
    assert half.is_dir()
    (slow_unsquashfs / "gate").write_text("go\n")
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(":")[2])
    tree = store.rootfs(images["a"])
    assert sorted(path.name for path in (tree / "usr").iterdir()) == ["data"]
    assert not half.exists()


def test_pruning_removes_what_a_process_killed_while_unpacking_left(store, images):
    store.cache.make()
    half = store.cache.directory / f".{'0' * 20}.unpacking"
    (half / "usr").mkdir(parents=True)
    store.rootfs(images["a"])  # whoever unpacks does it too
    assert not half.exists()
    (half / "usr").mkdir(parents=True)
    store.cache.prune()
    assert not half.exists()


# -- disk --------------------------------------------------------------------------------------


def test_too_little_space_is_said_before_anything_is_written(images, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    code = (
        "from sandbox.errors import ImageError\n"
        "try: store.rootfs(sys.argv[2])\n"
        "except ImageError as error: print(error)\n"
        "print(sorted(path.name for path in Path(sys.argv[1]).iterdir() if path.is_dir()))\n"
    )
    # A disk of 500 kB, in namespaces of its own.
    mounted = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=500k none "$0" && exec "$@"', small]
    done = subprocess.run(
        [*mounted, *command(code, small, images["a"])],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "needs 1.0 MB, but only 0.5 MB are free" in done.stdout, done.stdout + done.stderr
    assert "ROLLOUT_IMAGE_CACHE" in done.stdout
    assert done.stdout.endswith("\n[]\n")


def test_a_damaged_image_leaves_nothing_in_the_cache(store, images, tmp_path):
    content = bytearray(Path(images["a"]).read_bytes())
    content[200 : MB // 2] = bytes(MB // 2 - 200)
    damaged = tmp_path / "damaged.sif"
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageError, match=r"damaged\.sif"):
        store.rootfs(str(damaged))
    assert [path for path in store.cache.directory.iterdir() if path.is_dir()] == []


def test_a_plain_user_can_evict_a_tree_with_read_only_directories():
    directory = Path(tempfile.mkdtemp(prefix="imgc-", dir="/tmp"))
    try:
        image = make_image(directory, "closed", mode=0o555)
        code = (
            "tree = store.rootfs(sys.argv[2])\n"
            "assert oct((tree / 'usr/data').stat().st_mode & 0o777) == '0o555'\n"
            "assert len(store.cache.prune(everything=True)) == 1\n"
            "print(tree.exists(), [p.name for p in Path(sys.argv[1]).iterdir() if p.is_dir()])\n"
        )
        options: dict = {"cwd": "/", "env": {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}}
        if os.geteuid() == 0:
            directory.chmod(0o755)
            options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            cache_directory = directory / "cache"
            cache_directory.mkdir()
            os.chown(cache_directory, NOBODY, NOBODY)
            # Root's own environment may lie where others may not look.
            interpreter = shutil.which("python3", path="/usr/bin") or sys.executable
            options["executable"] = interpreter
        process = python(code, directory / "cache", image, stderr=subprocess.PIPE, **options)
        output, error = process.communicate(timeout=PATIENCE_S)
        assert output == "False []\n", error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands trees over")
@pytest.mark.may_skip
def test_root_hands_the_tree_to_the_user_of_the_sandboxes(store, images):
    tree = store.rootfs(images["a"], owner=NOBODY)
    assert (tree / "usr/data/name").stat().st_uid == NOBODY
    assert store.rootfs(images["a"]) != tree
    assert stat.S_IMODE(tree.stat().st_mode) == 0o755


def test_a_changed_image_file_is_hashed_anew_and_an_unchanged_one_is_not_read(store, images, tmp_path):
    image = Path(shutil.copy(images["a"], tmp_path / "image.sif"))
    first = store.content_hash(image)
    memory = store.cache.directory / "hashes.json"
    memory.write_text(memory.read_text().replace(first, "0" * 20))
    assert ImageStore(store.cache.directory).content_hash(image) == "0" * 20
    shutil.copy(images["b"], image)
    assert ImageStore(store.cache.directory).content_hash(image) not in (first, "0" * 20)


# -- systemd-tmpfiles --------------------------------------------------------------------


def clears(directory: Path) -> bool:
    """Whether `systemd-tmpfiles` would go into the directory: only with this lock does it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_the_system_does_not_clear_a_cache_while_somebody_uses_it(store, images):
    store.cache.make()
    assert not clears(store.cache.directory)
    store.cache.guard()  # again, as a host does every now and then
    assert not clears(store.cache.directory)


def test_what_lay_unguarded_for_long_may_lack_files_and_is_unpacked_again(store, images):
    tree = store.rootfs(images["a"])
    (tree / "usr/data/name").unlink()
    mark = store.cache.directory / ".guard"
    for days, whole in ((8, False), (10, True)):
        long_ago = time.time() - days * 86400
        os.utime(mark, (long_ago, long_ago))
        again = ImageStore(store.cache.directory, store.cache.quota)
        assert (again.rootfs(images["a"]) / "usr/data/name").exists() == whole
        assert mark.stat().st_mtime > time.time() - 60
