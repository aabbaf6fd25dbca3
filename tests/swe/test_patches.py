"""The patch is what the agent's files are, whatever became of its repository."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import Limits, State
from rollout.trajectory import FinishReason
from sandbox.client import SandboxClient
from tests.helpers import swe_toy
from tests.helpers.sandboxes import own_sandboxes
from tests.helpers.swe_agents import LIMITS, Result, apply, roll, roll_many
from workers.handlers.swe.patches import MAX_PATCH_BYTES

pytestmark = [pytest.mark.apptainer, pytest.mark.usefixtures("host")]

Row = dict[str, Any]

FILES = [
    "echo '# changed' >> parse.py; rm README.rst; chmod +x LICENSE; ln -s LICENSE link",
    "head -c 3000 /dev/urandom > data.bin; printf 'no newline' > 'with space.txt'; mkdir -p new/deep",
    "echo deep > new/deep/file.txt; mkdir __pycache__; echo x > __pycache__/a.pyc; echo x > old.orig",
    "mkdir -p .venv/lib node_modules/a; echo x > .venv/lib/a.py; echo x > node_modules/a/b.js",
]
SPOILED = [
    "git config user.name x; git config user.email x; git checkout -q -b other; git add -A; git commit -qm x",
    "git update-ref refs/heads/main HEAD; git tag -f mine",
    "echo '*.py filter=evil diff=evil -text' > .gitattributes",
    "git config filter.evil.clean 'tr a-z A-Z'; git config diff.evil.textconv cat",
    "git config diff.external false; git config core.fsmonitor /bin/false; git config core.worktree /tmp",
    "export GIT_DIR=/nowhere GIT_INDEX_FILE=/nowhere; printf 'exit 1' > ~/.bashrc; chmod 000 .git",
    "printf '*.py working-tree-encoding=UTF-16\\n*.txt text eol=crlf ident\\n' > .gitattributes",
    "chmod 755 .git; cp .gitattributes .git/info/attributes; git config core.autocrlf true; chmod 0 .git",
    "mkdir nested && env -u GIT_DIR -u GIT_INDEX_FILE git init -q nested; echo inside > nested/file.txt",
]


@pytest.fixture(scope="module")
def results(host: Any, by_name: dict[str, Row]) -> dict[str, Result]:
    row = by_name["parse"]
    tried = {
        "plain": FILES,
        "spoiled": [*FILES, *SPOILED],
        "latin-1": ["printf '# caf\\351\\n' >> parse.py; printf 'na\\357ve\\n' > name.txt"],
        "closed": [
            "echo '# x' >> parse.py; echo x > closed.txt; chmod 0 closed.txt",
            "mkdir d; echo y > d/y; chmod 0 d",
        ],
        "moved": [
            # Names change places and times say nothing: only inodes and ctimes tell.
            "mv tests a; mv a tests; touch -r setup.py stamp; cp -a parse.py parse.old",
            "sed -i 's/import/IMPORT/' parse.py; touch -r parse.old parse.py; rm stamp parse.old",
        ],
        "ignored": [
            "mkdir sub; printf '*.log\\n' > sub/.gitignore; echo x > sub/a.log; echo x > sub/a.txt",
            "mkdir -p e/.gitignore .GIT; echo x > .GIT/config; echo x > ':(glob)odd'",
            "printf x > \"$(printf 'line\\nbreak')\"",
        ],
        "huge": ["head -c 1500000 /dev/urandom > big.bin"],
    }
    made = asyncio.run(roll_many([(row, commands) for commands in tried.values()]))
    return dict(zip(tried, made, strict=True))


def applied(row: Row, patch: str, directory: Path) -> Path:
    """The base commit with the patch, on this machine."""
    source = row["image"] + row["spec"]["repo_dir"]
    archive = ["git", "-c", "safe.directory=*", "-C", source, "archive", row["base_commit"]]
    packed = subprocess.run(archive, check=True, capture_output=True).stdout
    directory.mkdir()
    steps = {("tar", "-x"): packed, ("git", "init", "-q"): b"", ("git", "apply", "-"): patch.encode()}
    for command, given in steps.items():
        subprocess.run(command, input=given, cwd=directory, check=True)
    return directory


@pytest.mark.parametrize("name", ["plain", "spoiled"])
def test_a_patch_has_new_deleted_binary_and_linked_files_and_modes(
    name: str, results: dict[str, Result], by_name: dict[str, Row], tmp_path: Path
) -> None:
    tree = applied(by_name["parse"], results[name].patch, tmp_path / "tree")
    assert (tree / "parse.py").read_text().endswith("# changed\n")
    assert not (tree / "README.rst").exists()
    assert (tree / "LICENSE").stat().st_mode & 0o111
    assert (tree / "link").is_symlink() and (tree / "link").readlink() == Path("LICENSE")
    assert (tree / "data.bin").stat().st_size == 3000
    assert (tree / "with space.txt").read_text() == "no newline"
    assert (tree / "new/deep/file.txt").read_text() == "deep\n"


def test_what_programs_leave_behind_is_dropped(results: dict[str, Result]) -> None:
    dropped = results["plain"].report["patch"]["dropped"]
    assert dropped == {"__pycache__/a.pyc": "left behind", "old.orig": "left behind"}
    assert "b/.venv/" not in results["plain"].patch and "b/node_modules/" not in results["plain"].patch


def test_a_repository_within_the_repository_counts_as_its_files(
    results: dict[str, Result], by_name: dict[str, Row], tmp_path: Path
) -> None:
    tree = applied(by_name["parse"], results["spoiled"].patch, tmp_path / "tree")
    assert (tree / "nested/file.txt").read_text() == "inside\n"
    assert "/.git/" not in results["spoiled"].patch


def test_what_its_owner_made_unreadable_is_part_of_the_patch(
    results: dict[str, Result], by_name: dict[str, Row], tmp_path: Path
) -> None:
    tree = applied(by_name["parse"], results["closed"].patch, tmp_path / "tree")
    assert (tree / "closed.txt").read_text() == "x\n" and (tree / "d/y").read_text() == "y\n"
    assert (tree / "parse.py").read_text().endswith("# x\n")


def test_a_change_with_the_old_size_and_times_is_seen(results: dict[str, Result]) -> None:
    assert "+IMPORT re" in results["moved"].patch or "+from __future__ IMPORT" in results["moved"].patch
    assert results["moved"].patch.count("diff --git") == 1


def test_the_agents_own_gitignore_counts_and_odd_names_do_no_harm(
    results: dict[str, Result], by_name: dict[str, Row], tmp_path: Path
) -> None:
    tree = applied(by_name["parse"], results["ignored"].patch, tmp_path / "tree")
    assert (tree / "sub/a.txt").exists() and not (tree / "sub/a.log").exists()
    assert (tree / ":(glob)odd").exists() and (tree / "line\nbreak").exists()
    assert ".GIT" not in results["ignored"].patch


def test_text_that_is_not_utf_8_arrives_as_it_is(
    results: dict[str, Result], by_name: dict[str, Row], tmp_path: Path
) -> None:
    tree = applied(by_name["parse"], results["latin-1"].patch, tmp_path / "tree")
    assert (tree / "parse.py").read_bytes().endswith(b"# caf\xe9\n")
    assert (tree / "name.txt").read_bytes() == b"na\xefve\n"


def test_a_patch_that_is_too_large_is_no_patch_and_names_its_files(results: dict[str, Result]) -> None:
    result = results["huge"]
    assert (result.reward, result.report["status"], result.patch) == (0.0, "no_patch", "")
    assert str(MAX_PATCH_BYTES) in result.report["detail"] and "big.bin" in result.report["detail"]
    assert result.rollout.state is State.COMPLETED


def test_an_agent_that_runs_out_of_turns_is_scored_on_what_it_did(by_name: dict[str, Row]) -> None:
    row = by_name["parse"]
    result = roll(row, apply(row["patch"]), "echo one", limits=LIMITS.model_copy(update={"max_turns": 2}))
    assert result.rollout.finish_reason is FinishReason.TURN_LIMIT
    assert result.reward == 1.0


def test_an_agent_that_runs_out_of_time_is_scored_on_what_it_did(by_name: dict[str, Row]) -> None:
    limits = Limits(run_timeout_s=4.0, eval_timeout_s=240, init_timeout_s=240, max_attempts=1)
    result = roll(by_name["parse"], "echo >> LICENSE; sleep 1000", limits=limits)
    assert result.rollout.finish_reason is FinishReason.TIME_LIMIT
    assert result.rollout.state is State.TIMED_OUT
    assert (result.reward, result.rollout.drop) == (0.0, False)
    assert result.report["status"] in ("unresolved", "empty_patch")


def test_files_that_are_too_large_to_compare_are_no_patch(by_name: dict[str, Row]) -> None:
    result = roll(by_name["parse"], "truncate -s 100M sparse.bin")
    assert (result.reward, result.report["status"]) == (0.0, "no_patch")
    assert "sparse.bin" in result.report["detail"]
    assert (result.report["blame"], result.rollout.drop) == ("agent", False)


MORE_FILES = 3000


def test_what_travels_for_a_patch_does_not_grow_with_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic: dict[str, list[int]] = {}

    def counted(name: str) -> None:
        call = getattr(SandboxClient, name)

        async def counting(self: SandboxClient, *args: Any, **options: Any) -> Any:
            answer = await call(self, *args, **options)
            told = answer if isinstance(answer, bytes) else str(answer).encode()
            sent = b"".join(part if isinstance(part, bytes) else str(part).encode() for part in args)
            traffic.setdefault(name, []).append(len(told) + len(sent))
            return answer

        monkeypatch.setattr(SandboxClient, name, counting)

    calls = ("bash", "read_file", "write_file", "list_dir", "upload", "download")
    for name in (*calls, "note_tree", "changed_tree"):
        counted(name)
    seen = []
    for more in (0, MORE_FILES):
        row = swe_toy.large_instance(more)
        with own_sandboxes(ROLLOUT_SANDBOX_IMAGE_ROOTS=str(Path(row["image"]).parent)):
            traffic.clear()
            result = roll(row, "sed -i 's/ + x + 1/ + x/' calc.py")
        assert result.reward == 1.0, (result.report, result.rollout.error)
        assert "+    return x + x\n" in result.patch
        seen.append({name: (len(sizes), sum(sizes)) for name, sizes in traffic.items()})
    small, large = seen
    assert {name: count for name, (count, _) in small.items()} == {
        name: count for name, (count, _) in large.items()
    }, "as many calls"
    for name, (_, size) in large.items():
        # Names of directories and numbers of objects are told; a name of each file would be 25 bytes of each.
        assert size - small[name][1] < MORE_FILES, (name, small, large)
    assert "upload" not in large and "download" not in large
