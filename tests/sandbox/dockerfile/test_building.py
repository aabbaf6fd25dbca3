"""Dockerfiles, built without Docker behind walls."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from sandbox import paths, processes
from sandbox.errors import ImageError
from sandbox.images import ImageStore, image_config
from sandbox.images.dockerfile import build, builder, image_name
from sandbox.images.dockerfile.builder import local_name
from tests.helpers.blocking import SyncHostClient, sandbox_of
from tests.helpers.dockerfiles import refused, said, unpacked
from tests.helpers.sandboxes import small_image
from tests.sandbox.test_unprivileged import AS_NOBODY, NOBODY, ROOT, python_for

pytestmark = pytest.mark.apptainer
MARK = "rollout-dockerfile-test"


def test_what_is_copied_lies_where_docker_puts_it(home, context, tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, kind, link in (("in/file", tarfile.REGTYPE, ""), ("in/hard", tarfile.LNKTYPE, "in/file")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"data") if kind == tarfile.REGTYPE else None)
    directory = context(
        "FROM base AS first\n"
        "RUN mkdir -p /made/d && echo 1 > /made/d/one && ln -s one /made/d/two && chmod 600 /made/d/one "
        "&& ln -s /elsewhere /made/out\n"
        "FROM scratch AS skipped\n"
        "RUN this stage is not needed\n"
        "FROM scratch\n"
        "LABEL kept=yes\n"
        "ENV PATH=/opt/bin:$PATH ONE=1\n"
        "COPY a.txt b.txt /texts\n"
        "COPY --chmod=0711 a.txt /renamed\n"
        "COPY dir /contents\n"
        "COPY d*r/x* no*lock /wild/\n"
        "WORKDIR /work/there\n"
        "COPY a.txt .\n"
        "COPY --from=first /made /taken\n"
        "COPY --from=0 /made/d/one /etc/os-release /single/\n"
        "COPY --from=base /etc/debian_version /\n"
        "ADD in.tar.gz /added/\n"
        "COPY in.tar.gz /copied/\n"
        "COPY <<EOF <<'RAW' /docs/\n"
        "$ONE \\$ONE\n"
        "EOF\n"
        "$ONE\n"
        "RAW\n"
        "COPY <<EOF /usr/named\n"
        "text\n"
        "EOF\n"
        "USER joe:users\n"
        'SHELL ["/bin/bash", "-c"]\n',
        **{"a.txt": "a", "b.txt": "b", "dir__x1": "x1", "dir__deep__y": "y"},
    )
    (directory / "in.tar.gz").write_bytes(archive.getvalue())
    (directory / "dir/link").symlink_to("x1")
    printed: list[str] = []
    image = build(directory, output=printed.append)
    assert image == home / "images" / f"{image_name(directory)}.sif"
    root = unpacked(image, tmp_path)
    texts = {
        str(path.relative_to(root)): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix not in (".gz", ".json")
    }
    version = texts.pop("debian_version")
    assert version[0].isdigit() and "NAME" in texts.pop("single/os-release")
    assert texts == {
        "texts/a.txt": "a",
        "texts/b.txt": "b",
        "renamed": "a",
        "contents/x1": "x1",
        "contents/deep/y": "y",
        "wild/x1": "x1",
        "work/there/a.txt": "a",
        "taken/d/one": "1\n",
        "single/one": "1\n",
        "added/in/file": "data",
        "added/in/hard": "data",
        "docs/EOF": "1 $ONE\n",
        "docs/RAW": "$ONE\n",
        "usr/named": "text\n",
    }
    assert (root / "renamed").stat().st_mode & 0o7777 == 0o711
    assert (root / "taken/d/one").stat().st_mode & 0o7777 == 0o600
    assert (root / "added/in/hard").stat().st_nlink == 2
    links = {name: str((root / name).readlink()) for name in ("contents/link", "taken/d/two", "taken/out")}
    assert links == {"contents/link": "x1", "taken/d/two": "one", "taken/out": "/elsewhere"}
    assert (root / "copied/in.tar.gz").read_bytes() == archive.getvalue()
    config = image_config(image)
    assert config == image_config(root)
    cut = tmp_path / "cut.sif"
    cut.write_bytes(image.read_bytes()[:-16] + b"\xff" * 8 + image.read_bytes()[-8:])
    assert image_config(cut).workdir == "/"
    assert config.env["ONE"] == "1" and config.env["PATH"].startswith("/opt/bin:/usr")
    assert (config.workdir, config.user, config.shell) == ("/work/there", "joe:users", ("/bin/bash", "-c"))
    assert config.labels == {"kept": "yes"}
    begun = time.monotonic()
    assert build(directory, output=printed.append) == image
    assert "built of the same already" in printed[-1]
    assert time.monotonic() - begun < 1.5  # 45 ms; see benchmarks/harbor.py


def test_a_sandbox_starts_from_what_was_built_and_has_what_it_declares(home, context, state):
    small_image(home / "images/small", paths.sandbox_user() or os.getuid())
    directory = context(
        "FROM small\nENV GREETING='hello  there' PATH=/opt/own:$PATH\nWORKDIR /app\n"
        "COPY --chmod=755 hi /opt/own/hi\nRUN touch made\n",
        hi="#!/bin/sh\necho $GREETING\n",
    )
    build(directory, "mine")
    with sandbox_of(SyncHostClient(state), runtime="apptainer", image="mine") as (_, client):
        result = client.bash('echo "$GREETING"; hi; echo /app/*; touch /app/x && echo /app/*')
    assert result.output.splitlines() == ["hello  there", "hello there", "/app/made", "/app/made /app/x"]


def test_installers_find_a_root_that_may_do_all_they_ask(home, context, tmp_path):
    package = tmp_path / "package"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "usr/share/own").mkdir(parents=True)
    (package / "usr/share/own/file").write_text("from the package\n")
    (package / "DEBIAN/control").write_text(
        "Package: own\nVersion: 1\nArchitecture: all\nMaintainer: x <x@localhost>\nDescription: x\n"
    )
    script = package / "DEBIAN/postinst"
    script.write_text(
        "#!/bin/sh\nset -e\nadduser --system --quiet own || useradd -r own\nchown own /usr/share/own\n"
    )
    script.chmod(0o755)
    wheel = tmp_path / "own-1-py3-none-any.whl"
    about = "own-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("own.py", "VALUE = 42")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    directory = context(
        "FROM base\n"
        "COPY own.deb *.whl /tmp/\n"
        "RUN apt-get install -y --no-install-recommends /tmp/own.deb && dpkg -s own | grep ok && id own\n"
        "RUN useradd -m -s /bin/bash joe && chown -R joe:joe /home/joe && install -d -o joe -g joe /srv/joe\n"
        "USER joe\n"
        "RUN echo home $HOME && python3 -c 'import os; os.setgroups([1]); os.setresuid(7, 7, 7)'\n"
        "RUN pip install --no-index --find-links /tmp --break-system-packages own && python3 -c "
        "'import own; print(own.VALUE)' && rm -rf /usr/share/doc /tmp/* && test ! -e /usr/share/doc\n"
        "RUN --mount=type=cache,target=/root/.cache touch /root/.cache/x\n"
        "RUN test -d /root/.cache -a ! -e /root/.cache/x -a ! -e /usr/share/doc && echo gone\n"
        "RUN <<EOF\n#!/usr/bin/python3\nprint('a ' + 'script')\nEOF\n"
    )
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Zgzip", "-b", package, directory / "own.deb"], check=True
    )
    shutil.copy(wheel, directory)
    printed = said(directory)
    for line in ("Status: install ok installed", "home /home/joe", "42", "gone", "a script"):
        assert line in printed
    assert any(line.startswith("uid=") and "(own)" in line for line in printed)


ATTACKS = r"""
import ctypes, errno, os, signal, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    print(name, libc.syscall(*arguments), errno.errorcode.get(ctypes.get_errno(), ""))
print("pids", sorted(int(p) for p in os.listdir("/proc") if p.isdigit())[:1], os.getppid() < 100)
call("mount", 165, b"none", b"/mnt", b"tmpfs", 0, 0)
call("unshare-user", 272, 0x10000000)
call("unshare-net", 272, 0x40000000)
call("keyctl", 250, 1, 0)
call("bpf", 321, 0, 0, 0)
call("open_by_handle_at", 304, 3, 0, 0)
call("chown", 92, b"/etc/passwd", 5, 5)
call("setuid", 105, 1000)
call("ptrace", 101, 16, os.getppid() + 100000, 0, 0)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
    try:
        open(path, "w").write("x")
        print("WROTE", path)
    except OSError as error:
        print("kept", path)
print("interfaces", [name for _, name in socket.if_nameindex()])
print("outside", os.path.exists(MARK), os.listdir("/home"))
print("mounts", sum("upper" in line and "lowerdir" not in line for line in open("/proc/self/mounts")))
print("blocks", [name for name in os.listdir("/dev") if name.startswith(("sd", "vd", "mem", "kmsg", "fuse"))])
with open("/proc/1/environ", "rb") as file:
    print("secret", b"ROLLOUT_SECRET" in file.read() or "ROLLOUT_SECRET" in os.environ)
"""


def test_a_run_reaches_nothing_outside_and_has_no_rights_there(home, context, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SECRET", "x")
    secret = tmp_path / "secret"
    secret.write_text("x")
    printed = said(
        context(
            "FROM base\nCOPY attack.py /\nRUN python3 /attack.py\n",
            **{"attack.py": f"MARK = {str(secret)!r}\n{ATTACKS}"},
        )
    )
    answers = printed[[line.startswith("pids") for line in printed].index(True) :]
    assert answers[0] == "pids [1] True"
    for name in ("mount", "unshare-user", "unshare-net", "keyctl", "bpf", "open_by_handle_at"):
        assert f"{name} -1 EPERM" in answers
    assert {"chown 0 ", "setuid 0 "} <= {line + " " * (line[-1] == "0") for line in answers}
    assert "ptrace -1 ESRCH" in answers
    assert not [line for line in answers if line.startswith("WROTE")]
    assert "interfaces ['lo']" in answers
    assert "outside False []" in answers
    assert "blocks []" in answers
    assert "secret False" in answers


def users_processes() -> list[int]:
    return [pid for pid in processes.all_pids() if MARK.encode() in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("line", "limit", "why"),
    [
        ("head -c 400M /dev/zero > /big", ("DISK_MB", "64"), "File too large|limit of 64 disk_mb"),
        (
            "for i in 1 2 3 4; do head -c 30M /dev/zero > /dev/shm/$i; done; sleep 60",
            ("DISK_MB", "64"),
            "disk_mb",
        ),
        ("i=0; mkdir /d; while :; do i=$((i+1)); : > /d/$i; done", ("FILES", "500"), "limit of 500 files"),
        ("python3 -c 'x = bytearray(900 << 20)'", ("MEMORY_MB", "256"), "MemoryError|limit of 256 memory_mb"),
        (
            "python3 -c 'import os; f = os.memfd_create(\"\"); [os.write(f, bytes(9**7)) for _ in [0] * 99]'",
            ("MEMORY_MB", "256"),
            "limit of 256 memory_mb",
        ),
        (
            "python3 -c 'import os, signal; [os.fork() or signal.pause() for _ in range(99)]'",
            ("PROCESSES", "60"),
            "BlockingIOError|limit of 60 processes",
        ),
    ],
)
def test_a_run_is_held_to_the_limits_of_a_sandbox(home, context, monkeypatch, line, limit, why):
    monkeypatch.setenv(f"ROLLOUT_SANDBOX_{limit[0]}", limit[1])
    begun = time.monotonic()
    message = refused(context(f"FROM base\nRUN : {MARK}; {line}\n"), timeout=40)
    assert re.search(why, message) and message.startswith("Dockerfile:2: ")
    assert time.monotonic() - begun < 30
    assert not users_processes()
    assert not [*(home / "cache").glob(".*.unpacking")]


def test_a_run_that_sleeps_for_ever_ends_with_the_time_and_leaves_nothing(home, context):
    message = refused(context(f"FROM base\nRUN setsid sh -c ': {MARK}; sleep 900' & sleep 900\n"), timeout=2)
    assert "the build took longer than 2 s" in message
    assert not users_processes()
    assert not [*(home / "cache").glob(".*.unpacking")]


def test_no_link_of_an_image_has_anything_made_or_mounted_outside(home, context):
    outside = home / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    image = small_image(home / "images/linked", paths.sandbox_user() or os.getuid())
    for name in ("dev", "proc"):
        (image / name).symlink_to(f"/oldroot{outside}")
    (image / "cache").symlink_to(f"/oldroot{outside}")
    directory = context(
        "FROM linked\n"
        "RUN --mount=type=cache,target=/cache/made touch /cache/made/x && ls -d /proc/self /dev/null\n"
        "WORKDIR /cache/work\n"
        "COPY Dockerfile /cache/copied\n"
    )
    said(directory)
    assert not [*outside.iterdir()]


def test_what_a_run_leaves_running_ends_with_it(home, context):
    begun = time.monotonic()
    said(context(f"FROM base\nRUN nohup setsid sh -c ': {MARK}; sleep 900' > /dev/null 2>&1 & sleep 0.2\n"))
    assert time.monotonic() - begun < 20
    assert not users_processes()


def test_a_build_that_is_cancelled_ends_at_once(home, context):
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    begun = time.monotonic()
    message = refused(context(f"FROM base\nRUN : {MARK}; sleep 900\n"), cancelled=stop.is_set)
    assert "cancelled" in message and time.monotonic() - begun < 10
    assert not users_processes()


def test_a_killed_build_leaves_nothing_that_is_taken_for_whole(home, context):
    directory = context(f"FROM base\nRUN touch /half; : {MARK}; sleep 2; echo whole\n")
    command = [
        sys.executable,
        "-c",
        f"import pathlib, sandbox.images.dockerfile as d\nd.build(pathlib.Path({str(directory)!r}))",
    ]
    process = subprocess.Popen(command, cwd=ROOT)
    deadline = time.monotonic() + 60
    while not users_processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert users_processes()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while users_processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not users_processes()
    (directory / "Dockerfile").write_text(f"FROM base\nRUN touch /half; : {MARK}; sleep 2; echo whole\n")
    assert "whole" in said(directory)
    assert not [*(home / "cache").glob(".*.unpacking")]


def test_a_layer_is_built_once_for_all_who_want_it_and_anew_when_asked(home, context):
    directory = context("FROM base\nRUN head -c 8 /dev/urandom | od -An -tx8; sleep 1\n")
    results: list[list[str]] = []
    (directory / "Dockerfile").open("a").write("\nRUN exit 77\n")

    def go(**options: object) -> None:
        printed: list[str] = []
        refused(directory, output=printed.append, **options)
        results.append([line for line in printed if len(line.strip()) == 16 and " " not in line.strip()])

    threads = [threading.Thread(target=go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, results)) == [0, 0, 1]
    go()
    assert results.pop() == []
    go(force=True)
    assert len(results.pop()) == 1


def test_layers_count_against_the_quota_and_the_least_recently_used_goes(home, context):
    directory = context("FROM base\nRUN head -c 3M /dev/urandom > /a\n")
    said(directory)
    store = ImageStore()
    (layer,) = [
        entry
        for entry in store.cache.entries()
        if (entry.source or "").endswith("Dockerfile:2") and 3 << 20 < entry.bytes < 4 << 20
    ]
    assert layer.in_use is None and layer.tree.stat().st_mode & 0o7 == 0
    small = ImageStore(quota=sum(entry.bytes for entry in store.cache.entries()) - 1)
    assert small.cache.prune()
    assert sum(entry.bytes for entry in store.cache.entries()) <= small.cache.quota


def test_an_absent_image_is_named_with_what_to_do(home, context):
    message = refused(context("FROM scratch AS a\nCOPY --from=ghcr.io/no/such:1 /x /\nFROM a\n"))
    assert message.startswith("Dockerfile:2: ")
    assert "rollout images build ghcr.io-no-such-1 docker://ghcr.io/no/such:1" in message
    assert "docker save" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have files of two users")
def test_an_image_that_a_build_fetches_takes_no_other_ones_name(home, context, monkeypatch):
    fetched = []

    def fetch(name: str, source: str, **_: object) -> Path:
        fetched.append((name, source))
        raise ImageError("no registry here")

    monkeypatch.setattr(builder.building, "build", fetch)
    references = ("acme/tools-of:1", "acme-tools/of:1")
    for reference in references:
        assert refused(context(f"FROM {reference}\n"), network=True) == "no registry here"
    assert [source for _, source in fetched] == [f"docker://{reference}" for reference in references]
    names = [name for name, _ in fetched]
    assert len({*names}) == 2 and all(name.startswith("acme-tools-of-1-") for name in names)
    assert len({*map(local_name, references)}) == 1
    (home / "images" / names[0]).symlink_to(home / "images/base")
    try:
        made = context("FROM acme/tools-of:1\nRUN cat /etc/debian_version\n")
        assert any("[1/2] Dockerfile:2" in line for line in said(made)), "found again, without a network"
    finally:
        (home / "images" / names[0]).unlink()


def test_a_directory_of_another_user_is_not_built_upon(home, context):
    small_image(home / "images/others", 0)
    assert "rollout images build NAME" in refused(context("FROM others\nRUN touch /x\n"))


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a plain user already")
def test_builds_run_as_the_sandboxes_user_and_never_as_root(home, context, monkeypatch):
    seen: list[int] = []

    def look(line: str) -> None:
        seen.extend(Path(f"/proc/{pid}").stat().st_uid for pid in users_processes())

    directory = context(f"FROM base\nRUN : {MARK}; echo now; sleep 900\n")
    refused(directory, output=look, cancelled=lambda: bool(seen))
    assert seen and set(seen) == {paths.sandbox_user()}
    monkeypatch.setenv("ROLLOUT_SANDBOX_UID", "0")
    assert "not built as root" in refused(context("FROM base\nRUN x\n"))


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a plain user already")
def test_a_plain_user_builds_as_well(home):
    own = Path(tempfile.mkdtemp(prefix="dkrn-", dir="/tmp"))
    try:
        for name in ("images", "context", "tmp"):
            (own / name).mkdir()
        small_image(own / "images/small", NOBODY)
        (own / "context/Dockerfile").write_text(
            "FROM small AS all\nRUN id -u; touch /x; chown 5:5 /x; echo 'Uid:' $(ls -ln /x)\n"
            "FROM scratch\nCOPY --from=all /x /usr/x\n"
        )
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", own], check=True)
        environment = {
            "PATH": paths.tool_path(),
            "HOME": str(own),
            "TMPDIR": str(own / "tmp"),
            "ROLLOUT_IMAGES": str(own / "images"),
            "ROLLOUT_IMAGE_CACHE": str(own / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        python = python_for(environment)
        if python is None:
            pytest.skip("no interpreter that another user may run")
        script = (
            "import sys\nfrom pathlib import Path\nfrom sandbox.images.dockerfile import build\n"
            f"print(build(Path({str(own / 'context')!r}), 'mine', output=print))"
        )
        done = subprocess.run([python, "-c", script], env=environment, text=True, **AS_NOBODY)
        assert done.returncode == 0, done.stderr
        assert "\n0\n" in done.stdout and "Uid: -rw-r--r-- 1 0 0" in done.stdout
        assert (own / "images/mine.sif").stat().st_uid == NOBODY
    finally:
        shutil.rmtree(own, ignore_errors=True)
