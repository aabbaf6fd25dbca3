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
from typing import Any

from workers.handlers.swe.testfiles import Function, TestFiles

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
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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
    runs: dict[str, dict[int, bool]] = {}
    paths: dict[str, set[str]] = {}
    for name in dict.fromkeys([*fail_to_pass, *others]):
        definitions = files.find(name)
        if files.expects_failure(name) or any(_is_generator(node) for _, _, node in definitions):
            continue
        for path, _, node in definitions:
            paths.setdefault(name, set()).add(path)
            runs.setdefault(path, {}).setdefault(node.lineno, name in fail_to_pass)
    changed = {path: _changed(files.files[path].source, lines) for path, lines in runs.items()}
    sources = {path: text for path, text in changed.items() if text is not None}
    return Falsified(sources, [name for name, places in paths.items() if places <= sources.keys()])


def _changed(source: str, runs: dict[int, bool]) -> str | None:
    """The source with the tests at these lines falsified, and run or stopped; None if that cannot be done."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        if not isinstance(node, Function) or node.lineno not in runs:
            continue
        if runs[node.lineno] and not any(isinstance(part, ast.Return) for part in _own(node)):
            failure = _failure(node)
            node.body = [*_Foreign(node).visit_all(node.body), *failure]
        else:
            start = 0 if ast.get_docstring(node, clean=False) is None else 1
            node.body[start:start] = [*_failure(node), ast.Return()]
    try:
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    except (ValueError, RecursionError):
        return None


class _Foreign(ast.NodeTransformer):
    """Has a test compare with what nobody can know, and end where the two are equal."""

    def __init__(self, test: Function) -> None:
        self._variables = _variables(test)

    def visit_all(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return self.visit(ast.Module(body, [])).body

    def visit_FunctionDef(self, node: Any) -> Any:
        return node  # what is in it is not the test's own

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Assert(self, node: ast.stmt) -> list[ast.stmt]:
        if (sides := _compared(node)) is None:
            return [node]
        value, expected = reversed(sides) if isinstance(sides[0], ast.Constant) else sides
        unknowable = ast.Constant(_unknowable(expected))
        statements: list[ast.stmt] = []
        if isinstance(expected, ast.Name) and expected.id in self._variables - _names(value):
            # Who looks it up among the test's variables finds the other value, too.
            statements.append(ast.Assign([ast.Name(expected.id, ast.Store())], unknowable))
        comparison = ast.Compare(value, [ast.Eq()], [unknowable])
        return [*statements, ast.If(comparison, [ast.Return()], [])]

    visit_Expr = visit_Assert


def _variables(node: Function) -> set[str]:
    """Names that are the function's own, and of nothing in it that may look at them later."""
    inner = _SCOPES | ast.Lambda | ast.GeneratorExp
    parts = [part for statement in node.body for part in ast.walk(statement)]
    if any(isinstance(part, inner | ast.Global | ast.Nonlocal) for part in parts):
        return set()
    arguments = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return arguments | {
        part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _compared(node: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """Both sides of a statement that asserts that two values are equal."""
    test = node.test if isinstance(node, ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return test.left, test.comparators[0]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method in ("assertEqual", "assertEquals") and len(call.args) >= 2:
            return call.args[0], call.args[1]
    return None


def _unknowable(expected: ast.expr) -> int | float | complex | str | bytes:
    """A value of the same type as what was expected, if that can be seen."""
    kind = type(expected.value) if isinstance(expected, ast.Constant) else str
    number = _random.randrange(10**6, 10**7)
    if kind in (int, float, complex):
        return kind(number) + (0.25 if kind is not int else 0)
    word = "".join(_random.choices("abcdefghiklmnoprstuvw", k=9))
    return word.encode() if kind is bytes else word


def _failure(node: Function) -> list[ast.stmt]:
    """An assertion that fails, of a kind that the test uses."""
    low = _random.randrange(10, 500)
    values = {"a": low, "b": low + _random.randrange(1, 500)}
    plain = f"assert {low} == {values['b']}"
    kinds = [plain] if any(isinstance(part, ast.Assert) for part in _own(node)) else []
    for part in _own(node):
        if not (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)):
            continue
        owner, method = part.func.value, part.func.attr
        if not isinstance(owner, ast.Name):
            continue
        if method in _UNITTEST:
            kinds.append(f"{owner.id}.{method}({_UNITTEST[method].format(**values)})")
        elif method.startswith("assert") and owner.id == "self":
            kinds.append(f"self.assertEqual({values['a']}, {values['b']})")
        elif method == "raises" and owner.id == "pytest":
            kinds.append(f"with pytest.raises(ZeroDivisionError):\n    {low} / {values['b']}")
    return ast.parse(_random.choice(kinds or [plain])).body


def _own(node: Function) -> Iterator[ast.AST]:
    """What is in a function, without the functions and classes in it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, _SCOPES | ast.Lambda):
            waiting += ast.iter_child_nodes(part)


def _is_generator(node: Function) -> bool:
    return any(isinstance(part, ast.Yield | ast.YieldFrom) for part in _own(node))
