"""A git that obeys nothing but its command line, for work on trees that an agent has changed.

Its repository is new and empty: no configuration, no hooks, no index, no drivers, no submodules. Attributes
of its own stand before every `.gitattributes` of a tree, so that content is taken and written byte by byte.
"""

from __future__ import annotations

import shlex

ATTRIBUTES = "* -text !eol !crlf !ident !filter !working-tree-encoding !diff !merge !whitespace"
AS_BINARY = "* -diff"
_SETTINGS = (
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.eol=lf",
    "core.fileMode=true",
    "core.symlinks=true",
    "core.quotePath=true",
    # Names that only other systems' file systems take for `.git` are names like any other here.
    "core.protectHFS=false",
    "core.protectNTFS=false",
    "core.attributesFile=/dev/null",
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "diff.renames=false",
)
GIT = "git " + " ".join(f"-c {setting}" for setting in _SETTINGS)


def make(work: str) -> str:
    """Shell lines that make the repository below the directory `work`."""
    place = shlex.quote(f"{work}/git")
    return (
        f"mkdir -p {work}/empty && {_QUIET} HOME={work} &&"
        f" GIT_DIR={place} git init -q --template= {work}/empty"
        f" && mkdir -p {place}/info && echo {shlex.quote(ATTRIBUTES)} > {place}/info/attributes"
    )


def use(work: str, tree: str | None = None) -> str:
    """Shell lines that have `git` work with it from now on, on the work tree `tree` (None: an empty one)."""
    tree = shlex.quote(tree or f"{work}/empty")
    return (
        f"{_QUIET} HOME={work} GIT_DIR={work}/git GIT_WORK_TREE={tree} && unset GIT_INDEX_FILE &&"
        f" unset GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES && cd {tree}"
    )


_QUIET = (
    "export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1"
    " GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"
)
