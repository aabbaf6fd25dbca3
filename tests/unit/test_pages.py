"""README and docs/: commands, options, links, marks and tests that they name exist; README is short."""

from __future__ import annotations

import re
import shlex
import subprocess

import click
import pytest

from rollout.cli import main
from tests.helpers.messages import page as messages
from tests.helpers.messages import unplaced
from tests.helpers.pages import GUIDES, NEEDS, PAGES, anchors, blocks, commands, documented
from tests.helpers.stack import ROOT

COMMANDS = sorted({(line, page) for page in PAGES for line in commands(page)})
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
MARKS = {"needs", "tested by", "file", "tested"}


@pytest.mark.parametrize(("line", "page"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_exists_with_its_options(line, page):
    try:
        words = shlex.split(line)
    except ValueError:  # a quoted text that goes on in the next line
        words = line.split()
    command, rest = documented(words)
    assert command is not main, f"{page}: there is no `rollout {line}`"
    if isinstance(command, click.Group):
        assert command.invoke_without_command or not rest, f"{page}: there is no `rollout {line}`"
    options = {option for parameter in command.params for option in parameter.opts}
    used = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert used - {"--help"} <= options, f"{page}: `rollout {line}`: {sorted(used - options)}"


def test_the_commands_are_many():
    assert len(COMMANDS) > 60


@by_page
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


@by_page
def test_marks_and_blocks_are_sound(page):
    for block in blocks(page):
        assert block.mark in MARKS | {""}, block.where
        if block.mark == "needs":
            assert set(re.split(r", *", block.value)) <= NEEDS, f"{block.where}: add it to NEEDS"
        if block.mark == "tested by":
            file, _, test = block.value.partition("::")
            assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), block.where
        if block.language == "bash":
            checked = subprocess.run(
                ["bash", "-n"], input=block.text, text=True, capture_output=True, check=False
            )
            assert checked.returncode == 0, f"{block.where}: {checked.stderr}"
        if block.language == "python" and page in GUIDES:
            compile(block.text, block.where, "exec")


def test_pictures_are_small_and_shown():
    texts = "".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "img").iterdir():
        assert picture.stat().st_size < 100_000 and f"img/{picture.name})" in texts, picture


def test_the_readme_is_short_and_the_index_names_every_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    index = (ROOT / "docs" / "README.md").read_text()
    linked = {(ROOT / "docs" / path).resolve() for path in re.findall(r"\]\(([^)#\s]+\.md)", index)}
    assert set(PAGES) - linked <= {ROOT / "README.md", ROOT / "docs" / "README.md"}


def test_whatever_the_product_raises_has_its_messages_on_the_page():
    assert unplaced() == set(), "name it in a group of tests/helpers/messages.py, or in OWN with the reason"


@pytest.mark.parametrize(
    "text",
    [
        "send Content-Type: application/json",
        "it cannot be stored: it holds a value that JSON has no form for",
        "tenant … may have … …, …, and this call holds …",
        "does not end in a number; name versions so, or pass step_of=",
        "did not reach all servers",
        "arrays need NumPy",
        "no signature fits: another secret, or the body was changed on its way",
        "canary failed: id … at position …",
        "the worker cannot start",
        "takes no new work from … on; rollouts under way go on",
        "bind source … is not below a path of ROLLOUT_SANDBOX_BINDS of this node",
    ],
)
def test_a_message_is_found_on_the_page(text):
    """Of each way in which code words one: a class, Python's own, a name assigned before, an error's own."""
    assert text in (ROOT / "docs" / "messages.md").read_text()


def test_the_page_of_messages_has_those_of_the_code():
    page = (ROOT / "docs" / "messages.md").read_text()
    assert page == messages(), "python -m tests.helpers.messages > docs/messages.md"
