"""`rollout environments`: what is installed, from pins alone, and what failed."""

from __future__ import annotations

import json
import subprocess
import zipfile

import pytest
from click.testing import CliRunner

from workers.handlers.environments import commands

RECORD = "tiny-1.0.dist-info"


@pytest.fixture
def wheel(tmp_path):
    """A package of one module."""
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    files = {
        "tiny.py": "SIZE = 1\n",
        f"{RECORD}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nRequires-Dist: absent==9\n",
        f"{RECORD}/WHEEL": "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{RECORD}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def run(monkeypatch, tmp_path, wheel):
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    pins = {"tiny": [str(wheel)], "broken": [str(tmp_path / "absent.whl")]}
    monkeypatch.setattr(commands, "pinned", lambda: pins)
    return lambda *words: CliRunner().invoke(commands.environments, words)


def test_an_environment_is_installed_once_and_one_that_fails_does_not_keep_others_from_it(run):
    result = run("install", "broken", "tiny")
    assert result.exit_code == 1 and "broken: FAILED" in result.output and "tiny: installed" in result.output
    python = commands.place("tiny") / "bin" / "python"
    said = subprocess.run([python, "-c", "import tiny; print(tiny.SIZE)"], capture_output=True, check=True)
    assert said.stdout == b"1\n"
    assert "tiny: there already" in run("install", "tiny").output
    rows = {row["name"]: row["installed"] for row in json.loads(run("list", "--json").output)["environments"]}
    assert rows == {"tiny": True, "broken": False}


def test_other_pins_than_it_was_made_of_have_it_made_anew(run, monkeypatch, wheel):
    run("install", "tiny")
    monkeypatch.setattr(commands, "pinned", lambda: {"tiny": [str(wheel), str(wheel)]})
    assert "tiny" in run("list").output and not commands.installed("tiny")


def test_an_unknown_environment_is_refused_with_the_names_that_there_are(run):
    result = run("install", "nothing")
    assert result.exit_code == 2 and "there are: tiny, broken" in result.output


def test_every_pin_has_one_version_and_each_kind_begins_with_its_package(monkeypatch):
    for name, packages in commands.pinned().items():
        assert all(len(package.split("==")) == 2 for package in packages), name


def test_the_columns_of_a_list_are_as_wide_as_what_is_in_them(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path))
    pins = {"a": ["a==1"], "a-much-longer-name": ["a-package-of-a-very-long-name==1.2.3"]}
    monkeypatch.setattr(commands, "pinned", lambda: pins)
    short, long, _ = CliRunner().invoke(commands.environments, ["list"]).output.splitlines()
    assert short.index("a==1") == long.index("a-package") and short.index("-") == long.rindex("-")
