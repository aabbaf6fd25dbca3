"""What is said of repositories of SWE data sets, held against the harnesses that say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import swe_specifications as harnesses
from tests.unit.test_swe_rows import BENCH, R2E, SMITH, read
from workers.handlers.swe.specs import spec_of
from workers.scoring.swe_tests import SMITH_PARSERS, _grading

SPECIFICATIONS = json.loads(harnesses.FILE.read_text())
TEST_PATCH = "".join(
    f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b [case one]\n"
    for path in ("tests/b/test_b.py", "tests/a.json", "tests/test_a.py")
)
SCRIPTS = """
from swebench.harness.test_spec.create_scripts import make_eval_script_list
from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS as SPECS
lower = {repo.lower(): repo for repo in SPECS}
patch, wanted, scripts = open(sys.argv[2]).read(), json.load(open(sys.argv[3])), []
for repo, version in wanted:
    row = {"repo": lower[repo], "version": version, "test_patch": patch}
    scripts.append(make_eval_script_list(
        row, SPECS[lower[repo]][version], "testbed", "/testbed", "base", patch))
print(json.dumps(scripts))
"""
LOGS = """
sys.path.insert(0, sys.argv[2])
for name in ("docker", "docker.models", "ghapi"):
    stub(name)
stub("docker.models.containers", Container=object)
stub("ghapi.all", GhApi=object)
stub("dotenv", load_dotenv=lambda: None)
from swesmith.profiles import python
log = open(sys.argv[3]).read()
print(json.dumps({
    name: getattr(python, name).log_parser(None, log)
    for name in ("PythonProfile", "AutogradAc044f0d", "PythonSlugify872b3750", "TornadoD5ac65c1")
}))
"""
LOG = """tests/test_a.py::T::test_x PASSED                [  1%]
tests/test_a.py::test_y[a-b]   FAILED
tests/test_a.py::test_z[a b] PASSED
tests/test_b.py::test_s SKIPPED (no) [ 50%]
tests/test_b.py::test_e XFAIL
FAILED tests/test_a.py::test_y[a-b] - assert 1
[gw0] PASSED tests/test_c.py::test_gw
[gw3] ERROR tests/test_c.py::test_ge
[gw0] [ 10%] PASSED tests/test_c.py::test_percent
test_ok (tornado.test.web_test.T) ... ok
test_ok, of slugify (__main__.T) ... ok
test_fail (__main__.T) ... FAIL
test_error (__main__.T.test_error) ... ERROR
test_skip (tornado.test.web_test.T) ... skipped 'no'
test_said (a.b.T) ... a warning ... ok
FAIL: test_fail (tornado.test.web_test.T)
ERROR: test_two (tornado.test.web_test.T)
Ran 5 tests ok
"""


def test_the_file_is_what_the_harnesses_say() -> None:
    made = harnesses.made()
    for source in ("swe-bench", "swe-smith", "swe-gym", "r2e-gym"):
        assert SPECIFICATIONS[source] == made[source], "python -m tests.helpers.swe_specifications"
    assert harnesses.FILE.read_text() == harnesses.text_of(made)


def test_a_row_is_run_as_the_official_script_runs_it_at_every_version(tmp_path: Path) -> None:
    entries = SPECIFICATIONS["swe-bench"]
    wanted = [(entry["repo"], version) for entry in entries for version in entry["versions"]]
    assert len(wanted) > 500
    (tmp_path / "patch").write_text(TEST_PATCH)
    (tmp_path / "wanted").write_text(json.dumps(wanted))
    package = harnesses.released("swebench")
    scripts = harnesses.run(SCRIPTS, package, tmp_path / "patch", tmp_path / "wanted")
    begin, end = ": '>>>>> Start Test Output'", ": '>>>>> End Test Output'"
    for (repo, version), script in zip(wanted, scripts, strict=True):
        row = BENCH | {"repo": repo, "version": version, "test_patch": TEST_PATCH}
        row |= {"FAIL_TO_PASS": ["test_a (a.T)"], "PASS_TO_PASS": []} if "django" in repo else {}
        spec = spec_of(read(row))
        official = script[script.index(begin) + 1 : script.index(end)]
        assert spec.test_script.split("\n") == "\n".join(official).split("\n"), (repo, version)
        # Before the tests the script goes there, activates, looks around, puts tests in place, which is done
        # apart here; what is left is what the specification says.
        rest = [line for line in script[: script.index(begin)] if not line.startswith(OURS)]
        ours = [line for line in (*spec.install, *spec.before_tests) if not line.startswith(OURS)]
        assert ours == rest, (repo, version)
        assert spec.one_script
        placed = next(number for number, line in enumerate(script) if line.startswith("git apply"))
        assert all(line not in script[placed:] for line in spec.install), "before tests are in place"
        assert all(line not in script[:placed] for line in spec.before_tests), "built when they are"


OURS = ("source /opt", "conda activate", "cd /testbed", "git ", 'echo "No test files')


def test_every_parser_is_one_of_the_installed_harness_or_of_smith() -> None:
    registry = _grading().PARSER_REGISTRY
    for source in ("swe-bench", "swe-smith", "swe-gym"):
        assert {entry["parser"] for entry in SPECIFICATIONS[source]} <= registry.keys()


def test_the_parsers_of_smith_read_what_its_own_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    packages = harnesses.released("swebench"), harnesses.released("swesmith")
    official = harnesses.run(LOGS, *packages, tmp_path / "log")
    assert {f"swesmith.{name}" for name in official} == SMITH_PARSERS.keys()
    for name, statuses in official.items():
        ours = _grading().PARSER_REGISTRY[f"swesmith.{name}"](LOG, None)
        assert {test: status.replace("ERROR", "FAILED") for test, status in ours.items()} == {
            test: status.replace("ERROR", "FAILED") for test, status in statuses.items()
        }, name


@pytest.mark.parametrize(
    ("row", "command"),
    [
        (
            BENCH | {"repo": "python/mypy", "version": "1.4", "environment_setup_commit": None},
            "pytest -n0 -rA -k one",
        ),
        (
            SMITH | {"repo": "swesmith/dask__dask.5f61e423", "PASS_TO_PASS": ["tests/test_b.py::test_y"]},
            "source /opt/miniconda3/bin/activate; conda activate testbed; "
            "pytest --disable-warnings --color=no --tb=no --verbose tests/test_a.py tests/test_b.py",
        ),
        (
            R2E
            | {
                "repo_name": "tornado",
                "execution_result_content": {
                    "test_file_names": ["test_1.py", "tornado_unittest_runner.py"],
                    "test_file_codes": ["x", "y"],
                },
            },
            ".venv/bin/python -W ignore r2e_tests/tornado_unittest_runner.py",
        ),
    ],
)
def test_commands_that_are_made_of_a_row(row: dict[str, Any], command: str) -> None:
    row |= {"test_patch": TEST_PATCH.replace("a [case one]", "")} if "test_patch" in row else {}
    if row.get("repo") == "python/mypy":
        row = row | {"test_patch": "diff --git a/x.test b/x.test\n+[case one]\n"}
    assert spec_of(read(row)).test_script == command
