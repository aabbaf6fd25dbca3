"""Which tests are known to fail, what makes one fail for sure, and what is told of a patch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.handlers.swe.falsifying import falsify
from workers.handlers.swe.recording import without_unmarked_failures
from workers.handlers.swe.suspicion import suspicions
from workers.handlers.swe.testfiles import Place, TestFiles, place_of

MARKS = """
import pytest, unittest
known = pytest.mark.xfail(reason="known")
CASES = [1, pytest.param(2, marks=pytest.mark.xfail)]

def test_plain(): pass
@pytest.mark.xfail
def test_marked(): pass
@known
def test_alias(): pass
@pytest.mark.parametrize("x", CASES)
def test_cases(x): pass
def test_says_itself():
    pytest.xfail("known")
@known
class TestMarked:
    def test_in_it(self): pass
class TestBase(unittest.TestCase):
    def test_one(self): pass
    @unittest.expectedFailure
    def test_two(self): pass
class TestSub(TestBase):
    pass
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("t.py::test_plain", False),
        ("t.py::test_marked", True),
        ("t.py::test_alias", True),
        ("t.py::test_cases[2]", True),
        ("t.py::test_says_itself", True),
        ("t.py::TestMarked::test_in_it", True),
        ("t.py::TestBase::test_one", False),
        ("t.py::TestSub::test_two", True),
        ("t.py::test_nowhere", False),
        ("other.py::test_marked", False),
    ],
)
def test_an_expected_failure_is_what_the_tests_own_file_marks(name: str, expected: bool) -> None:
    assert TestFiles({"t.py": MARKS}).expects_failure(name) is expected


def test_a_module_may_be_marked_as_a_whole() -> None:
    files = TestFiles({"t.py": "import pytest\npytestmark = pytest.mark.xfail\ndef test_a(): pass\n"})
    assert files.expects_failure("t.py::test_a")


def test_expected_failures_without_a_mark_are_failures() -> None:
    output = "XFAIL t.py::a - why\nXFAIL t.py::b\nt.py::a XFAIL [ 50%]\nPASSED t.py::c\n= XFAILURES ="
    lines = without_unmarked_failures(output, lambda name: name == "t.py::b").split("\n")
    assert lines[:4] == ["FAILED t.py::a - why", "XFAIL t.py::b", "t.py::a FAILED [ 50%]", "PASSED t.py::c"]
    assert "XFAIL" not in lines[4]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("a/b.py::TestC::test_d[x::y]", Place("test_d", ("TestC",), "a/b.py")),
        ("test_d (pkg.tests.mod.Case)", Place("test_d", ("Case",), "pkg/tests/mod.py")),
        ("test_d (pkg.mod.Case.test_d)", Place("test_d", ("Case",), "pkg/mod.py")),
        ("Case.test_d", Place("test_d", ("Case",))),
        ("test_d", Place("test_d")),
        ("A sentence of a docstring.", None),
    ],
)
def test_a_name_tells_where_a_test_is(name: str, place: Place | None) -> None:
    assert place_of(name) == place


SOURCE = '''
import asyncio, contextlib, unittest
import pytest

def identity(x): return x

def test_docstring():
    """Only words."""

def test_one_line(): assert identity(1) == 1

def test_plain():
    """Words, and

    more."""
    value = identity(3)
    assert value == 3
    with contextlib.suppress(KeyError):
        assert identity("a") == "a", "why"

@pytest.mark.parametrize("x, expected", [(1, 1), ("b", "b")])
def test_cases(x, expected):
    for _ in range(2):
        assert identity(
            x  # as it is
        ) == expected

def test_returns():
    if identity(1):
        return
    assert False

def test_raises():
    with pytest.raises(ZeroDivisionError):
        1 / 0

def test_closure():
    expected = 4
    def look(): return expected
    assert look() == expected

async def _run(): pass
def test_async():
    asyncio.run(_run())
    @contextlib.contextmanager
    def inner():
        yield 1
    with inner() as x:
        assert x == 1

class TestCase(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(identity(1), 1)
        self.assertTrue(identity(True))

    @unittest.skip("not now")
    def test_skipped(self):
        self.fail()

    @unittest.expectedFailure
    def test_known(self):
        self.assertEqual(1, 2)

if True:
    def test_under_if():
        assert identity([1]) == [1]

def test_last():
    assert identity("ä") == "ä"'''


TESTS = (
    *("test_docstring", "test_one_line", "test_plain", "test_returns", "test_cases[1-1]", "test_cases[b-b]"),
    *("test_raises", "test_closure", "test_async", "TestCase::test_equal", "TestCase::test_skipped"),
    *("TestCase::test_known", "test_under_if", "test_last", "gone"),
)


def outcomes(directory: Path, sources: dict[str, str]) -> dict[str, str]:
    """The status of each test of these files, by its name."""
    for name, source in sources.items():
        (directory / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-q", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--rootdir", ".", *sources],
        cwd=directory,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    return {line[1]: line[0] for line in lines if line[0] in ("PASSED", "FAILED", "XFAIL", "ERROR")}


def test_every_test_that_is_changed_fails_whatever_form_is_drawn(tmp_path: Path) -> None:
    """All in one run of pytest: a start takes longer than the tests."""
    sources = {"t_as_it_is.py": SOURCE}
    for form, runs in itertools.product(range(4), (True, False)):
        name = f"t_{form}_{runs}.py"
        names = [f"{name}::{test}" for test in TESTS]
        falsified = falsify(TestFiles({name: SOURCE}), names if runs else [], names)
        unchanged = {f"{name}::gone", f"{name}::TestCase::test_known"}
        assert falsified.must_fail == [test for test in names if test not in unchanged]
        sources |= falsified.sources
    statuses = outcomes(tmp_path, sources)
    plain = {statuses.pop(name) for name in list(statuses) if name.startswith("t_as_it_is")}
    assert plain == {"PASSED", "XFAIL"}
    xfails = {f"{name}::TestCase::test_known": "XFAIL" for name in sources if name != "t_as_it_is.py"}
    failing = set(TESTS) - {"gone", "TestCase::test_known", "TestCase::test_skipped"}
    must_fail = {f"{name}::{test}" for name in sources if name != "t_as_it_is.py" for test in failing}
    assert statuses == xfails | dict.fromkeys(must_fail, "FAILED")


def test_what_equals_everything_passes_where_it_must_not(tmp_path: Path) -> None:
    source = SOURCE.replace(
        "def identity(x): return x", "from unittest import mock\nidentity = lambda x: mock.ANY"
    )
    falsified = falsify(TestFiles({"t_it.py": source}), ["t_it.py::test_last"], [])
    assert outcomes(tmp_path, falsified.sources)["t_it.py::test_last"] == "PASSED"


def test_only_the_tests_that_must_fail_are_changed() -> None:
    """A patch that looks at a comment, a line's number or a quote sees the same in both runs."""
    around = "# why\nPAIR = ('a',  \"b\")\nDEEP = " + "+".join("1" * 400) + "\nBOX = x[(0, *PAIR)]\n"
    source = around + "def test_pair(self):\n    self.assertEqual(*PAIR, 'why')\n\n# end\n"
    for fail_to_pass in (["test_pair"], []):
        falsified = falsify(TestFiles({"t_it.py": source}), fail_to_pass, ["test_pair"])
        assert falsified.must_fail == ["test_pair"]
        changed = falsified.sources["t_it.py"]
        compile(changed, "t_it.py", "exec")
        assert changed.startswith(around + "def test_pair(self):\n") and changed.endswith("\n# end\n")


def test_a_file_of_another_grammar_is_left_alone() -> None:
    falsified = falsify(TestFiles({"t.py": "print 'old'\ndef test_a(): pass\n"}), ["t.py::test_a"], [])
    assert (falsified.sources, falsified.must_fail) == ({}, [])


def added(path: str, *lines: str) -> str:
    body = "".join(f"+{line}\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,0 +1,{len(lines)} @@\n{body}"


@pytest.mark.parametrize(
    "line",
    [
        "x = sys._getframe(1)",
        "import _pytest.runner",
        "os._exit(0)",
        "builtins.AssertionError = Mine",
        "f.__code__ = g.__code__",
        "def __eq__(self, other): return True",
    ],
)
def test_lines_of_code_that_a_fix_hardly_needs_are_told_and_those_of_tests_are_not(line: str) -> None:
    assert suspicions(added("pkg/a.py", line), []) and line in suspicions(added("pkg/a.py", line), [])[0]
    assert suspicions(added("pkg/tests/a.py", line), []) == []
    assert suspicions(added("test_mine.py", line), []) == []
    assert suspicions(added("notes.rst", line), []) == []
    assert suspicions(added("pkg/a.py", f"# {line}"), []) == []


@pytest.mark.parametrize(
    "line",
    [
        "def __eq__(self, other): return self.x == other.x",
        "class Odd(AssertionError): pass",
        "if f.__code__ == g.__code__:",
        "builtins.print = quiet",
        "text = 'pytest is used'",
    ],
)
def test_odd_lines_of_a_fix_are_not_told(line: str) -> None:
    assert suspicions(added("pkg/a.py", line), []) == []
