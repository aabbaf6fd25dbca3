"""What a test leaves to its long form is in the list that `make long` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import long_forms
from tests.helpers.long_forms import Entry, LongForm

TESTS = Path(__file__).resolve().parents[1]
FORM = LongForm("ROLLOUT_TEST_LONG", "make something")


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(long_forms, "REGISTRY", [])
    return long_forms.REGISTRY


@pytest.mark.parametrize(("variable", "value"), [(None, 1), ("", 1), ("1", 5)])
def test_a_value_is_that_of_the_form_and_both_are_listed(registry, monkeypatch, variable, value):
    monkeypatch.delenv(FORM.variable, raising=False)
    if variable is not None:
        monkeypatch.setenv(FORM.variable, variable)
    assert FORM("tries", short=1, long=5) == value
    assert registry == [Entry(FORM, "tests/unit/test_long_forms.py", "tries", 1, 5)]


@pytest.mark.parametrize("long", [False, True])
def test_a_test_without_a_short_form_is_skipped_and_listed(registry, monkeypatch, long):
    monkeypatch.setenv(FORM.variable, "1" if long else "")

    def test_it():
        pass

    marks = {mark.name: mark for mark in FORM.only(test_it).pytestmark}
    assert marks["skipif"].args == (not long,) and FORM.command in marks["skipif"].kwargs["reason"]
    assert "may_skip" in marks
    assert [(entry.short, entry.long) for entry in registry] == [(None, "whole")]


def test_no_test_reads_its_form_past_the_list():
    for path in TESTS.rglob("*.py"):
        if path not in (Path(long_forms.__file__), Path(__file__)):
            assert not re.search(r"environ.*_LONG\b", path.read_text()), path
