"""Files and directories between this machine and a real container, and archives that mean harm."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from sandbox import transfer
from sandbox.client import SandboxClient
from sandbox.connection import new_key
from sandbox.errors import SandboxError, SandboxRequestError
from sandbox.server import archive
from tests.helpers.blocking import SyncSandboxClient
from tests.helpers.sandboxes import server_modules
from tests.sandbox.conftest import run, sandbox_on

GIB = 1 << 30


info = sandbox_on("apptainer")


@pytest.fixture
def box(info):
    with SyncSandboxClient(info.socket) as client:
        client.bash("cd /workspace && rm -rf /workspace/* /workspace/.[!.]* /tmp/*")
        yield client


@pytest.fixture
def server_files():
    """The server's module, here."""
    with server_modules("files") as (module,):
        yield module


@pytest.fixture
def tree(tmp_path):
    """A local directory with a bit of everything."""
    root = tmp_path / "tree"
    (root / "deep/er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "run.sh").chmod(0o755)
    (root / "deep/er/big.bin").write_bytes(os.urandom(3 * archive.PIECE_BYTES + 17))
    (root / ("long" * 40)).write_text("name")
    (root / "ünï\udcff").write_bytes(b"odd name")
    (root / "deep/link").symlink_to("../run.sh")
    (root / "hole").write_bytes(b"")
    return root


def content(root: Path) -> dict[str, object]:
    return {
        str(path.relative_to(root)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(root.rglob("*"))
    }


def test_a_directory_survives_the_way_in_and_out(box, tree, tmp_path):
    there = box.upload(tree, "copy")
    assert there.files == 5
    assert box.bash("cd copy; ./run.sh; cat deep/link; ls -A /workspace").output == (
        "ran\n#!/bin/sh\necho ran\ncopy\n"
    )
    box.bash("cd /workspace")
    back = box.download("copy", tmp_path / "back")
    assert content(tmp_path / "back") == content(tree)
    assert (tmp_path / "back/run.sh").stat().st_mode & 0o777 == 0o755
    assert (back.files, back.bytes, back.skipped) == (5, there.bytes, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "tree"]


def test_a_file_of_many_pieces_keeps_content_and_mode(box, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(5 * archive.PIECE_BYTES + 3))
    source.chmod(0o750)
    assert box.upload(source, "a/b/file").bytes == source.stat().st_size
    assert box.bash("stat -c %a a/b/file; ls -A a/b").output == "750\nfile\n"
    assert box.download("a/b/file", tmp_path / "new/file").bytes == source.stat().st_size
    assert (tmp_path / "new/file").read_bytes() == source.read_bytes()
    assert (tmp_path / "new/file").stat().st_mode & 0o777 == 0o750


def test_an_upload_merges_into_a_directory_and_follows_no_link_out_of_it(box, tree):
    box.bash("mkdir deep elsewhere; echo keep >deep/kept; echo old >run.sh; ln -s /workspace/elsewhere empty")
    box.upload(tree, ".", exclude=["long*", "*.bin"])
    assert box.bash("cat deep/kept; ./run.sh; ls -A elsewhere; stat -c %F empty").output == (
        "keep\nran\ndirectory\n"
    )
    assert box.bash("ls -A; ls deep/er").output.split() == [
        "deep", "elsewhere", "empty", "hole", "run.sh", "'ünï'$'\\377'",
    ]  # fmt: skip


def test_the_workspace_is_archived_without_what_is_excluded(box, tree, tmp_path):
    box.upload(tree, ".")
    box.bash("mkdir .git node_modules; touch .git/HEAD node_modules/x; mkfifo pipe")
    saved = box.archive(".", tmp_path / "out.tar.gz", exclude=[".git", "node_modules", "deep/er"])
    assert saved.skipped == ["pipe"]
    with tarfile.open(tmp_path / "out.tar.gz", "r:gz", encoding="utf-8", errors="surrogateescape") as opened:
        names = sorted(opened.getnames())
    assert names == sorted(name for name in content(tree) if not name.startswith("deep/er"))


def test_what_leads_out_of_a_download_is_left_away_and_named(box, tmp_path):
    box.bash(
        "mkdir -p d/sub; cd d; ln -s /etc/passwd abs; ln -s ../../.. sub/up; ln -s sub in; ln -s in/../.. via"
    )
    box.bash("chmod u+s,g+s sub; echo x >suid; chmod 6755 suid; mkfifo pipe; cd /workspace")
    moved = box.download("d", tmp_path / "d")
    assert sorted(moved.skipped) == ["abs", "pipe", "sub/up", "via"]
    assert sorted(content(tmp_path / "d")) == ["in", "sub", "suid"]
    assert (tmp_path / "d/suid").stat().st_mode & 0o7000 == 0
    with pytest.raises(SandboxRequestError, match="exists already"):
        box.download("d", tmp_path / "d")


def test_limits_and_impossible_requests_say_so_and_leave_nothing_behind(box, tree, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    box.upload(tree, "d")
    for call in (
        lambda: box.upload(tree, "x", max_bytes=1000),
        lambda: box.upload(tree / "deep/er/big.bin", "x", max_bytes=1000),
        lambda: box.download("d", out / "d", max_bytes=1000),
        lambda: box.download("d/deep/er/big.bin", out / "d", max_bytes=1000),
        lambda: box.archive("d", out / "d.tgz", max_bytes=1000),
    ):
        with pytest.raises(SandboxRequestError, match="max_bytes=1000"):
            call()
    with pytest.raises(SandboxRequestError, match="there is nothing"):
        box.download("absent", out / "d")
    with pytest.raises(SandboxRequestError, match="neither"):
        box.download("/dev/zero", out / "d")
    with pytest.raises(SandboxRequestError, match="does not exist"):
        box.upload(tmp_path / "absent", "x")
    with pytest.raises(SandboxRequestError, match="is a directory"):
        box.upload(tree / "run.sh", "d")
    with pytest.raises(SandboxRequestError, match="is a file"):
        box.upload(tree, "d/run.sh")
    with pytest.raises(SandboxRequestError, match="cannot replace"):
        box.bash("mkdir -p e/run.sh")
        box.upload(tree, "e")
    assert not list(out.iterdir())
    assert box.bash("ls -A; ls -A e; find . -name '.upload*'").output.split() == ["d", "e", "run.sh"]


def test_an_upload_that_breaks_off_leaves_no_temporary_file(info, box, tree):
    async def break_off():
        async with SandboxClient(info.socket) as client:
            reached = asyncio.Event()
            loop = asyncio.get_running_loop()

            def slow(ask, *arguments):
                def ask_slowly(op, **fields):
                    reply = ask(op, **fields)
                    if op == "piece":
                        loop.call_soon_threadsafe(reached.set)
                    while op == "piece":  # the rest never comes: the same harmless request again and again
                        ask("piece", content="")
                    return reply

                return transfer.upload(ask_slowly, *arguments)

            task = asyncio.create_task(client._transfer(slow, tree, "half", (), GIB))
            async with asyncio.timeout(120):
                await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(break_off())
    done = box.bash("until [ -z \"$(find . -name '.upload*')\" ] && [ ! -e half ]; do sleep 0.05; done", 120)
    assert done.exit_code == 0


def test_transfers_with_silent_sandboxes_leave_the_threads_of_the_loop_to_others(tmp_path):
    async def transfer_and_work(client):
        downloads = [asyncio.create_task(client.download("d", tmp_path / "d")) for _ in range(40)]
        await asyncio.sleep(0.2)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 3), 10) == 3
        for download in downloads:
            download.cancel()
        await asyncio.wait(downloads, timeout=60)
        assert all(download.cancelled() for download in downloads)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen(64)
        asyncio.run(transfer_and_work(SandboxClient(f"{tmp_path}/s#{new_key()}")))


def test_a_cancelled_download_leaves_nothing_here(info, box, tmp_path):
    box.bash("mkdir d; head -c 200000000 /dev/urandom >d/big", timeout=120)

    async def cancel():
        async with SandboxClient(info.socket) as client:
            for path in ("d", "d/big"):
                task = asyncio.create_task(client.download(path, tmp_path / "x"))
                async with asyncio.timeout(120):
                    while not task.done() and not any(tmp_path.iterdir()) and path != "d":
                        await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not list(tmp_path.iterdir())
            return await client.download("d/big", tmp_path / "whole")

    assert run(cancel()).bytes == 200_000_000


def test_stat_list_and_special_files(box):
    box.bash("mkdir d; echo hi >d/f; ln -s f d/l; mkfifo d/p; chmod 640 d/f")
    assert [(entry.name, entry.kind) for entry in box.list_dir("d")] == [
        ("f", "file"), ("l", "link"), ("p", "other"),
    ]  # fmt: skip
    assert (box.stat("d/f").size, box.stat("d/f").mode) == (3, 0o640)
    assert (box.stat("d/l").kind, box.stat("d/l", follow=False).kind) == ("file", "link")
    assert box.stat("d/f/g").kind is None
    with pytest.raises(SandboxError, match="not a regular file"):
        box.read_file("d/p")
    with pytest.raises(SandboxError, match=r"not a regular file|No such device"):
        box.write_file("d/p", b"x")


@pytest.mark.parametrize("info", ["apptainer", "bubblewrap", "local-unsafe"], indirect=True)
def test_files_are_read_and_written_exactly(box):
    content = bytes(range(256)) * 100
    for part in (content, content[:300]):  # nothing is left of what was longer
        box.write_file("new/dir/data.bin", part, mode=0o755)
        assert box.read_file("new/dir/data.bin") == part
    for path, limit, message in (
        ("absent", None, "No such file"),
        ("/dev/zero", None, "not a regular file"),
        ("new/dir/data.bin", 10, "at most 10"),
    ):
        with pytest.raises(SandboxRequestError, match=message):
            box.read_file(path, max_bytes=limit)


# -- archives that mean harm, unpacked here ------------------------------------------------------


def tar_of(*entries: tarfile.TarInfo, data: bytes = b"data") -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as opened:
        for entry in entries:
            entry.size = len(data) if entry.isreg() else 0
            opened.addfile(entry, io.BytesIO(data))
    file.seek(0)
    return file


def entry_of(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = kind, link, mode
    return entry


@pytest.mark.parametrize(
    "entry",
    [
        entry_of("/tmp/absolute"),
        entry_of("../out"),
        entry_of("a/../../out"),
        entry_of("."),
        entry_of("hard", tarfile.LNKTYPE, "/etc/passwd"),
        entry_of("device", tarfile.CHRTYPE),
        entry_of("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda entry: entry.name,
)
def test_hostile_entries_are_refused(entry, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(archive.ArchiveError):
        archive.unpack(tar_of(entry), str(target), archive.Tally(GIB))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert not list(target.iterdir())


def test_no_mode_but_permissions_is_taken_over(tmp_path, server_files):
    entries = [entry_of("file"), entry_of("directory", tarfile.DIRTYPE)]
    for entry in entries:
        entry.mode = 0o7755
    archive.unpack(tar_of(*entries), str(tmp_path), archive.Tally(GIB))
    files = server_files.Files(str(tmp_path))
    uploaded = tmp_path / "uploaded"
    files._upload_file(str(uploaded), ".upload", 0o6755, io.BytesIO(b"data"), archive.Tally(GIB))
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("file", "directory", "uploaded"), "0o755")


def test_a_piece_and_a_list_are_only_so_long_whatever_is_asked_for(tmp_path, server_files, monkeypatch):
    monkeypatch.setattr(server_files, "MAX_PIECE_BYTES", 4)
    monkeypatch.setattr(server_files, "MAX_LISTED", 2)
    for name in "abc":
        (tmp_path / name).write_text("0123456789")
    files = server_files.Files(str(tmp_path))
    piece = files.op_read_piece({"path": "a", "offset": 3, "size": 100}, None)
    assert base64.b64decode(piece["content"]) == b"3456"
    assert len(files.op_list_dir({"path": "."}, None)["entries"]) == 2


def test_of_an_upload_that_cannot_be_merged_nothing_is_moved(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    (target / "deep" / "taken").mkdir(parents=True)
    for name in ("deep/taken", *map(str, range(20))):
        (source / name).write_text(name)
    with pytest.raises(archive.ArchiveError, match="taken is a directory"):
        archive.merge(str(source), str(target))
    assert [path.name for path in target.rglob("*")] == ["deep", "taken"]


@pytest.mark.parametrize("link", ["/etc", "..", "a/..", "sub/../..", "../../x", ""])
def test_links_that_may_lead_out_are_not_made(link, tmp_path):
    tally = archive.Tally(GIB)
    archive.unpack(tar_of(entry_of("l", tarfile.SYMTYPE, link)), str(tmp_path), tally)
    assert tally.skipped == ["l"]
    assert not list(tmp_path.iterdir())


def test_a_link_below_a_link_is_refused(tmp_path):
    """Through the first one the second would lie elsewhere, and lead further up."""
    links = [("x", "."), ("x/y", "..")]
    hostile = tar_of(*(entry_of(name, tarfile.SYMTYPE, link) for name, link in links))
    with pytest.raises(archive.ArchiveError, match="below the link"):
        archive.unpack(hostile, str(tmp_path), archive.Tally(GIB))
    assert not (tmp_path / "y").is_symlink()


def test_nothing_is_written_through_a_link_of_the_archive(tmp_path):
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    hostile = tar_of(entry_of("l", tarfile.SYMTYPE, str(outside)), entry_of("l/f"))
    archive.unpack(hostile, str(target), archive.Tally(GIB))
    assert not list(outside.iterdir())
    assert (target / "l/f").read_bytes() == b"data"


def test_size_count_and_header_bombs_are_refused(tmp_path, monkeypatch):
    with pytest.raises(archive.ArchiveError, match="max_bytes=10"):
        archive.unpack(tar_of(entry_of("f"), data=b"x" * 11), str(tmp_path), archive.Tally(10))
    archive.unpack(tar_of(entry_of("whole"), data=b"x" * 10), str(tmp_path), archive.Tally(10))
    monkeypatch.setattr(archive, "MAX_ENTRIES", 2)
    with pytest.raises(archive.ArchiveError, match="2 entries"):
        many = [entry_of(str(i), tarfile.DIRTYPE) for i in range(3)]
        archive.unpack(tar_of(*many), str(tmp_path), archive.Tally(GIB))
    bomb = tarfile.TarInfo("x" * (archive.MAX_EXTENDED_HEADER_BYTES + 1))
    with pytest.raises(archive.ArchiveError, match="extended header"):
        archive.unpack(io.BytesIO(bomb.tobuf(tarfile.PAX_FORMAT)), str(tmp_path), archive.Tally(GIB))
    with pytest.raises(archive.ArchiveError, match="not a whole"):
        cut = tar_of(entry_of("cut"), data=b"x" * 5000).getvalue()[:3000]
        archive.unpack(io.BytesIO(cut), str(tmp_path), archive.Tally(GIB))
