"""The set-up files: a second run has nothing to do, and nothing in them belongs to one machine."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from services.launch.paths import REPO

SCRIPTS = sorted([*(REPO / "deploy" / "setup").glob("*.sh"), REPO / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_continuous_integration_runs_make_test_and_nothing_else():
    lines = (REPO / ".ci" / "run").read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    commands = [line for line in lines[1:] if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]


def test_make_alone_lists_the_targets():
    shown = subprocess.run(["make"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "setup-vllm", "demo", "up", "down", "test", "lint", "bench", "clean"):
        assert re.search(rf"^make {target} ", shown, re.MULTILINE), target


def test_a_second_setup_does_nothing():
    if not (REPO / ".local" / "venv" / ".rollout-stamp").is_file():
        pytest.skip("this checkout was not set up by `make setup`")
    subprocess.run(["make", "setup"], cwd=REPO, check=True, capture_output=True)
    begun = time.monotonic()
    subprocess.run(["make", "setup"], cwd=REPO, check=True, capture_output=True)
    assert time.monotonic() - begun < 10.0  # 0.1 s; anything that is installed takes longer


def test_slurm_is_fetched_once():
    script = str(REPO / "deploy" / "setup" / "slurm.sh")
    for _ in range(2):
        output = subprocess.run([script], check=True, capture_output=True, text=True).stdout
    assert re.fullmatch(r"slurm: (up to date|using the installed slurm.*)\n", output), output


def test_no_package_mirror_and_no_machine_path_is_written_down():
    files = [
        *SCRIPTS,
        REPO / "Makefile",
        REPO / "docker-compose.dev.yml",
        *(REPO / "deploy" / "compose").iterdir(),
    ]
    for file in files:
        text = file.read_text()
        assert not re.search(r"https?://(?!127\.0\.0\.1|gateway|backend)[\w.-]+", text), file
        assert "/home/" not in text and str(REPO) not in text, file
