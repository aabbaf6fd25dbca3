"""Classes of trainers, taken out of their released source: their packages need GPUs and gigabytes to import.

`make setup-tests` lays the packages, without what they depend on, below `.local/trainers`.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pydantic
import pytest
import typing_extensions
from pydantic.json_schema import SkipJsonSchema

from tests.helpers.lazy import Lazy
from tests.helpers.stack import ROOT

SOURCES = Path(os.environ.get("ROLLOUT_TRAINER_SOURCES") or ROOT / ".local" / "trainers")

_NAMES = {
    **{name: getattr(typing, name) for name in ("Annotated", "Any", "Dict", "List", "Literal", "Optional")},
    **{name: getattr(typing, name) for name in ("Union",)},
    **{name: getattr(pydantic, name) for name in ("BaseModel", "ConfigDict", "Field")},
    **{name: getattr(pydantic, name) for name in ("computed_field", "field_serializer", "field_validator")},
    "TypedDict": typing_extensions.TypedDict,  # pydantic wants this one before Python 3.12
    "dataclass": dataclasses.dataclass,
    "Callable": Callable,
    "Iterable": Iterable,
    "SkipJsonSchema": SkipJsonSchema,
    "np": np,
    "torch": Lazy("torch"),
    "time": __import__("time"),
}


def classes(path: str, names: Iterable[str], **more: object) -> types.ModuleType:
    """A module with these classes, functions and constants of a released file, and nothing else of it.

    Args:
        more: What they refer to beside the usual.
    """
    source = SOURCES / path
    if not source.is_file():
        pytest.skip(f"there is no {source}: run `make setup-tests`")
    kept = set(names)
    tree = ast.parse(source.read_text())
    tree.body = [node for node in tree.body if _is_future(node) or kept & _defined(node)]
    assert kept == {name for node in tree.body for name in _defined(node)}, "the release has changed"
    module = types.ModuleType(f"released_{Path(path).stem}")
    sys.modules[module.__name__] = module  # where pydantic looks names up
    vars(module).update(_NAMES, **more)
    exec(compile(tree, str(source), "exec"), vars(module))
    return module


def imported(path: str) -> set[str]:
    """Names that a released file takes from elsewhere, for a caller who stands in for them."""
    nodes = ast.parse((SOURCES / path).read_text()).body
    imports = [
        node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) and not _is_future(node)
    ]
    return {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()
