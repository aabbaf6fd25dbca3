"""Tests that must fail: the specified ones, each changed so that no code can make it pass.

What judges runs in one process with what is judged, so a patch may change how tests are run, compared or
reported. That it did shows in a second run, whose tests are the same by name, place and number but for what
they assert: a test that passes there was not run, not compared, or not reported as it ended. Which form a
test gets is drawn anew each time, from what the test itself uses.

* `stopped`: its first statement is an assertion that fails, of a kind that the test uses; then it returns.
* `foreign`: it runs, but what it compares is compared with a value that nobody can know (and that it equals
  ends the test as passed), and its last statement is an assertion that fails.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workers.handlers.swe.testfiles import Function, TestFile, TestFiles

_random = random.SystemRandom()

_UNITTEST = {
    "assertEqual": "{a}, {b}",
    "assertNotEqual": "{a}, {a}",
    "assertTrue": "{a} > {b}",
    "assertFalse": "{a} < {b}",
    "assertIn": "{a}, [{b}]",
    "assertNotIn": "{a}, [{a}]",
    "assertIs": "None, {a}",
    "assertIsNone": "{a}",
    "assertIsNotNone": "None",
    "assertIsInstance": "{a}, str",
    "assertAlmostEqual": "{a}, {b}",
    "assertListEqual": "[{a}], [{b}]",
    "assertDictEqual": "{{1: {a}}}, {{1: {b}}}",
    "assertTupleEqual": "({a},), ({b},)",
    "assertGreater": "{a}, {b}",
    "assertLess": "{b}, {a}",
}
"""Arguments with which a method of `unittest.TestCase` fails; `a` is less than `b`."""


@dataclass(frozen=True)
class Falsified:
    """Changed test files."""

    sources: dict[str, str]
    """By path."""
    must_fail: list[str]
    """Names of the specified tests that cannot pass now."""


def falsify(files: TestFiles, fail_to_pass: Sequence[str], others: Sequence[str]) -> Falsified:
    """Change every specified test that is found in the files.

    Args:
        fail_to_pass: Names of tests that get both forms in one, which costs their time again.
        others: Names of tests that are stopped at once.
    """
    nodes_of: dict[str, dict[ast.AST, bool]] = {}
    names: dict[str, list[tuple[str, ast.AST]]] = {}
    for name in dict.fromkeys([*fail_to_pass, *others]):
        definitions = files.find(name)
        parts = (part for _, _, node in definitions for part in _own(node))
        generators = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts)
        if not definitions or generators or files.expects_failure(name):
            continue
        names[name] = [(path, node) for path, _, node in definitions]
        for path, _, node in definitions:
            nodes_of.setdefault(path, {}).setdefault(node, name in fail_to_pass)
    changed = {path: _changed(files.files[path], nodes) for path, nodes in nodes_of.items()}
    sources = {path: text for path, text in changed.items() if text is not None}
    must_fail = [name for name, nodes in names.items() if all(path in sources for path, _ in nodes)]
    return Falsified(sources, must_fail)


@dataclass(frozen=True)
class _Edit:
    """Text that takes the place of lines and columns (in bytes), both from (line, column) on."""

    begin: tuple[int, int]
    end: tuple[int, int]
    text: str


def _changed(file: TestFile, nodes: dict[ast.AST, bool]) -> str | None:
    """The file with its tests falsified; None if that cannot be done."""
    edits: list[_Edit] = []
    for node, runs in nodes.items():
        edits += _foreign(file, node) if runs and _can_run(node) else [_stopped(file, node)]
    # As `ast` counts, columns are bytes of UTF-8.
    lines = [line.encode() for line in file.lines]
    for edit in sorted(edits, key=lambda edit: edit.begin, reverse=True):
        (first, begin), (last, end) = edit.begin, edit.end
        if first > len(lines):
            lines += [b""] * (first - len(lines))
            last = first
        joined = lines[first - 1][:begin] + edit.text.encode() + lines[last - 1][end:]
        lines[first - 1 : last] = joined.split(b"\n")
    text = b"\n".join(lines).decode()
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return text


def _stopped(file: TestFile, node: Function) -> _Edit:
    """The test ends with a failure before it does anything."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:  # nothing but a docstring
        place = _end(node.body[0])
        return _Edit(place, place, f"; {_failure(file, node, one_line=True)}; return")
    first = body[0]
    line = min([first.lineno, *(item.lineno for item in getattr(first, "decorator_list", []))])
    before = file.lines[line - 1].encode()
    column = len(before) - len(before.lstrip())
    if line == first.lineno and column != first.col_offset:  # behind something else
        place = (line, first.col_offset)
        return _Edit(place, place, f"{_failure(file, node, one_line=True)}; return; ")
    indent = before[:column].decode()
    failure = _failure(file, node).replace("\n", f"\n{indent}")
    return _Edit((line, column), (line, column), f"{failure}\n{indent}return\n{indent}")


def _foreign(file: TestFile, node: Function) -> list[_Edit]:
    """The test runs, compares with what nobody can know, and fails at its end."""
    edits = []
    variables = _variables(node)
    lines = file.lines
    for statement in _statements(node.body):
        if (sides := _compared(statement)) is None:
            continue
        value_of, expected = sides
        if isinstance(value_of, ast.Constant):
            value_of, expected = expected, value_of
        segment = ast.get_source_segment(file.source, value_of)
        if segment is None:
            continue
        value = _unknowable(expected)
        text = f"if ({segment}) == {value}: return"
        if isinstance(expected, ast.Name) and expected.id in variables - _names(value_of):
            # Who looks it up among the test's variables finds the other value, too.
            indent = lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
            text = f"{expected.id} = {value}\n{indent}{text}"
        edits.append(_Edit((statement.lineno, statement.col_offset), _end(statement), text))
    last = node.body[-1]
    indent = lines[last.lineno - 1].encode()[: last.col_offset].decode()
    place = (_end(last)[0] + 1, 0)
    return [*edits, _Edit(place, place, f"{indent}{_failure(file, node, one_line=True)}\n")]


def _end(node: ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _variables(node: Function) -> set[str]:
    """Names that are the function's own, and of nothing in it that may look at them later."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.GeneratorExp
    parts = [part for statement in node.body for part in ast.walk(statement)]
    if any(isinstance(part, inner | ast.Global | ast.Nonlocal) for part in parts):
        return set()
    arguments = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return arguments | {
        part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _can_run(node: Function) -> bool:
    """Whether the end of the test is reached unless it fails, and stands on lines of its own."""
    own = list(_own(node))
    if any(isinstance(part, ast.Return | ast.Yield | ast.YieldFrom) for part in own):
        return False
    last = node.body[-1]
    simple = not isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return simple and node.body[0].lineno > node.lineno and _alone(node.body)


def _alone(body: list[ast.stmt]) -> bool:
    return all((first.end_lineno or 0) < second.lineno for first, second in pairwise(body))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a function, also in blocks, that stand on lines of their own; none of functions in it."""
    if not _alone(body):
        return
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, [])
            if inner and inner[0].lineno > node.lineno:
                yield from _statements(inner)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _compared(node: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """Both sides of a statement that asserts that two values are equal."""
    test = node.test if isinstance(node, ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return test.left, test.comparators[0]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        sides = call.args[:2]
        starred = any(isinstance(side, ast.Starred) for side in sides)
        if method in ("assertEqual", "assertEquals") and len(sides) == 2 and not starred:
            return sides[0], sides[1]
    return None


def _unknowable(expected: ast.expr) -> str:
    """Text of a value of the same type as what was expected, if that can be seen."""
    kind = type(expected.value) if isinstance(expected, ast.Constant) else str
    number = _random.randrange(10**6, 10**7)
    if kind in (int, float, complex):
        return repr(kind(number) + (0.25 if kind is not int else 0))
    word = "".join(_random.choices("abcdefghiklmnoprstuvw", k=9))
    return repr(word.encode()) if kind is bytes else repr(word)


def _failure(file: TestFile, node: Function, one_line: bool = False) -> str:
    """An assertion that fails, of a kind that the test uses."""
    low = _random.randrange(10, 500)
    values = {"a": low, "b": low + _random.randrange(1, 500)}
    plain = f"assert {low} == {values['b']}"
    kinds = [plain] if any(isinstance(part, ast.Assert) for part in _own(node)) else []
    for part in _own(node):
        if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Attribute):
            continue
        owner = ast.get_source_segment(file.source, part.func.value)
        if part.func.attr in _UNITTEST and isinstance(part.func.value, ast.Name):
            kinds.append(f"{owner}.{part.func.attr}({_UNITTEST[part.func.attr].format(**values)})")
        elif part.func.attr.startswith("assert") and owner == "self":
            kinds.append(f"self.assertEqual({values['a']}, {values['b']})")
        elif part.func.attr == "raises" and owner == "pytest" and not one_line:
            kinds.append(f"with pytest.raises(ZeroDivisionError):\n    {low} / {values['b']}")
    return _random.choice(kinds or [plain])


def _own(node: Function) -> Iterator[ast.AST]:
    """What is in a function, without the functions and classes in it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(part)
