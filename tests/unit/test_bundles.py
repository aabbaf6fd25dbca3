"""Bundles: the same directory makes the same one, and nobody's archive writes outside of where it may."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile

import pytest

from rollout.suites import SuiteError, bundles
from rollout.suites.bundles import contents, pack, unpack, verify


def tree(path):
    """What is below a directory: modes, contents, targets of links."""
    found = {}
    for item in sorted(path.rglob("*")):
        kind = str(item.readlink()) if item.is_symlink() else item.read_bytes() if item.is_file() else None
        found[item.relative_to(path).as_posix()] = (kind, item.lstat().st_mode & 0o777)
    return found


def fill(path):
    (path / "tests").mkdir(parents=True)
    (path / "tests" / "test.sh").write_text("true\n")
    (path / "tests" / "test.sh").chmod(0o700)
    (path / "tests" / ("long " * 40)).write_text("x")
    (path / "tests" / "großes €.txt").write_bytes(os.urandom(3000))
    (path / "empty").mkdir()
    (path / "tests" / "link").symlink_to("../empty")
    (path / "__pycache__").mkdir()
    (path / "__pycache__" / "a.pyc").write_text("")
    (path / ".git").mkdir()


def test_what_is_unpacked_is_what_was_packed(tmp_path):
    fill(tmp_path / "a")
    bundle = pack(tmp_path / "a")
    unpack(bundle.content, bundle.digest, tmp_path / "b")
    found = tree(tmp_path / "b")
    assert found["tests/test.sh"] == (b"true\n", 0o755)
    assert found["empty"] == (None, 0o755) and found["tests/link"][0] == "../empty"
    assert {mode for kind, mode in found.values() if isinstance(kind, bytes)} == {0o644, 0o755}
    assert not any("__pycache__" in name or ".git" in name for name in found) and len(found) == 6
    assert pack(tmp_path / "b") == bundle


def test_a_digest_is_the_same_with_every_python(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ("long " * 40)).write_text("x")
    (tmp_path / "é").write_text("y")
    (tmp_path / "l").symlink_to("d")
    assert pack(tmp_path).digest == "675abb8956ff06b594ea866279783a1b127530842db7e448de7aca47b0dabd84"


def test_times_owners_and_order_make_no_other_bundle(tmp_path):
    fill(tmp_path / "a")
    before = pack(tmp_path / "a")
    os.utime(tmp_path / "a" / "tests", (1, 1))
    (tmp_path / "a" / "tests" / "test.sh").chmod(0o755)
    assert pack(tmp_path / "a") == before
    (tmp_path / "a" / "tests" / "test.sh").write_text("false\n")
    assert pack(tmp_path / "a").digest != before.digest
    # Of the archive, not of its compression.
    archive = gzip.decompress(before.content)
    assert hashlib.sha256(archive).hexdigest() == before.digest
    verify(gzip.compress(archive, 1), before.digest)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside", "sub/../a", ""])
def test_a_link_that_may_lead_out_is_not_packed(tmp_path, target):
    (tmp_path / "task" / "sub").mkdir(parents=True)
    if not target:
        os.mkfifo(tmp_path / "task" / "pipe")
        words = "pipe: neither a file, a directory nor a link"
    else:
        (tmp_path / "task" / "link").symlink_to(target)
        words = f"link: a link to {target!r}, which "
    with pytest.raises(SuiteError) as refused:
        pack(tmp_path / "task")
    assert words in str(refused.value)


def test_what_is_too_large_is_not_packed(tmp_path, monkeypatch):
    (tmp_path / "zeros").write_bytes(bytes(1 << 20))
    assert len(pack(tmp_path).content) < 5000
    monkeypatch.setattr(bundles, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(SuiteError, match="larger than 1 MiB, or 32 MiB compressed"):
        pack(tmp_path)
    monkeypatch.setattr(bundles, "MAX_UNPACKED_BYTES", 1 << 30)
    (tmp_path / "noise").write_bytes(os.urandom(70_000))
    monkeypatch.setattr(bundles, "MAX_BYTES", 1 << 16)
    with pytest.raises(SuiteError, match="larger than"):
        pack(tmp_path)
    monkeypatch.setattr(bundles, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(bundles, "MAX_MEMBERS", 1)
    with pytest.raises(SuiteError, match="more than 1 files and directories"):
        pack(tmp_path)


# ------------------------------------------------------------------------------------ hostile ones


def member(name, kind=tarfile.REGTYPE, data=b"", link="", **more):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), link
    for field, value in more.items():
        setattr(info, field, value)
    return info, data


def archive(*members, form=tarfile.PAX_FORMAT):
    """A compressed archive of these members, and its digest."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(file.getvalue()), hashlib.sha256(file.getvalue()).hexdigest()


DIR, LINK, HARD = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE = {
    "an absolute name": ([member("/tmp/evil", data=b"x")], "'/tmp/evil', which is no path in it"),
    "a name that goes up": ([member("../evil", data=b"x")], "'../evil', which is no path in it"),
    "a name that goes up within": ([member("a", DIR), member("a/../../evil")], "which is no path in it"),
    "no name": ([member(".", DIR)], "'.', which is no path in it"),
    "a link to an absolute place": ([member("a", LINK, link="/etc/passwd")], "which is no relative path"),
    "a link that goes up": ([member("a", LINK, link="../x")], "which may lead out of the task"),
    "a link that goes up behind a link": (
        [member("d", DIR), member("d/e", LINK, link=".."), member("f", LINK, link="d/e/..")],
        "which may lead out of the task",
    ),
    "a file below a link": ([member("a", LINK, link="b"), member("a/evil")], "in no directory of its own"),
    "a file below a file": ([member("a"), member("a/evil")], "in no directory of its own"),
    "a file in the place of a link": ([member("a", LINK, link="b"), member("a")], "'a' twice"),
    "a hard link": (
        [member("a"), member("b", HARD, link="/etc/passwd")],
        "neither a file, a directory nor a link",
    ),
    "a device": (
        [member("a", tarfile.CHRTYPE, devmajor=1, devminor=8)],
        "neither a file, a directory nor a link",
    ),
    "a pipe": ([member("a", tarfile.FIFOTYPE)], "neither a file, a directory nor a link"),
    "records of its own": (
        [member("a", pax_headers={"SCHILY.xattr.user.a": "b"})],
        "a header that bundles have none",
    ),
    "records of a length without an end": (
        [member("x", tarfile.XHDTYPE, b"9" * 5000 + b" path=a\n")],
        "a header that bundles have none",
    ),
    "records for all": (
        [member("g", tarfile.XGLTYPE, b"9 path=a\n")],
        "neither a file, a directory nor a link",
    ),
    "a long name of records": ([member("a" * 9000)], "is no path in it"),
    "a very long name of records": ([member("a" * 30_000)], "a name that is too long"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_and_writes_nothing_outside(tmp_path, what):
    members, words = HOSTILE[what]
    content, digest = archive(*members)
    with pytest.raises(SuiteError) as refused:
        verify(content, digest)
    assert words in str(refused.value)
    with pytest.raises(SuiteError):
        unpack(content, digest, tmp_path / "into")
    assert [item.name for item in tmp_path.iterdir()] == ["into"]


def test_long_names_of_the_other_form_are_refused():
    with pytest.raises(SuiteError, match="LongLink', which is no path in it"):
        verify(*archive(member("a/" * 100 + "b"), form=tarfile.GNU_FORMAT))


def test_modes_and_owners_of_an_archive_are_not_taken_over(tmp_path):
    content, digest = archive(
        member("tool", data=b"x", mode=0o6777, uid=1, gid=2), member("text", mode=0o000)
    )
    unpack(content, digest, tmp_path / "into")
    modes = {name: (tmp_path / "into" / name).stat().st_mode & 0o7777 for name in ("tool", "text")}
    assert modes == {"tool": 0o755, "text": 0o644}
    assert (tmp_path / "into" / "tool").stat().st_uid == os.geteuid()


def test_a_bomb_is_given_up_at_the_limit(monkeypatch):
    size, read = 300 << 20, []
    head = tarfile.TarInfo("zeros")
    head.size = size
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(head.tobuf())
        for _ in range(300):
            file.write(bytes(1 << 20))
    assert len(packed.getvalue()) < 2 << 20
    whole = bundles._Reader.read
    monkeypatch.setattr(bundles._Reader, "read", lambda self, size: (read.append(size), whole(self, size))[1])
    with pytest.raises(SuiteError, match="the bundle: larger than 256 MiB"):
        verify(packed.getvalue(), "0" * 64)
    assert sum(read) <= (256 << 20) + (2 << 20)


def test_many_members_are_given_up_at_the_limit(monkeypatch):
    monkeypatch.setattr(bundles, "MAX_MEMBERS", 3)
    verify(*archive(*map(member, "abc")))
    with pytest.raises(SuiteError, match="more than 3 files and directories"):
        verify(*archive(*map(member, "abcd")))


def test_another_digest_is_refused_when_all_was_read():
    content, digest = archive(member("a", data=b"x"))
    with pytest.raises(SuiteError, match=f"the bundle's digest is {digest}, not {'0' * 64}"):
        verify(content, "0" * 64)
    assert [found.name for found in contents(content, digest)] == ["a"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: b"", "ends too early"),
        (lambda content: b"no gzip at all", "no archive in gzip"),
        (lambda content: content[:-12], "ends too early"),
        (lambda content: content + b"more", "something behind its archive"),
        (lambda content: content + content, "something behind its archive"),
        (lambda content: gzip.compress(b""), "ends too early"),
        (lambda content: gzip.compress(b"\1" * 2048), "no archive in gzip"),
        (lambda content: gzip.compress(gzip.decompress(content)[:700]), "ends too early"),
    ],
)
def test_what_is_damaged_is_refused(damage, words):
    content, digest = archive(member("a", data=b"x" * 600))
    with pytest.raises(SuiteError) as refused:
        verify(damage(content), digest)
    assert words in str(refused.value)
