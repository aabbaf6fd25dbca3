"""The set-up files: a second run has nothing to do, and nothing in them belongs to one machine."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios

import psutil
import pytest

from services.launch.paths import REPO
from services.launch.slurm.rundir import DOWN, Head, RunDir, Submitted
from tests.helpers.idle import in_time
from tests.helpers.stack import wait_until

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
    again = subprocess.run(["make", "setup"], cwd=REPO, check=True, capture_output=True, text=True)
    assert "setup: " not in again.stdout + again.stderr, "each step that is taken writes a line"


def test_an_interpreter_that_was_named_once_is_used_again_until_another_is_named(tmp_path):
    def chosen(**named):
        environment = {"PATH": os.environ["PATH"], "ROLLOUT_HOME": str(tmp_path)} | named
        script = f'. "{REPO}/deploy/setup/common.sh"; echo "$PYTHON"'
        return subprocess.run(["bash", "-c", script], env=environment, text=True, capture_output=True).stdout

    assert chosen() == "python3\n"
    made_with = tmp_path / "venv" / "bin" / "python"
    made_with.parent.mkdir(parents=True)
    made_with.symlink_to(sys.executable)
    assert chosen() == f"{made_with}\n"
    assert chosen(PYTHON="python3.13") == "python3.13\n"
    made_with.unlink()
    made_with.symlink_to(tmp_path / "python of a machine that was upgraded")
    assert chosen() == "python3\n"


def test_an_environment_that_lost_the_checkout_gets_it_again(tmp_path):
    """`pip install .` in it, meant for a trainer's, leaves a copy that finds no file of the checkout."""
    calls, python = tmp_path / "calls", tmp_path / "venv" / "bin" / "python"
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    python.parent.mkdir(parents=True)
    packages.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>"$ROLLOUT_HOME/calls"\n')
    python.chmod(0o755)
    editable = packages / "__editable__.rollout_service-0.2.0.pth"
    for lost, installs in ((False, 1), (False, 1), (True, 2)):
        if lost:
            editable.unlink()
        subprocess.run(
            [REPO / "deploy" / "setup" / "python.sh"],
            env=os.environ | {"ROLLOUT_HOME": str(tmp_path), "PYTHON": sys.executable},
            check=True,
            capture_output=True,
        )
        assert calls.read_text().count(f"-e {REPO}") == installs
        editable.touch()


def clean(home, directory, *options):
    command = ["make", "-s", *options, "-f", str(REPO / "Makefile"), "clean"]
    environment = os.environ | {"ROLLOUT_HOME": str(home)}
    return subprocess.run(command, cwd=directory, env=environment, text=True, capture_output=True)


def test_clean_deletes_api_keys_but_those_of_a_service_that_may_run_and_nothing_of_others(tmp_path):
    home, other = tmp_path / "h*me", tmp_path / "home"
    run = RunDir(home / "slurm-run")
    for jobs in ([Submitted("1", "head"), Submitted("2", "node")], []):
        for directory in (home / "run", other / "run"):
            directory.mkdir(parents=True, exist_ok=True)
        run.make()
        # Between the lives of a head, and after it was cancelled, others still run.
        run.write_head(Head("1", "n1", "127.0.0.1", DOWN, "http://127.0.0.1:9", "", 1))
        run.write_submitted(jobs)
        run.api_key()
        output = clean(home, tmp_path).stdout
        assert not (home / "run").exists() and (other / "run").exists()
        assert run.path.exists() == bool(jobs) == ("rollout slurm down, then make clean" in output), output


@pytest.mark.parametrize("name", ["home of mine", "home ", " home"])
def test_a_home_with_blanks_is_refused_before_anything_is_deleted(tmp_path, name):
    # -n: a Makefile that takes it would delete /run.
    done = clean(f"{tmp_path}/{name}", tmp_path, "-n")
    assert done.returncode and f"{name} has a blank in it" in done.stderr, done.stderr
    assert "rm -rf" not in done.stdout


SLOW = """
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ ! -e "$ROLLOUT_HOME/installed" ] || exit 0
mktemp -d >"$ROLLOUT_HOME/made"
echo "Collecting something with a name that is longer than a line of a terminal has room for, as pip does"
sleep "$SLEEP"
while [ -e "$ROLLOUT_HOME/held" ]; do sleep 0.1; done
touch "$ROLLOUT_HOME/installed"
"""


@pytest.fixture
def set_up(tmp_path):
    """Start a set-up whose one step takes as long as it is told, in a terminal or in a pipe."""
    scripts, started = tmp_path / "deploy" / "setup", []
    scripts.mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    for name in ("setup.sh", "common.sh"):
        shutil.copy(REPO / "deploy" / "setup" / name, scripts)
    (scripts / "python.sh").write_text(SLOW)

    def start(seconds, output=subprocess.PIPE):
        process = subprocess.Popen(
            [scripts / "setup.sh"],
            env=os.environ
            | {
                "ROLLOUT_HOME": str(tmp_path / "home"),
                "SLEEP": str(seconds),
                "TMPDIR": str(tmp_path / "tmp"),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            # Where we run under nohup, a shell of ours could not have a trap for it.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_setup_tells_what_it_does_and_a_second_one_whom_it_waits_for(set_up, tmp_path):
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    home, seconds = tmp_path / "home", 0
    home.mkdir()
    (home / "held").touch()
    first = set_up(0)
    wait_until((home / "made").exists, 120, "the first to be at work")
    second = set_up(0, terminal)
    os.close(terminal)
    for _ in range(2):
        with in_time(10.0, 60.0):
            # On a busy machine the first one may come before the step has said anything.
            line = next(line for line in first.stdout if "Collecting" in line)
        told = re.fullmatch(r"setup: python +(\d+) s  Collecting something with .*…\n", line)
        assert told and int(told[1]) > seconds, line
        seconds = int(told[1])
    (home / "held").unlink()
    whole = re.match(r"setup: python +(\d+) s\n", first.communicate(timeout=240)[0])
    assert int(whole[1]) >= seconds and first.returncode == 0
    assert second.wait(60) == 0
    drawn = os.read(controller, 1 << 16).decode()
    assert f"setup: python: waits for another set-up: process {first.pid} of " in drawn, drawn
    lines = [line.rstrip() for line in re.split(r"\r\x1b\[K|\n", drawn)]
    assert sum(line.startswith("python ") for line in lines) > 3, "it is drawn every second"
    assert all(len(line) < 80 for line in lines if line.startswith("python ")), (
        "or it could not be drawn anew"
    )
    assert lines[-1] == "", "what was drawn last is wiped out"


MARKER = f"3606.{os.getpid()}"


def sleeps():
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", MARKER]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_setup_with_all_it_runs_and_blames_no_step(set_up, number, tmp_path):
    process = set_up(MARKER)
    wait_until(sleeps, 120, "the step to be under way")
    os.killpg(process.pid, number)  # as a terminal does it
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "setup: stopped. What is installed stays" in output, output
    assert "FAILED" not in output and "No such process" not in output, output
    assert not sleeps() and not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_setup_whose_output_nobody_reads_any_more_is_stopped_as_well(set_up, number):
    """As after Ctrl-C with `| tee`, and after the end of the terminal."""
    controller, terminal = pty.openpty()
    process = set_up(MARKER, subprocess.PIPE if number == signal.SIGINT else terminal)
    os.close(terminal)
    wait_until(sleeps, 120, "the step to be under way")
    os.close(controller)
    if process.stdout is not None:
        process.stdout.close()
    os.killpg(process.pid, number)
    assert process.wait(30) == 130
    assert not sleeps()


def test_a_setup_that_was_killed_goes_on_without_telling(set_up):
    process = set_up(MARKER)
    wait_until(sleeps, 120, "the step to be under way")
    children = psutil.Process(process.pid).children()
    (step,) = [child for child in children if os.getpgid(child.pid) == child.pid]
    (reporter,) = [child for child in children if child != step]
    process.kill()
    process.wait()
    try:
        wait_until(lambda: not reporter.is_running(), 120, "the report to end")
    finally:
        os.killpg(step.pid, signal.SIGKILL)


def test_a_step_that_fails_is_named_with_the_end_of_its_log(set_up):
    output, _ = set_up("for ever").communicate(timeout=240)
    assert re.search(
        r"setup: python FAILED\. The end of .*setup-python\.log:\nCollecting .*\nsleep: inv", output
    )


def test_what_the_tests_need_is_not_begun_on_a_disk_without_room(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "df").write_text(
        "#!/bin/sh\necho Filesystem MB Used Available\necho /dev/a 99999 88000 11000\n"
    )
    (programs / "df").chmod(0o755)
    home, command = tmp_path / "home", [REPO / "deploy" / "setup" / "setup.sh", "tests"]
    environment = os.environ | {"ROLLOUT_HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    told = f"what the tests need takes 119\\d\\d MB, and the disk of {tmp_path}/home has 11000 MB free"
    assert re.search(told, done.stderr)
    assert [*home.iterdir()] == [home / "log"]
    # What is there need not find room again.
    (home / "venv").mkdir()
    (home / "venv" / "torch").write_bytes(bytes(200 << 20))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert re.search(told.replace("119", "117"), done.stderr)


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
        assert not re.search(r"https?://(?!127\.0\.0\.1|gateway|capture|backend)[\w.-]+", text), file
        assert "/home/" not in text and str(REPO) not in text, file
