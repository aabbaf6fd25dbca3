"""SWE instances made from real projects: two neighbouring releases, their difference as fix and as tests.

The source distributions come from the package index that pip is configured with, by name, version and hash.
An instance is a repository with the old release as base commit and the new one after it; the gold patch is
what changed in the code, the test patch what changed in the tests. Which tests fail before and pass after is
found by running them in a sandbox. All of it lies in `.local/swe`, made once; `python -m
tests.helpers.swe_instances` makes it ahead.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import paths, trees
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.images import ImageStore, squashfs
from sandbox.images.store import hand_over
from sandbox.spec import SandboxSpec
from tests.helpers.sandboxes import own_sandboxes
from workers.handlers.swe.rows import files_of

HOME = paths.rollout_home() / "swe"
PIP_S = 300
TESTS_S = 120
FIXED_DATE = "2024-01-01T00:00:00Z"


@dataclass(frozen=True)
class Project:
    """A package at two releases."""

    name: str
    repo: str
    old: tuple[str, str]
    """Version and SHA-256 of the source distribution."""
    new: tuple[str, str]
    problem: str
    source: str = "."
    """Where modules lie, seen from the repository."""

    @property
    def instance_id(self) -> str:
        return f"{self.repo.replace('/', '__')}-{self.new[0]}"


PROJECTS = (
    Project(
        "parse",
        "r1chardj0n3s/parse",
        ("1.20.0", "bd28bae37714b45d5894d77160a16e2be36b64a3b618c81168b3684676aa498b"),
        ("1.20.1", "09002ca350ad42e76629995f71f7b518670bcf93548bdde3684fd55d2be51975"),
        "`%f` in a strftime-style format takes exactly six digits, so '2023-11-21 13:23:27.1' with fewer "
        "digits of a second is not parsed. And a Parser has no way to tell the format it was made from.",
    ),
    Project(
        "semver",
        "python-semver/python-semver",
        ("3.0.1", "9ec78c5447883c67b97f98c3b6212796708191d22e4ad30f4570f840171cbce1"),
        ("3.0.2", "6253adb39c70f6e51afed2fa7152bcd414c411286088fb4b9effb133885ab4cc"),
        "`replace()` of an instance of a subclass of Version gives a plain Version, not one of the subclass.",
        source="src",
    ),
    Project(
        "jmespath",
        "jmespath/jmespath.py",
        ("1.0.0", "a490e280edd1f57d6de88636992d05b71e97d69a26a19f058ecf7d304474bf5e"),
        ("1.0.1", "90261b206d6defd58fdd5e85f478bf633a2901798906be2ad389150c5c60edbe"),
        "The parser's cache of compiled expressions fails when several threads compile at once, because its "
        "entries are freed at random while another thread does the same.",
    ),
    Project(
        "xmltodict",
        "martinblech/xmltodict",
        ("0.12.0", "50d8c638ed7ecb88d90561beedbf720c9b4e851a9fa6c47ebd64e99d166d8a21"),
        ("0.13.0", "341595a488e3e01a85a9d8911d8912fd922ede5fecc4dce437eb4b6c8d037e56"),
        "unparse() cannot expand iterables other than lists; parse() drops comments even if asked to keep "
        "them, and namespaces that map to None are not collapsed.",
    ),
    Project(
        "unidiff",
        "matiasb/python-unidiff",
        ("0.7.4", "2bbcbc986e1fb97f04b1d7b864aa6002ab02f4d8a996bf03aa6e5a81447d1fc5"),
        ("0.7.5", "2e5f0162052248946b9f0970a40e9e124236bf86c82b70821143a6fc1dea2574"),
        "Parsing fails, or gives wrong names, for git diffs of files whose names have spaces and no a/ and "
        "b/ prefix, and for binary patches.",
    ),
)


def instances() -> list[dict[str, Any]]:
    """The rows, made now if they are not there: seconds of network, then of two test runs each."""
    os.environ.setdefault("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(HOME))  # of hosts that are started from here on
    HOME.mkdir(parents=True, exist_ok=True)
    recipe = Path(__file__).read_bytes() + str(paths.sandbox_user()).encode()
    base = ImageStore().find("base").stat()
    key = hashlib.sha256(recipe + f"{base.st_size} {base.st_mtime_ns}".encode()).hexdigest()[:12]
    done = HOME / f"instances-{key}.jsonl"
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _clear(keep=HOME / "sdists")
            rows = _make(HOME / f"rootfs-{key}")
            text = "".join(json.dumps(row) + "\n" for row in rows)
            part = done.with_suffix(".part")
            part.write_text(text)
            part.rename(done)
    return [json.loads(line) for line in done.read_text().splitlines()]


def _clear(keep: Path) -> None:
    for path in HOME.iterdir():
        if path.is_dir() and path != keep:
            trees.remove(path)
        elif path.suffix in (".jsonl", ".part"):
            path.unlink()


def _make(rootfs: Path) -> list[dict[str, Any]]:
    sdists = _download(HOME / "sdists")
    squashfs.unpack(ImageStore().find("base"), rootfs)
    rows = []
    for project in PROJECTS:
        repository = rootfs / "repos" / project.name
        base = _commit_releases(project, sdists, repository)
        rows.append(_row(project, repository, base, rootfs))
    if os.geteuid() == 0:
        hand_over(rootfs, paths.sandbox_user())
    with own_sandboxes(ROLLOUT_SANDBOX_WARM="0") as state:  # a warm one would be left
        asyncio.run(_find_tests(rows, HostClient(state)))
    return rows


def _download(directory: Path) -> Path:
    """The source distributions, checked by hash; raises CalledProcessError where there is no index."""
    directory.mkdir(exist_ok=True)
    pinned = {f"{p.name}=={version}": digest for p in PROJECTS for version, digest in (p.old, p.new)}
    have = {hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.glob("*.tar.gz")}
    missing = [name for name, digest in pinned.items() if digest not in have]

    def fetch(names: list[str]) -> subprocess.Popen[bytes]:
        requirements = directory / f"{names[0]}.txt"
        requirements.write_text("".join(f"{name} --hash=sha256:{pinned[name]}\n" for name in names))
        flags = [
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-binary=:all:",
            "--no-build-isolation",
        ]
        command = [sys.executable, "-m", "pip", "download", *flags, "-d", directory, "-r", requirements]
        # The one authority that tests have is not that of the index.
        env = {name: value for name, value in os.environ.items() if not value.endswith("/authority.pem")}
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env)

    # pip takes one version of a package at a call.
    halves = [[name for name in missing if name in half] for half in (list(pinned)[::2], list(pinned)[1::2])]
    running = [fetch(half) for half in halves if half]
    for process in running:
        if process.wait(PIP_S):
            raise RuntimeError(
                f"pip could not download {', '.join(missing)}: these tests make their instances from source "
                "distributions of the package index that pip is configured with"
            )
    return directory


def _commit_releases(project: Project, sdists: Path, repository: Path) -> str:
    """A repository with the old release, tagged, and after it the new one; answers the first commit."""
    repository.mkdir(parents=True)
    _git(repository, "init", "-q", "-b", "main")
    commits = []
    for version, digest in (project.old, project.new):
        for path in repository.iterdir():
            if path.name != ".git":
                trees.remove(path) if path.is_dir() else path.unlink()
        _unpack(sdists, digest, repository)
        _git(repository, "add", "-A")
        _git(repository, "commit", "-q", "-m", f"Release {version}")
        _git(repository, "tag", version)
        commits.append(_git(repository, "rev-parse", "HEAD").strip())
    return commits[0]


def _unpack(sdists: Path, digest: str, repository: Path) -> None:
    file = next(f for f in sdists.glob("*.tar.gz") if hashlib.sha256(f.read_bytes()).hexdigest() == digest)
    with tarfile.open(file) as archive, tempfile.TemporaryDirectory() as directory:
        archive.extractall(directory, filter="data")
        (top,) = Path(directory).iterdir()
        for path in top.iterdir():
            shutil.move(path, repository / path.name)
    for path in [*repository.rglob("__pycache__"), *repository.rglob("*.egg-info")]:
        shutil.rmtree(path)


def _row(project: Project, repository: Path, base: str, rootfs: Path) -> dict[str, Any]:
    changed = _git(repository, "diff", "--no-renames", "--name-only", base, "main").splitlines()
    tests = [path for path in changed if path.split("/")[0] in ("test", "tests")]
    sources = [path for path in changed if path not in tests and path.endswith(".py")]
    diff = ("diff", "--binary", "--no-renames", base, "main", "--")
    return {
        "instance_id": project.instance_id,
        "repo": project.repo,
        "version": project.old[0],
        "base_commit": base,
        "environment_setup_commit": base,
        "problem_statement": project.problem,
        "hints_text": "",
        "created_at": FIXED_DATE,
        "patch": _git(repository, *diff, *sources),
        "test_patch": _git(repository, *diff, *tests),
        "image": str(rootfs),
        "spec": {
            "repo_dir": f"/repos/{project.name}",
            "setup": [f'export PYTHONPATH="$PWD/{project.source}" PYTHONDONTWRITEBYTECODE=1'],
            "test_cmd": "python3 -m pytest -rA -p no:cacheprovider -o addopts=",
            "log_parser": "parse_log_pytest",
        },
    }


def _git(repository: Path, *arguments: str) -> str:
    identity = {
        f"GIT_{who}_{what}": "rollout" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    dates = {"GIT_AUTHOR_DATE": FIXED_DATE, "GIT_COMMITTER_DATE": FIXED_DATE}
    environment = (
        os.environ | identity | dates | {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    )
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", *arguments],
        cwd=repository,
        env=environment,
        check=True,
        capture_output=True,
    )
    return done.stdout.decode()


async def _find_tests(rows: list[dict[str, Any]], host: HostClient) -> None:
    """FAIL_TO_PASS and PASS_TO_PASS of each row, by running its tests without and with the fix."""

    async def find(row: dict[str, Any]) -> None:
        before, after = [await _statuses(host, row, fixed) for fixed in (False, True)]
        passing = [name for name, status in after.items() if status == "PASSED"]
        row["FAIL_TO_PASS"] = json.dumps([name for name in passing if before.get(name) != "PASSED"])
        row["PASS_TO_PASS"] = json.dumps([name for name in passing if before.get(name) == "PASSED"])
        if row["FAIL_TO_PASS"] == "[]":
            raise RuntimeError(f"{row['instance_id']}: no test fails before the fix and passes after it")

    for pair in range(0, len(rows), 2):
        await asyncio.gather(*map(find, rows[pair : pair + 2]))


async def _statuses(host: HostClient, row: dict[str, Any], fixed: bool) -> dict[str, str]:
    spec = row["spec"]
    info = await host.start(SandboxSpec(image=row["image"], owner="swe-instances"))
    async with SandboxClient(info.socket) as box:
        await box.write_file("/tmp/fix.diff", row["patch"] if fixed else "")
        await box.write_file("/tmp/tests.diff", row["test_patch"])
        fix = "git apply /tmp/fix.diff &&" if fixed else ""
        files = " ".join(path for path in files_of(row["test_patch"]) if path.endswith(".py"))
        result = await box.bash(
            f"(cd {spec['repo_dir']} && {spec['setup'][0]} && git checkout -q {row['base_commit']} && {fix}"
            f" git apply /tmp/tests.diff && {spec['test_cmd']} {files} | cat)",
            timeout=TESTS_S,
            max_output_chars=5_000_000,
        )
    await host.release(info.id)
    if result.exit_code != 0 or " passed" not in result.output:
        raise RuntimeError(f"{row['instance_id']}: its tests do not run: {result.output[-2000:]}")
    statuses = {}
    for line in result.output.splitlines():
        status, _, rest = line.partition(" ")
        if status in ("PASSED", "FAILED", "ERROR") and rest:
            statuses[rest.split()[0]] = status
    return statuses


if __name__ == "__main__":
    for made in instances():
        kinds = {kind: len(json.loads(made[kind])) for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        print(made["instance_id"], kinds)
