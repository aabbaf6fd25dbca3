"""What to do in an instance's image: where the repository lies, how its tests are run and read.

A row's own `spec` goes before all of it, then the `eval_script` of rows since release 5 of `swebench`,
then what the harness of the data set says of the repository at its version (`published`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from workers.handlers.swe.published import Published, published
from workers.handlers.swe.rows import Instance, files_of
from workers.handlers.swe.testfiles import file_of_smith

REPO_DIR = "/testbed"
CONDA = "/opt/miniconda3/bin/activate"
ACTIVATE = [f"if [ -f {CONDA} ]; then . {CONDA} && conda activate testbed; fi"]
"""As the images of SWE-bench, SWE-Gym and SWE-smith have it; elsewhere it does nothing."""
ACTIVATE_R2E = ["if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi"]

START_MARK = ">>>>> Start Test Output"
END_MARK = ">>>>> End Test Output"

R2E_PARSER = "r2e"
"""For rows of R2E-Gym, whose results are not read by a parser of swebench."""

CUTTING_PARSERS = {
    *("parse_log_pytest", "parse_log_pytest_options", "parse_log_astroid", "parse_log_flask"),
    *("parse_log_marshmallow", "parse_log_matplotlib", "parse_log_pvlib", "parse_log_pydicom"),
    *("parse_log_pylint", "parse_log_pyvista", "parse_log_requests", "parse_log_seaborn"),
    *("parse_log_sqlfluff", "parse_log_xarray"),
}
"""Parsers that end a test's name at its first blank."""

NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Files of a test patch that are data and no test modules; the official harness's list."""

_PYTEST_CALL = re.compile(r"(?:^|[\s;&|(/])(?:pytest|py\.test)(?=$|[\s;&|)])")
_TOX_CALL = re.compile(r"(?:^|[\s;&|(])tox --current-env(?=\s)")
"""It runs pytest in the environment that is there, with its variables."""
_UNITTEST_CALL = re.compile(
    r"(?:^|[\s;&|(/])(runtests\.py|unittest|(?<=-m )[\w.]+\.test|test\.py|\w*unittest\w*\.py)(?=$|[\s;&|)])"
)
_OTHER_RUNNER = re.compile(r"\b(?:tox(?! --current-env)|nox)\b")
_IN_PROCESSES = re.compile(r"runtests\.py(?!.*--parallel 1\b)")
"""Django's runner tells one process nothing of the tests of others."""
_NO_PLUGIN = re.compile(r"PYTHONPATH=|\benv -i\b|\bpython[\d.]* -\w*[EI]")
"""What keeps pytest from a plug-in on PYTHONPATH."""


@dataclass(frozen=True)
class Spec:
    """How one instance is run."""

    repo_dir: str
    setup: list[str]
    """Shell lines of the environment, before tests."""
    shell_setup: list[str]
    """The same for the agent's shell."""
    install: list[str]
    """Shell lines after the patch. They run code of the patch."""
    before_tests: list[str]
    test_script: str
    """Shell text whose output is graded, and whose exit code counts."""
    log_parser: str
    eval_type: str
    recorder: bool
    """Whether the tests tell their outcomes apart from their output."""
    test_files: list[str]
    """Paths the specified tests come from, as far as names tell."""
    one_script: bool = False
    """The tests run in the shell that `install` leaves, as where all of it is one script."""
    test_timeout_s: float | None = None


def spec_of(instance: Instance) -> Spec:
    """The spec of an instance.

    Raises:
        ValueError: There is nothing to run it with; the message names the fields that would say.
    """
    own = instance.spec
    repo_dir = own.repo_dir or REPO_DIR
    setup = own.setup
    if setup is None:
        setup = ACTIVATE_R2E if instance.source == "r2e-gym" else ACTIVATE
    shell_setup = setup
    files = test_files(instance)
    install, before = [*own.pre_install, *own.install], list(own.eval_commands)
    parser, eval_type = own.log_parser or instance.log_parser, own.eval_type or instance.eval_type
    if own.test_cmd is not None:
        tests = _with_files(own.test_cmd, _directives(instance, files))
    elif instance.eval_script is not None:
        install, tests = _split(instance.eval_script)
        # The script makes its environment itself.
        setup = own.setup or []
    else:
        said = published(instance)
        tests = _published_command(instance, said)
        install, before = [*(before or said.before), *(install or said.install)], said.build
        parser, eval_type = parser or said.parser, eval_type or said.eval_type
    if parser is None and instance.expected is not None:
        parser = R2E_PARSER
    if parser is None:
        parser = published(instance).parser
    recorder = own.recorder
    if recorder is None:
        # pytest's own tests start pytest within pytest, and their recorded names come from its output.
        known = is_one_pytest_run(tests) or unittest_runner(tests) is not None
        recorder = known and instance.repo.lower() != "pytest-dev/pytest"
    eval_type = eval_type or "pass_and_fail"
    if instance.expected is None and eval_type == "pass_and_fail":
        _check_names(instance, parser)
    return Spec(
        repo_dir=repo_dir,
        setup=setup,
        shell_setup=shell_setup,
        install=install,
        before_tests=before,
        test_script=tests,
        log_parser=parser,
        eval_type=eval_type,
        recorder=recorder,
        test_files=files,
        one_script=own.test_cmd is None,
        test_timeout_s=own.test_timeout_s,
    )


def _check_names(instance: Instance, parser: str) -> None:
    """Refuse names that the parser never gives: they would fail every patch, the right one too."""
    if parser not in CUTTING_PARSERS:
        return
    for kind, names in (("FAIL_TO_PASS", instance.fail_to_pass), ("PASS_TO_PASS", instance.pass_to_pass)):
        if cut := [name for name in names if len(name.split()) != 1]:
            raise ValueError(
                f"{kind}: {cut[0]!r} has a blank, and {parser} ends names at the first one, so this test "
                f"never passes ({len(cut)} such names): cut the name there, or set spec.log_parser to "
                "'parse_log_pytest_v2'"
            )


def is_one_pytest_run(script: str) -> bool:
    """Whether the shell text starts pytest exactly once, in a way that lets it load a plug-in of ours."""
    hindered = _OTHER_RUNNER.search(script) or _NO_PLUGIN.search(script)
    return len(_PYTEST_CALL.findall(script) + _TOX_CALL.findall(script)) == 1 and not hindered


def unittest_runner(script: str) -> str | None:
    """How the shell text names the one runner of `unittest` that it starts; None if it starts others."""
    hindered = _PYTEST_CALL.search(script) or _OTHER_RUNNER.search(script) or _NO_PLUGIN.search(script)
    runners = _UNITTEST_CALL.findall(script)
    alone = len(runners) == 1 and not hindered and not _IN_PROCESSES.search(script)
    return runners[0] if alone else None


def test_files(instance: Instance) -> list[str]:
    """Paths that hold the specified tests: those of the test patch, and those the tests' names begin with."""
    if instance.expected is not None:
        return sorted(f"r2e_tests/{name}" for name in instance.hidden_tests)
    names = instance.fail_to_pass + instance.pass_to_pass
    if instance.source == "swe-smith":
        return sorted({file for name in names if (file := file_of_smith(name))})
    named = {name.split("::")[0] for name in names if "::" in name}
    return sorted({*files_of(instance.test_patch), *(name for name in named if not name.startswith("/"))})


def _with_files(command: str, names: Iterable[str]) -> str:
    listed = " ".join(map(shlex.quote, names))
    return command.replace("{files}", listed) if "{files}" in command else f"{command} {listed}".rstrip()


def _published_command(instance: Instance, said: Published) -> str:
    """The harness's command, with what it is told to run."""
    names: list[str] = []
    if said.files in ("patch", "modules"):
        changed = re.findall(r"^diff --git a/.* b/(.*)$", instance.test_patch, re.MULTILINE)
        names = [name for name in changed if not name.endswith(NOT_TESTS)]
    if said.files == "modules":
        modules = (name.removesuffix(".py").removeprefix("tests/") for name in names)
        names = [name.replace("/", ".") for name in modules]
    elif said.files == "cases":
        names = [" or ".join(re.findall(r"\[case ([^\]]+)\]", instance.test_patch))]
    elif said.files == "names":
        lists = (instance.fail_to_pass, instance.pass_to_pass)
        names = [name for tests in lists for name in sorted({test.split("::", 1)[0] for test in tests})]
    return _with_files(said.tests, names)


def _directives(instance: Instance, files: list[str]) -> list[str]:
    """What a command of the row's `spec` is told to run: the files of the tests."""
    if instance.source == "r2e-gym":
        return ["r2e_tests"]
    if any("::" in name for name in instance.fail_to_pass):
        return sorted({name.split("::")[0] for name in instance.fail_to_pass + instance.pass_to_pass})
    return [name for name in files if not name.endswith(NOT_TESTS)]


def _split(script: str) -> tuple[list[str], str]:
    """The lines before the tests, and those of the tests, of an official `eval_script`."""
    lines = [line for line in script.strip().split("\n") if line not in ("#!/bin/bash", "set -uxo pipefail")]
    starts = [number for number, line in enumerate(lines) if START_MARK in line]
    ends = [number for number, line in enumerate(lines) if END_MARK in line]
    if len(starts) != 1 or len(ends) != 1 or ends[0] <= starts[0]:
        raise ValueError(
            f"eval_script: needs one line with {START_MARK!r} and after it one with {END_MARK!r}"
        )
    return lines[: starts[0]], "\n".join(lines[starts[0] + 1 : ends[0]])
