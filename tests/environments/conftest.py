"""Environments for tests: one whose answers a test writes, and the processes of adapters that misbehave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import paths
from services.settings import settings
from workers.handlers.environments import commands, process


@pytest.fixture
def configured(monkeypatch):
    """Sets `ROLLOUT_*` variables as a deployment would, for code that reads the settings of its process."""

    def configure(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"ROLLOUT_{name.upper()}", value)
        settings.cache_clear()

    yield configure
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture(scope="session")
def toy_home(tmp_path_factory) -> Path:
    """A home with the virtual environment `toy`, which has nothing installed."""
    home = tmp_path_factory.mktemp("home")
    place = home / "environments" / "toy"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return home


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    yield
    process.close_idle()


@pytest.fixture
def package():
    """Requires that the packages of a kind are installed, as `make setup-tests` does."""

    def require(name: str) -> Path:
        if not commands.installed(name):
            pytest.skip(f"{name} is not installed: rollout environments install {name}")
        return paths.rollout_home() / "environments" / name / "bin" / "python"

    return require
