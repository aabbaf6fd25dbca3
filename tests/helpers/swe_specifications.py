"""What the harnesses of SWE data sets say of their repositories, read from the harnesses themselves.

`python -m tests.helpers.swe_specifications` writes `workers/handlers/swe/specifications.json` anew from two
releases of the package index, by version and hash, and from two repositories that are in no index: a clone of
each is named by `ROLLOUT_SWE_GYM_CLONE` and `ROLLOUT_R2E_GYM_CLONE`; without one, what the file has stays.
The harnesses run in processes of their own, with stubs for what they import besides.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from sandbox import paths

FILE = Path(__file__).parents[2] / "workers/handlers/swe/specifications.json"
HOME = paths.rollout_home() / "swe-harnesses"
RELEASES = {
    "swebench": ("4.1.0", "1243776f720047cc9e20a427f7a52b75c13a07abda6154fb60fe77f82ec8af57"),
    "swesmith": ("0.0.9", "cbb98a52fc573b38032cde1179b6ce5f5862ce7c31d6931cfd5b8ad4969ce900"),
}
"""The last release of `swebench` that has specifications by version, and the profiles of SWE-smith."""
GYM = ("ROLLOUT_SWE_GYM_CLONE", "SWE-Gym/SWE-Bench-Fork", "242429c188fcfd06aad13fce9a54d450470bf0ac")
R2E = ("ROLLOUT_R2E_GYM_CLONE", "R2E-Gym/R2E-Gym", "69bc953542b428d1e4c8a59ce3ea1a32e50ef0f0")
PIP_S = 300
NO_LINES: dict[str, Any] = {"before": [], "install": [], "build": []}

START = """
import json, sys, types
def stub(name, path=None, **values):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [path] if path else []
    vars(module).update(values)
for name in ("swebench", "swebench.harness"):  # not what these import besides
    stub(name, f"{sys.argv[1]}/{name.replace('.', '/')}")
"""
TABLES = """
from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS as SPECS
from swebench.harness import constants, log_parsers
lines = lambda value: [value] if isinstance(value, str) else list(value)
fail_only = getattr(constants, "FAIL_ONLY_REPOS", ())
entries = []
for repo, versions in SPECS.items():
    parser = log_parsers.MAP_REPO_TO_PARSER.get(repo)
    python = getattr(constants, "MAP_REPO_TO_EXT", {}).get(repo, "py") == "py"
    if parser is None or repo == "Automattic/wp-calypso":  # nothing that reads it; commands made of the row
        continue
    for version, spec in versions.items():
        if "test_cmd" not in spec:
            continue
        entries.append({
            "repo": repo.lower(), "version": version, "parser": parser.__name__,
            "eval_type": "fail_only" if repo in fail_only else "pass_and_fail",
            "before": lines(spec.get("eval_commands", [])) if python else [],
            "install": lines(spec.get("install", [])) if python else [],
            "build": lines(spec.get("build", [])),
            "tests": lines(spec["test_cmd"]),
            "files": "patch" if python else "",
        })
print(json.dumps(entries))
"""
PROFILES = """
sys.path.insert(0, sys.argv[2])
for name in ("docker", "docker.models", "ghapi"):
    stub(name)
stub("docker.models.containers", Container=object)
stub("ghapi.all", GhApi=object)
stub("dotenv", load_dotenv=lambda: None)
from swesmith.profiles import registry
from swesmith.profiles.python import PythonProfile
entries = []
for profile in registry.values():
    # One command there ends in `-k` and takes what follows from a test patch, which rows do not have.
    if isinstance(profile, PythonProfile) and not profile.test_cmd.endswith(" -k"):
        entries.append({
            "repo": profile.repo_name.lower(), "eval_type": "pass_and_fail",
            "parser": "swesmith." + type(profile).log_parser.__qualname__.split(".")[0],
            "before": [], "install": [], "build": [], "tests": [profile.test_cmd],
            "files": "names" if profile.min_testing else "",
        })
print(json.dumps(entries))
"""
PARSERS = {
    # The same under a name that release 5 has: it reads the summary of pytest, which these commands print.
    "parse_log_pytest_pydantic": "parse_log_pytest",
    "swesmith.Paramiko23f92003": "parse_log_pytest",
}
CASES = "python/mypy"
"""Its tests are named by the cases in the test patch."""


def released(name: str) -> Path:
    """A release of the package index, unpacked, fetched now if it is not there."""
    version, digest = RELEASES[name]
    place = HOME / f"{name}-{version}"
    if not place.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=HOME) as directory:
            requirement = Path(directory) / "requirement.txt"
            requirement.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
            flags = ["-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
            # The one authority that tests have is not that of the index.
            env = {key: value for key, value in os.environ.items() if not value.endswith("/authority.pem")}
            command = [sys.executable, "-m", "pip", "download", *flags, "-d", directory, "-r", requirement]
            subprocess.run(command, check=True, timeout=PIP_S, env=env)
            (wheel,) = Path(directory).glob("*.whl")
            assert hashlib.sha256(wheel.read_bytes()).hexdigest() == digest
            unpacked = Path(directory) / "unpacked"
            zipfile.ZipFile(wheel).extractall(unpacked)
            unpacked.rename(place)
    return place


def run(script: str, *arguments: Path) -> Any:
    """What a script says in JSON, in a process whose harness is `swebench` below the first path."""
    command = [sys.executable, "-c", START + script, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def swe_bench() -> list[dict[str, Any]]:
    return _grouped(run(TABLES, released("swebench")))


def swe_smith() -> list[dict[str, Any]]:
    return _grouped(run(PROFILES, released("swebench"), released("swesmith")))


def swe_gym() -> list[dict[str, Any]] | None:
    """None without a clone."""
    with tempfile.TemporaryDirectory() as directory:
        for name in ("constants", "log_parsers"):
            if (text := _of_clone(GYM, f"swebench/harness/{name}.py")) is None:
                return None
            file = Path(directory) / f"swebench/harness/{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return _grouped(run(TABLES, Path(directory)))


def r2e_gym() -> list[dict[str, Any]] | None:
    """None without a clone. A runner that comes with the hidden tests has an entry by its file's name."""
    places = [f"src/r2egym/repo_analysis/{name}.py" for name in ("repo_analysis_args", "repo_testextract")]
    texts = [_of_clone(R2E, place) for place in places]
    if texts[0] is None or texts[1] is None:
        return None
    (method,) = (
        node
        for node in ast.walk(ast.parse(texts[0]))
        if isinstance(node, ast.FunctionDef) and node.name == "tests_cmd"
    )
    # `if self.repo_name == RepoName.NAME: return "COMMAND"`
    branches: Any = [node for node in method.body if isinstance(node, ast.If)]
    commands = {branch.test.comparators[0].attr: branch.body[0].value.value for branch in branches}
    for node in ast.walk(ast.parse(texts[1])):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "r2e_tests/" in node.value:
            commands[node.value.split("r2e_tests/")[1]] = node.value
    common = {"parser": "r2e", "eval_type": "pass_and_fail", "files": ""} | NO_LINES
    return _grouped([{"repo": name} | common | {"tests": [command]} for name, command in commands.items()])


def _of_clone(source: tuple[str, str, str], path: str) -> str | None:
    variable, _, commit = source
    if variable not in os.environ:
        return None
    command = ["git", "-C", os.environ[variable], "show", f"{commit}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _grouped(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry of all versions of a repository that have the same."""
    groups: dict[str, dict[str, Any]] = {}
    for entry in entries:
        entry["parser"] = PARSERS.get(entry["parser"], entry["parser"])
        if entry["repo"] == "django/django":
            entry["files"] = "modules"
        if entry["repo"] == CASES:
            entry["files"] = "cases"
        version = entry.pop("version", None)
        group = groups.setdefault(json.dumps(entry), {"versions": None} | entry)
        if version is not None:
            group["versions"] = sorted([*(group["versions"] or []), version])
    return sorted(groups.values(), key=lambda group: (group["repo"], group["versions"] or []))


def made() -> dict[str, Any]:
    """All that the file has, as it is to be."""
    old = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {
        "sources": {
            "swe-bench": f"swebench {RELEASES['swebench'][0]}",
            "swe-gym": f"{GYM[1]}@{GYM[2]}",
            "swe-smith": f"swesmith {RELEASES['swesmith'][0]}",
            "r2e-gym": f"{R2E[1]}@{R2E[2]}",
        },
        "swe-bench": swe_bench(),
        "swe-gym": swe_gym() or old["swe-gym"],
        "swe-smith": swe_smith(),
        "r2e-gym": r2e_gym() or old["r2e-gym"],
    }


def text_of(specifications: dict[str, Any]) -> str:
    """The file's text: one line an entry."""
    parts = [f' "sources": {json.dumps(specifications["sources"], indent=2)}']
    for source in ("swe-bench", "swe-gym", "swe-smith", "r2e-gym"):
        parts.append(f' "{source}": [\n' + ",\n".join(map(json.dumps, specifications[source])) + "\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text_of(made()))
