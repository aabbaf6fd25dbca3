"""README and the pages of docs/ as tests read them: fenced blocks with their marks, commands, links.

A comment right before a block says what becomes of it, else a block of bash in README or docs/guides is run:

    <!-- needs: gpu, verl -->            not run here, for want of these
    <!-- tested by: tests/x.py::test -->  run by that test
    <!-- file: loop.py -->                written to that file before the next block is run
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from rollout.cli import main
from rollout.cli.common import ReadingGroup
from tests.helpers.stack import ROOT

GUIDES = (ROOT / "README.md", ROOT / "docs" / "verl.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NEEDS = frozenset({"gpu", "make", "redis", "registry", "sglang", "slurm", "trl", "verl", "vllm"})
"""What a block may say that it needs."""
_BLOCK = re.compile(r"(?:^<!-- ([a-z ]+): ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    mark: str
    """What the comment before it begins with; "" without one."""
    value: str
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        yield Block(page, line, match[1] or "", (match[2] or "").strip(), match[3], match[4])


def commands(page: Path) -> Iterator[str]:
    """What a page tells to type: `rollout …`, up to where the shell takes over."""
    text = page.read_text()
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    fenced = "".join(block.text for block in blocks(page) if block.language == "bash")
    for line in (*inline, *fenced.replace("\\\n", " ").splitlines()):
        match = re.match(r"(?:\S+=\S+ )*(?:\S*/bin/)?rollout ((?:[a-z-]+ ?)+[^|>#&;]*)", line.strip())
        if match:
            yield match[1].strip()


def documented(words: list[str]) -> tuple[click.Command, list[str]]:
    """The click command that words lead to, and the words after it."""
    command, context = main, click.Context(main)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        following = command.get_command(context, words[0])
        if following is None:
            break
        command, words = following, words[1:]
    if isinstance(command, ReadingGroup) and words and words[0].startswith("-"):
        command = command.commands[command.default]
    return command, words


def anchors(page: Path) -> set[str]:
    """What a link may name after its #."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
