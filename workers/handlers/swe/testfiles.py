"""What the specified tests' own files say: which tests they hold, and which they mark as known to fail.

Sources are read on the service's side, from a sandbox that no code of the patch has run in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_EXPECTED = re.compile(r"xfail|expected_?failure", re.IGNORECASE)
NAME_OF_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
"""A name as unittest and Django print it: `test_x (package.module.Class)`."""


@dataclass(frozen=True)
class Place:
    """Where the name of a test says that it is."""

    function: str
    classes: tuple[str, ...] = ()
    file: str | None = None
    """Path, or the end of one; None = any of the files."""


@dataclass
class TestFile:
    """One file of tests."""

    __test__ = False

    source: str
    functions: dict[tuple[str, ...], list[Function]] = field(default_factory=dict)
    """By the names of the classes around it and its own."""
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    """Those at the top."""
    expecting: set[str] = field(default_factory=set)
    """Names of the module that stand for a mark of an expected failure."""
    all_expected: bool = False
    """The module as a whole is marked."""

    @property
    def lines(self) -> list[str]:
        """As `ast` counts them: they end with \\n, \\r\\n or \\r."""
        return self.source.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def read(source: str) -> TestFile | None:
    """What is in a file; None if it is no Python of this version's grammar."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    file = TestFile(source)
    for path, node in _definitions(tree.body, ()):
        if not isinstance(node, ast.ClassDef):
            file.functions.setdefault(path, []).append(node)
        elif len(path) == 1:
            file.classes[node.name] = node
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and _mentions(node.value, set()):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            file.expecting |= names - {"pytestmark"}
            file.all_expected |= "pytestmark" in names
    return file


def _definitions(
    body: list[ast.stmt], outer: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Function | ast.ClassDef]]:
    """Functions and classes, also those under an `if` or a `try`, but none within a function."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield (*outer, node.name), node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, (*outer, node.name))
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(node, name, []), outer)
            for handler in getattr(node, "handlers", []):
                yield from _definitions(handler.body, outer)


def place_of(name: str) -> Place | None:
    """Where a test is, by its name in a log; None where the name does not say."""
    if "::" in name:
        file, *inner = name.split("[", 1)[0].split("::")
        return Place(inner[-1].split(" ")[0], tuple(inner[:-1]), file)
    if words := NAME_OF_UNITTEST.fullmatch(name):
        function, parts = words[1], words[2].split(".")
        if parts[-1] == function:  # since Python 3.11
            parts = parts[:-1]
        file = None if parts[:-1] == ["__main__"] else "/".join(parts[:-1]) + ".py"
        return Place(function, (parts[-1],), file) if len(parts) > 1 else None
    parts = name.split("[", 1)[0].split(".")
    if all(part.isidentifier() for part in parts):
        return Place(parts[-1], tuple(parts[:-1]))
    return None


def file_of_smith(name: str) -> str | None:
    """Path that a test of SWE-smith is in, by its name; `test.py` is what runs itself there."""
    if "::" in name:
        return name.split("::")[0]
    place = place_of(name) if NAME_OF_UNITTEST.fullmatch(name) else None
    return (place.file or "test.py") if place else None


class TestFiles:
    """The files of the specified tests, by path."""

    __test__ = False

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.files = {path: file for path, text in sources.items() if (file := read(text)) is not None}
        """Those that could be read."""

    def find(self, name: str) -> list[tuple[str, tuple[str, ...], Function]]:
        """File, classes and definitions of a test; [] if it is not in these files, or is inherited."""
        place = place_of(name)
        if place is None:
            return [
                (path, owner[:-1], node)
                for path, file in self.files.items()
                for owner, nodes in file.functions.items()
                for node in nodes
                # unittest prints a docstring's first line in the place of a name
                if (ast.get_docstring(node) or "").split("\n")[0] == name
            ]
        definitions = []
        for path, file in self.files.items():
            if place.file is not None and path != place.file and not path.endswith(f"/{place.file}"):
                continue
            for owner in _owners(file, place.classes):
                if nodes := file.functions.get((*owner, place.function)):
                    definitions += [(path, owner, node) for node in nodes]
                    break
        return definitions

    def expects_failure(self, name: str) -> bool:
        """Whether the test's own file says that it is known to fail."""
        for path, owner, node in self.find(name):
            file = self.files[path]
            around = [file.classes[outer] for outer in owner[:1] if outer in file.classes]
            decorators = [mark for kind in around for mark in kind.decorator_list]
            if file.all_expected or any(_mentions(part, file.expecting) for part in (node, *decorators)):
                return True
        return False


def _owners(file: TestFile, classes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """A class, and those of the same file that it inherits from, nearest first."""
    yield classes
    if len(classes) != 1:
        return
    waiting, seen = [classes[0]], set(classes)
    while waiting:
        definition = file.classes.get(waiting.pop(0))
        for base in definition.bases if definition else ():
            if isinstance(base, ast.Name) and base.id not in seen:
                seen.add(base.id)
                waiting.append(base.id)
                yield (base.id,)


def _mentions(node: ast.AST, names: set[str]) -> bool:
    for part in ast.walk(node):
        word = getattr(part, "id", None) or getattr(part, "attr", None)
        if isinstance(word, str) and (word in names or _EXPECTED.search(word)):
            return True
    return False
