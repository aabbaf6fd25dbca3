"""What to do in an instance's image: where the repository lies, how its tests are run and read.

Release 5 of the `swebench` package has no table of commands by repository and version any more: rows carry an
`eval_script` instead, and that is what is run. For rows published before, and for SWE-Gym, the commands below
are those of the harnesses they were validated with (swebench 4, `harness/constants/python.py`; SWE-Gym's fork
of it). A row's own `spec` goes before all of it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from workers.handlers.swe.rows import Instance, files_of

REPO_DIR = "/testbed"
CONDA = "/opt/miniconda3/bin/activate"
ACTIVATE = [f"if [ -f {CONDA} ]; then . {CONDA} && conda activate testbed; fi"]
"""As the images of SWE-bench, SWE-Gym and SWE-smith have it; elsewhere it does nothing."""
ACTIVATE_R2E = ["if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi"]

START_MARK = ">>>>> Start Test Output"
END_MARK = ">>>>> End Test Output"

PYTEST = "pytest -rA"
PYTEST_PARSER = "parse_log_pytest"
DJANGO = "django/django"
REPOSITORIES = {
    "astropy/astropy": (
        "pytest -rA -vv -o console_output_style=classic --tb=no",
        "parse_log_astropy",
    ),
    DJANGO: (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
        "parse_log_django",
    ),
    "matplotlib/matplotlib": (PYTEST, "parse_log_matplotlib"),
    "mwaskom/seaborn": ("pytest --no-header -rA", "parse_log_seaborn"),
    "pallets/flask": (PYTEST, PYTEST_PARSER),
    "psf/requests": (PYTEST, "parse_log_requests"),
    "pydata/xarray": (PYTEST, PYTEST_PARSER),
    "pylint-dev/pylint": (PYTEST, "parse_log_pylint"),
    "pytest-dev/pytest": (PYTEST, PYTEST_PARSER),
    "scikit-learn/scikit-learn": (PYTEST, "parse_log_scikit"),
    "sphinx-doc/sphinx": ("tox --current-env -epy39 -v --", "parse_log_sphinx"),
    "sympy/sympy": (
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
        "parse_log_sympy",
    ),
    # Of Lite's development split and SWE-Gym:
    "marshmallow-code/marshmallow": (PYTEST, PYTEST_PARSER),
    "pvlib/pvlib-python": (PYTEST, PYTEST_PARSER),
    "pydicom/pydicom": (PYTEST, "parse_log_pydicom"),
    "pylint-dev/astroid": (PYTEST, PYTEST_PARSER),
    "pyvista/pyvista": (PYTEST, PYTEST_PARSER),
    "sqlfluff/sqlfluff": (PYTEST, PYTEST_PARSER),
    "bokeh/bokeh": ("pytest -rA -n0", PYTEST_PARSER),
    "conan-io/conan": ("pytest -n0 -rA", PYTEST_PARSER),
    "dask/dask": ("pytest -n0 -rA --color=no", PYTEST_PARSER),
    "facebookresearch/hydra": ("pytest -n0 -rA --tb=long", PYTEST_PARSER),
    "getmoto/moto": ("pytest -n0 -rA", PYTEST_PARSER),
    "iterative/dvc": (PYTEST, PYTEST_PARSER),
    "modin-project/modin": ("pytest -n0 -rA", PYTEST_PARSER),
    "pandas-dev/pandas": ("pytest -rA --tb=long", PYTEST_PARSER),
    "project-monai/monai": (PYTEST, PYTEST_PARSER),
    "pydantic/pydantic": (
        "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
        PYTEST_PARSER,
    ),
    "python/mypy": ("pytest -n0 -rA", PYTEST_PARSER),
}
"""Command of the tests and parser of their log (of release 5's registry), by repository in lower case."""

R2E_PARSER = "r2e"
"""For rows of R2E-Gym, whose results are not read by a parser of swebench."""

CUTTING_PARSERS = {
    *(PYTEST_PARSER, "parse_log_pytest_options", "parse_log_astroid", "parse_log_flask"),
    *("parse_log_marshmallow", "parse_log_matplotlib", "parse_log_pvlib", "parse_log_pydicom"),
    *("parse_log_pylint", "parse_log_pyvista", "parse_log_requests", "parse_log_seaborn"),
    *("parse_log_sqlfluff", "parse_log_xarray"),
}
"""Parsers that end a test's name at its first blank."""

NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Files of a test patch that are data and no test modules; the official harness's list."""

_PYTEST_CALL = re.compile(r"(?:^|[\s;&|(/])(?:pytest|py\.test)(?=$|[\s;&|)])")
_OTHER_RUNNER = re.compile(r"\b(?:tox|nox|runtests\.py)\b")
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
    """Whether pytest tells its outcomes apart from its output."""
    test_files: list[str]
    """Paths the specified tests come from, as far as names tell."""
    applies_test_patch: bool = False
    """The `install` lines bring the test patch themselves (an `eval_script`)."""
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
    _, usual_parser = REPOSITORIES.get(instance.repo.lower(), (PYTEST, PYTEST_PARSER))
    parser = own.log_parser or instance.log_parser or usual_parser
    files = test_files(instance)
    if instance.eval_script is not None and own.test_cmd is None:
        (install, tests), brings_tests = _split(instance.eval_script), True
        # The script makes its environment itself.
        setup = own.setup or []
    else:
        install, brings_tests = [*own.pre_install, *own.install], False
        tests = own.test_cmd or _command(instance)
        listed = " ".join(map(shlex.quote, _directives(instance, files)))
        tests = tests.replace("{files}", listed) if "{files}" in tests else f"{tests} {listed}".rstrip()
    recorder = own.recorder
    if recorder is None:
        # pytest's own tests start pytest within pytest, and their recorded names come from its output.
        recorder = is_one_pytest_run(tests) and instance.repo.lower() != "pytest-dev/pytest"
    if instance.expected is None and (instance.eval_type or own.eval_type) == "pass_and_fail":
        _check_names(instance, parser)
    return Spec(
        repo_dir=repo_dir,
        setup=setup,
        shell_setup=shell_setup,
        install=install,
        before_tests=list(own.eval_commands),
        test_script=tests,
        log_parser=R2E_PARSER if instance.expected is not None and own.log_parser is None else parser,
        eval_type=instance.eval_type or own.eval_type,
        recorder=recorder,
        test_files=files,
        applies_test_patch=brings_tests,
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
    return len(_PYTEST_CALL.findall(script)) == 1 and not hindered


def test_files(instance: Instance) -> list[str]:
    """Paths that hold the specified tests: those of the test patch, and those the tests' names begin with."""
    if instance.expected is not None:
        return sorted(f"r2e_tests/{name}" for name in instance.hidden_tests)
    named = {name.split("::")[0] for name in instance.fail_to_pass + instance.pass_to_pass if "::" in name}
    return sorted({*files_of(instance.test_patch), *(name for name in named if not name.startswith("/"))})


def _command(instance: Instance) -> str:
    if instance.source == "swe-smith":
        return "pytest -rA --tb=no --disable-warnings --color=no"
    if instance.source == "r2e-gym":
        # What `run_tests.sh` in its images does; that file lies where the agent could change it.
        warnings = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning'"
        return f"{warnings} .venv/bin/python -W ignore -m pytest -rA"
    try:
        return REPOSITORIES[instance.repo.lower()][0]
    except KeyError:
        raise ValueError(
            f"no test command is known for {instance.repo!r}: take the row from a release of the set which "
            "has `eval_script` and `log_parser`, or give `spec.test_cmd` and `spec.log_parser`"
        ) from None


def _directives(instance: Instance, files: list[str]) -> list[str]:
    """What the test command is told to run: of a test patch its test modules, else the files of the tests."""
    if instance.source == "r2e-gym":
        return ["r2e_tests"]
    if instance.spec.test_cmd is not None and any("::" in name for name in instance.fail_to_pass):
        return sorted({name.split("::")[0] for name in instance.fail_to_pass + instance.pass_to_pass})
    if instance.test_patch:
        files = [name for name in files_of(instance.test_patch) if not name.endswith(NOT_TESTS)]
    if instance.repo.lower() != DJANGO:
        return files
    modules = (name.removeprefix("tests/").removesuffix(".py") for name in files)
    return [name.replace("/", ".") for name in modules]


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
