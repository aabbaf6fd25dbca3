"""Grading the tests of a SWE instance with the official harness's own parsers and report.

Called through `score`: `swebench` is large, and a log is what a model's code has printed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
import types
from functools import partial
from pathlib import Path
from typing import Any

_PATCH_APPLIED = "patch_successfully_applied"


def _grading() -> Any:
    """`swebench.harness.grading`, without what its package imports besides: docker, datasets and modal.

    None of that grades, and each scorer process would hold it: 167 MB and 3.0 s of start by the package's own
    door, 18 MB and 0.03 s by this one (swebench 5.0.2). The layout is the library's own affair, so setup.cfg
    holds it below the next release.
    """
    name = "swebench.harness"
    if name not in sys.modules and (spec := importlib.util.find_spec("swebench")) is not None:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(place) / "harness") for place in spec.submodule_search_locations or ()]
        sys.modules[name] = package
    from swebench.harness import grading

    grading.PARSER_REGISTRY.update({parser: partial(_read, forms) for parser, forms in SMITH_PARSERS.items()})
    return grading


_WORDS = "FAILED|PASSED|SKIPPED|ERROR|XFAIL"
SMITH_PARSERS = {
    "swesmith.PythonProfile": [rf"(?P<name>\S+)\s+(?P<status>{_WORDS})"],
    "swesmith.AutogradAc044f0d": [rf"\[gw\d\]\s(?P<status>{_WORDS})\s(?P<name>\S+)"],
    "swesmith.PythonSlugify872b3750": [r"(?P<name>[\w\-,.\s()']+)\s\.{3}\s(?P<status>ok|FAIL|ERROR)$"],
    "swesmith.TornadoD5ac65c1": [
        r"(?P<name>.*?) \.\.\. (?:.* \.\.\. )?(?P<status>ok)$",
        r"(?P<name>.*?) \.\.\. (?P<status>skipped) ",
        r"(?P<status>ERROR|FAIL):\s*(?P<name>\S+ \S+)",
    ],
}
"""Forms of the lines that the profiles of SWE-smith read, by the name of a profile's class."""
_STATUSES = {"ok": "PASSED", "FAIL": "FAILED", "skipped": "SKIPPED"}


def _read(forms: list[str], log: str, _: Any) -> dict[str, str]:
    """Status of each test, by the first form that is a line's; the last word of a test counts."""
    compiled = [re.compile(form) for form in forms]
    statuses = {}
    for line in log.split("\n"):
        if found := next(filter(None, (form.match(line) for form in compiled)), None):
            statuses[found["name"]] = _STATUSES.get(found["status"], found["status"])
    return statuses


def has_parser(name: str) -> bool:
    """Whether the harness has a log parser of that name."""
    return name in _grading().PARSER_REGISTRY


def grade(payload: dict[str, Any]) -> dict[str, Any]:
    """The official report of one run of the tests.

    Args:
        payload: `instance_id`, `repo`, `version`, `fail_to_pass`, `pass_to_pass`, `log_parser`, `eval_type`,
            `patch` and `log`, which has the official marks around the tests' output.

    Returns:
        `resolved`, `graded` (whether the log was one of tests that ran) and `tests_status`, as
        `swebench.harness.grading.get_eval_report` has them, and `skipped`: names of tests that were.

    Raises:
        ValueError: The parser is none of the harness's.
    """
    grading = _grading()
    from swebench.types import TestSpec

    parser = payload["log_parser"]
    if parser not in grading.PARSER_REGISTRY:
        known = ", ".join(sorted(grading.PARSER_REGISTRY))
        raise ValueError(f"log_parser {parser!r} is none of swebench's: {known}")
    spec = TestSpec(
        instance_id=payload["instance_id"],
        image="",
        eval_script_list=[],
        repo=payload["repo"],
        version=payload["version"],
        FAIL_TO_PASS=payload["fail_to_pass"],
        PASS_TO_PASS=payload["pass_to_pass"],
        log_parser=parser,
        eval_type=payload["eval_type"],
    )
    asked = [*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS]
    prediction = {
        "instance_id": spec.instance_id,
        "model_patch": payload["patch"],
        "model_name_or_path": "rollout",
    }
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "test_output.txt"
        log.write_text(payload["log"], encoding="utf-8")
        reports = grading.get_eval_report(spec, prediction, str(log), include_tests_status=True)
        report = reports[spec.instance_id]
        statuses, _ = grading.get_logs_eval(spec, str(log))
    return {
        "resolved": report["resolved"],
        "graded": report[_PATCH_APPLIED],
        "tests_status": report.get("tests_status", {}),
        "skipped": [name for name in asked if statuses.get(name) == "SKIPPED"],
    }


_SUMMARY = "short test summary info"
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def grade_expected(payload: dict[str, Any]) -> dict[str, Any]:
    """R2E-Gym's rule: every test has exactly the status that `expected` gives, and no test is missing or new.

    Its names are those of pytest's summary from after the file's, with dots: `TestClass.test_name`.

    Args:
        payload: `log` and `expected`, name → status.

    Returns:
        `resolved`, `graded`, `tests_status` with the names of `matching` and `differing` tests.
    """
    statuses: dict[str, str] = {}
    log = _COLOUR.sub("", payload["log"])
    summary = log.split(_SUMMARY, 1)[1] if _SUMMARY in log else ""
    for line in summary.splitlines():
        for status in ("PASSED", "FAILED", "ERROR"):
            if line.startswith(f"{status} "):
                statuses[_short(line.removeprefix(f"{status} "))] = status
    expected = {_short(name, "."): status for name, status in payload["expected"].items()}
    matching = sorted(name for name, status in expected.items() if statuses.get(name) == status)
    differing = sorted((expected.keys() | statuses.keys()) - set(matching))
    return {
        "resolved": bool(expected) and not differing,
        "graded": bool(statuses),
        "tests_status": {"matching": matching, "differing": differing},
        "skipped": [],  # for what it expects of a test that is no status
    }


def _short(name: str, separator: str = "::") -> str:
    name = _COLOUR.sub("", name).split(" - ")[0].strip()
    parts = name.split(separator)
    return ".".join(parts[1:]) if separator == "::" and len(parts) > 1 else name
