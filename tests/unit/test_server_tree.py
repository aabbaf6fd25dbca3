"""What the sandbox's server says of a directory that changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.sandboxes import server_modules


@pytest.fixture
def trees(tmp_path: Path) -> Any:
    with server_modules("tree") as (tree,):
        yield tree.Trees(str(tmp_path))


def changes(trees: Any, root: Path) -> tuple[dict[str, dict[str, Any]], set[str]]:
    answer = trees.op_changed_tree({"path": str(root)}, None)
    return {entry["path"]: entry for entry in answer["changed"]}, set(answer["removed"])


@pytest.fixture
def root(tmp_path: Path, trees: Any) -> Path:
    root = tmp_path / "root"
    for name in ("a/one", "a/two", "b/one", "b/two", "same", ".git/config", "deep/.git/x", "skip/me"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "link").symlink_to("a/one")
    assert trees.op_note_tree({"path": str(root), "exclude": [".git", "skip"]}, None) == {"entries": 6}
    return root


def test_nothing_is_told_of_what_was_not_touched(trees, root):
    (root / ".git/config").write_text("other")
    (root / "skip/me").write_text("other")
    assert changes(trees, root) == ({}, set())


def test_a_change_is_told_although_size_and_times_are_as_before(trees, root):
    before = (root / "same").stat()
    (root / "same").write_text("emas")
    os.utime(root / "same", ns=(before.st_atime_ns, before.st_mtime_ns))
    changed, removed = changes(trees, root)
    assert set(changed) == {"same"} and removed == set()
    assert (changed["same"]["new"], changed["same"]["kind"], changed["same"]["size"]) == (False, "file", 4)


def test_files_that_changed_places_are_told_although_none_was_touched(trees, root):
    (root / "a").rename(root / "x")
    (root / "b").rename(root / "a")
    (root / "x").rename(root / "b")
    assert set(changes(trees, root)[0]) == {"a/one", "a/two", "b/one", "b/two"}


def test_new_removed_and_linked_files_and_modes_are_told(trees, root):
    (root / "a/new").write_text("new")
    (root / "b/one").unlink()
    (root / "b/two").chmod(0o755)
    (root / "link").unlink()
    (root / "link").symlink_to("b/two")
    (root / "same").unlink()
    (root / "same").mkdir()
    changed, removed = changes(trees, root)
    assert set(changed) == {"a/new", "b/two", "link"} and removed == {"b/one", "same"}
    assert changed["a/new"]["new"] and not changed["b/two"]["new"]
    assert changed["b/two"]["mode"] == 0o755 and changed["link"]["link"] == "b/two"


def test_what_was_closed_is_opened(trees, root):
    (root / "a/one").chmod(0)
    (root / "b").chmod(0)
    changed, removed = changes(trees, root)
    assert "a/one" in changed and removed == set()
    assert (root / "a/one").stat().st_mode & 0o400 and (root / "b").stat().st_mode & 0o700 == 0o700


def test_a_link_in_the_place_of_the_directory_is_not_followed(trees, root):
    root.rename(root.with_name("elsewhere"))
    root.symlink_to("elsewhere")
    changed, removed = changes(trees, root)
    assert changed == {} and len(removed) == 6


def test_a_directory_that_was_not_noted_is_refused_by_name(trees, tmp_path):
    with pytest.raises(Exception, match="other was not noted"):
        trees.op_changed_tree({"path": "other"}, None)


def test_directories_are_told_where_they_are_asked_for(trees, root):
    asked = {"path": str(root), "exclude": ["/skip"], "directories": True}
    assert trees.op_note_tree(asked, None) == {"entries": 13}
    (root / "a/two").unlink()  # which changes the time of the directory, and is no change of it
    (root / "empty").mkdir(mode=0o711)
    (root / "deep/.git").chmod(0o700)
    (root / "link").unlink()
    (root / "link").mkdir()
    changed, removed = changes(trees, root)
    assert {name: (entry["kind"], entry["new"]) for name, entry in changed.items()} == {
        "empty": ("directory", True),
        "deep/.git": ("directory", False),
        "link": ("directory", False),
    }
    assert (changed["empty"]["mode"], removed) == (0o711, {"a/two"})


def test_a_name_with_a_slash_before_it_is_left_out_below_the_root_alone(trees, root):
    trees.op_note_tree({"path": str(root), "exclude": ["/b", "/deep/.git"]}, None)
    (root / "a/b").mkdir()
    (root / "a/b/new").write_text("")
    (root / "b/new").write_text("")
    (root / "deep/.git/new").write_text("")
    assert set(changes(trees, root)[0]) == {"a/b/new"}
