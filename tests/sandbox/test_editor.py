"""`str_replace_editor` as a model uses it, in a real container; its text handling against Python's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.blocking import SyncSandboxClient
from tests.helpers.sandboxes import server_modules
from tests.sandbox.conftest import sandbox_on

info = sandbox_on("apptainer")


@pytest.fixture
def box(info):
    with SyncSandboxClient(info.socket) as client:
        client.bash("cd /workspace && rm -rf /workspace/* /workspace/.[!.]*")
        yield client


def put(box, content, name="f.txt"):
    box.write_file(name, content)
    return f"/workspace/{name}"


def refused(result, *words):
    assert not result.ok
    for word in words:
        assert word in result.output


def test_view_numbers_lines_and_shows_tabs_as_they_are(box):
    path = put(box, "one\n\ttwo\nthree")
    assert box.editor("view", path).output == "     1\tone\n     2\t\ttwo\n     3\tthree\n"
    assert box.editor("view", path, view_range=[2, -1]).output == "     2\t\ttwo\n     3\tthree\n"
    assert box.editor("view", path, view_range=[2, 2]).output == "     2\t\ttwo\n"
    assert "is empty" in box.editor("view", put(box, "", "empty")).output


@pytest.mark.parametrize("view_range", [[0, 1], [1, 4], [3, 2], [4, 4], [-1, 2], [1, -2]])
def test_a_range_beyond_the_file_is_refused_with_its_length(box, view_range):
    refused(box.editor("view", put(box, "1\n2\n3\n"), view_range=view_range), "3 lines")


def test_a_long_view_is_cut_and_says_how_to_see_more(box):
    path = put(box, "".join(f"line {i}\n" for i in range(1, 5001)))
    result = box.editor("view", path, max_output_chars=1000)
    assert result.ok
    assert len(result.output) < 1200
    assert "of 5000" in result.output
    assert "view_range" in result.output
    assert box.editor("view", put(box, "x" * 9000), max_output_chars=1000).output.endswith(
        "9000 characters]\n"
    )


def test_a_directory_is_listed_two_levels_deep_without_hidden_entries(box):
    box.bash("mkdir -p a/b/c .git/x; touch a/z a/.h a/b/c/deep m; ln -s m a/link")
    lines = box.editor("view", "/workspace").output.splitlines()
    assert lines[0] == "/workspace holds 5 entries, two levels deep (2 hidden ones not shown):"
    assert lines[1:] == [
        "/workspace/a/",
        "/workspace/a/b/",
        "/workspace/a/link -> m",
        "/workspace/a/z",
        "/workspace/m",
    ]
    refused(box.editor("view", "/workspace", view_range=[1, 2]), "directory")
    box.bash("mkdir many; cd many; touch $(seq 3000); cd ..")
    assert "more than 1000 entries" in box.editor("view", "/workspace").output


def test_paths_are_checked_and_better_ones_named(box):
    put(box, "x", "src/main.py")
    refused(box.editor("view", "src/main.py"), "not absolute", "/workspace/src/main.py")
    refused(box.editor("view", "/workspace/src/mian.py"), "does not exist", "/workspace/src/main.py")
    refused(box.editor("view", "/workspace/srcs/main.py"), "does not exist", "/workspace/src")
    refused(box.editor("str_replace", "/workspace/src", old_str="a", new_str="b"), "is a directory")
    refused(box.editor("view", "/dev/null"), "neither a regular file")
    box.bash("mkfifo pipe")
    refused(box.editor("view", "/workspace/pipe"), "neither a regular file")


def test_create_makes_directories_and_never_overwrites(box):
    assert box.editor("create", "/workspace/new/dir/a.py", file_text="x = 1\n").ok
    assert box.read_file("new/dir/a.py") == b"x = 1\n"
    refused(box.editor("create", "/workspace/new/dir/a.py", file_text="y"), "exists already", "str_replace")
    refused(box.editor("create", "/workspace/new", file_text="y"), "is a directory")
    refused(box.editor("create", "/workspace/b.py"), "file_text")
    assert box.read_file("new/dir/a.py") == b"x = 1\n"


def test_str_replace_edits_the_one_occurrence_and_shows_it(box):
    path = put(box, "".join(f"line {i}\n" for i in range(1, 21)))
    result = box.editor("str_replace", path, old_str="line 10\n", new_str="ten\nand more\n")
    assert result.ok
    assert "    10\tten\n    11\tand more\n" in result.output
    assert "line 3\n" not in result.output
    assert box.read_file(path).count(b"\n") == 21
    assert box.editor("str_replace", path, old_str="and more\n").ok  # no new_str: removed
    assert b"more" not in box.read_file(path)


def test_str_replace_explains_what_did_not_fit(box):
    path = put(box, "def f():\n    return 1\n\ndef g():\n    return 1\n")
    before = box.read_file(path)
    refused(box.editor("str_replace", path, old_str="return 1", new_str="x"), "2 times", "lines 2, 5")
    refused(
        box.editor("str_replace", path, old_str="def f():\n  return 1", new_str=""),
        "whitespace",
        "line 1",
        "    return 1",
    )
    refused(box.editor("str_replace", path, old_str="def h():", new_str=""), "not found verbatim", "def ")
    refused(box.editor("str_replace", path, old_str="def f", new_str="def f"), "the same")
    refused(box.editor("str_replace", path, old_str="", new_str="x"), "empty")
    refused(box.editor("str_replace", path, new_str="x"), "old_str")
    assert box.read_file(path) == before


def test_insert_puts_lines_anywhere_and_keeps_a_missing_last_newline(box):
    path = put(box, "a\nb")
    assert box.editor("insert", path, insert_line=0, new_str="top").ok
    assert box.editor("insert", path, insert_line=2, new_str="mid\n").ok
    assert box.editor("insert", path, insert_line=4, new_str="end\n").ok
    assert box.read_file(path) == b"top\na\nmid\nb\nend"
    refused(box.editor("insert", path, insert_line=6, new_str="x"), "from 0", "to 5")
    refused(box.editor("insert", path, new_str="x"), "insert_line")
    assert box.editor("insert", put(box, "", "e"), insert_line=0, new_str="x").ok
    assert box.read_file("e") == b"x\n"


@pytest.mark.parametrize(
    ("raw", "old", "new", "after"),
    [
        ("\ufeffä\nb\n".encode(), "b", "ö", "\ufeffä\nö\n".encode()),
        ("\ufeffä\r\nb\r\n".encode("utf-16-le"), "b", "ö\nc", "\ufeffä\r\nö\r\nc\r\n".encode("utf-16-le")),
        ("\ufeffä\nb".encode("utf-16-be"), "b", "ö", "\ufeffä\nö".encode("utf-16-be")),
        (b"caf\xe9\nb\n", "b", "\xfc", b"caf\xe9\n\xfc\n"),
        (b"a\r\nb\r\nc\nd\r\n", "a\nb", "x\ny\nz", b"x\r\ny\r\nz\r\nc\nd\r\n"),
        (b"a\rb\rc", "b\nc", "x\ny", b"a\rx\ry"),
        (b"a\r\nb\n\nc\n", "b\n\n", "b\n", b"a\r\nb\nc\n"),
        (b"a\nprogress\rdone\n", "done", "end", b"a\nprogress\rend\n"),
    ],
)
def test_encoding_and_line_endings_stay(box, raw, old, new, after):
    path = put(box, raw)
    assert box.editor("str_replace", path, old_str=old, new_str=new).ok
    assert box.read_file(path) == after
    assert box.editor("undo_edit", path).ok
    assert box.read_file(path) == raw


def test_what_is_no_text_is_refused(box):
    refused(box.editor("view", put(box, b"\x7fELF\0\1")), "binary")
    refused(box.editor("view", put(box, b"\x89\x01\x02\xff")), "binary")
    refused(box.editor("view", put(box, b"\xff\xfea")), "binary")
    refused(box.editor("str_replace", put(box, b"caf\xe9 x"), old_str="x", new_str="€"), "latin-1", "iconv")
    box.bash("head -c 10485761 /dev/zero | tr '\\0' 'x' >big; sed -i 's/x/\\n/5' big")
    refused(box.editor("str_replace", "/workspace/big", old_str="x", new_str="y"), "10485761 bytes")
    assert "10485761 bytes; only its first 10485760" in box.editor("view", "/workspace/big").output


def test_links_modes_and_inodes_survive_an_edit(box):
    path = put(box, "old\n", "target")
    box.bash("chmod 751 target; ln -s target soft; ln target hard")
    assert box.editor("str_replace", "/workspace/soft", old_str="old", new_str="much longer").ok
    assert box.read_file("hard") == b"much longer\n"
    assert box.bash("stat -c '%a %h' target; readlink soft").output == "751 2\ntarget\n"
    assert box.editor("undo_edit", path).ok
    assert box.read_file("hard") == b"old\n"
    box.bash("chmod 444 target; ln -s nowhere dangling")
    refused(box.editor("str_replace", path, old_str="old", new_str="new"), "chmod")
    refused(box.editor("view", "/workspace/dangling"), "nowhere")


def test_undo_steps_back_to_before_the_creation_and_ends_there(box):
    path = "/workspace/story"
    box.editor("create", path, file_text="0")
    for i in range(5):
        assert box.editor("str_replace", path, old_str=str(i), new_str=str(i + 1)).ok
    for i in (4, 3, 2, 1, 0):
        assert box.editor("undo_edit", path).ok
        assert box.read_file(path) == str(i).encode()
    assert "removed" in box.editor("undo_edit", path).output
    assert box.stat(path).kind is None
    refused(box.editor("undo_edit", path))
    refused(box.editor("undo_edit", put(box, "x", "never")), "no edit")


def test_undo_goes_back_twenty_edits_and_never_over_the_work_of_others(box):
    path = put(box, "n0\n")
    for i in range(25):
        assert box.editor("str_replace", path, old_str=f"n{i}\n", new_str=f"n{i + 1}\n").ok
    for _ in range(20):
        assert box.editor("undo_edit", path).ok
    assert box.read_file(path) == b"n5\n"
    refused(box.editor("undo_edit", path), "no edit")
    assert box.editor("str_replace", path, old_str="n5", new_str="six").ok
    box.bash("echo formatted >>f.txt")
    refused(box.editor("undo_edit", path), "something else")
    assert box.read_file(path) == b"six\nformatted\n"


@pytest.fixture(scope="module")
def modules():
    with server_modules("document", "editor") as loaded:
        yield loaded


def test_the_old_content_is_back_after_a_failed_write(modules, tmp_path, monkeypatch):
    document, _ = modules
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    real, calls = document.os.write, []

    def failing(fd, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(fd, data[:5])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(document.os, "write", failing)
    with pytest.raises(OSError, match="No space"):
        document.overwrite(str(path), b"NEW CONTENT THAT IS LONGER", b"old content")
    monkeypatch.undo()
    assert path.read_bytes() == b"old content"


def test_undo_keeps_so_many_bytes_of_all_files_and_gives_back_those_of_undone_edits(
    modules, tmp_path, monkeypatch
):
    _, editor = modules
    monkeypatch.setattr(editor, "UNDO_BYTES", 25)
    edit = editor.Editor(str(tmp_path)).op_editor

    def done(command, name, **options):
        return edit({"command": command, "path": str(tmp_path / name), **options}, None)["ok"]

    for _ in range(3):
        for name in "abc":
            (tmp_path / name).write_text("ten bytes.")
            assert done("str_replace", name, old_str="ten", new_str="10")
        assert [name for name in "abc" if done("undo_edit", name)] == ["b", "c"], "the oldest made room"


texts = st.text(alphabet="ab \tä€\n", max_size=40)


@given(before=texts, old=st.text(alphabet="ab \tä\n", min_size=1, max_size=4), new=texts, after=texts)
def test_str_replace_is_pythons_replace_and_undo_restores_the_bytes(
    modules, tmp_path_factory, before, old, new, after
):
    text = before + old + after
    path = tmp_path_factory.getbasetemp() / "property.txt"
    for raw, newline in ((text.encode(), "\n"), (text.replace("\n", "\r\n").encode("utf-8-sig"), "\r\n")):
        path.write_bytes(raw)
        edit = modules[1].Editor(str(path.parent)).op_editor
        request = {"path": str(path), "old_str": old, "new_str": new}
        reply = edit(dict(request, command="str_replace"), None)
        if text.count(old) == 1 and old != new:
            assert reply["ok"], reply
            expected = text.replace(old, new)
            if newline == "\r\n" and "\n" in text:
                assert path.read_bytes() == expected.replace("\n", "\r\n").encode("utf-8-sig")
            else:
                assert path.read_bytes().decode("utf-8-sig") == expected
            assert edit(dict(request, command="undo_edit"), None)["ok"]
        else:
            assert not reply["ok"]
        assert path.read_bytes() == raw
