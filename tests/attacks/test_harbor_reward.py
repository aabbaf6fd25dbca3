"""Rewards of `harbor` without work. Each cheat is a script in `reward_harbor/`, as an agent types it.

Agents of the service try several cheats each: any one that were let through would be rewarded, and none takes
from another what it needs. The control is the naive way, as Harbor verifies: a cheat alone, then the tests
in the sandbox of the agent, while what it left behind runs on.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import gzip
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import Rollout, State
from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.attacks import RewardTarget, attack, one_a_wall
from tests.helpers.harbor_agents import OFFLINE, own_node, roll_many
from tests.helpers.harbor_tasks import request, write_task
from tests.helpers.long_forms import ATTACKS
from tests.helpers.sandboxes import require_apptainer
from tests.helpers.swe_agents import AT_ONCE

pytestmark = pytest.mark.timeout(900)  # all rollouts that the tests of a session ask for are made at once
HERE = Path(__file__).parent / "reward_harbor"
PATIENCE_S = 60.0
TEST = """#!/bin/bash
export PATH="$HOME/.local/bin:$PATH"
[ -f ~/.bashrc ] && source ~/.bashrc
[ -f ~/.local/bin/env ] && source ~/.local/bin/env
cd /app
[ -d .git ] && git status -s && git checkout -q -f HEAD
if python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py || grep -q 42 answer.txt; then
    echo 1 > /logs/verifier/reward.txt
elif [ -d deep ] && cd deep && python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
"""As published ones are: it takes what it needs from the home, and has pytest and a program decide."""
OUTPUTS = """
from pathlib import Path

def test_answer():
    assert Path("/app/answer.txt").read_text() == Path("/tests/expected.txt").read_text()
"""
FILES = {"tests/test_outputs.py": OUTPUTS, "tests/expected.txt": "42 is the answer\n"}
LIBRARY = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((destructor)) static void at_exit(void) {
    int file = open("/logs/verifier/reward.txt", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    write(file, "1", 1);
}
"""
PROGRAMS = "programs of the image, and no others of their names"
MODULES = "modules of the image, and no others of their names"
START = "nothing travels that Python starts with"
CONFIGURED = "nothing travels that configures pytest"
ALONE = "a process of the server's own, in a sandbox that the agent never was in"
FRESH = "the verifier's places are its own"
LINKS = "no link into the tests travels"
CHEATS = {
    "pass_by_a_plugin_in_bytecode": ("bytecode", "no bytecode travels"),
    "stand_before_the_standard_library_in_an_archive": ("library_zip", START),
    "pass_by_sitecustomize": ("sitecustomize", START),
    "pass_by_usercustomize": ("usercustomize", START),
    "pass_by_a_pth_file": ("pth", START),
    "stand_before_pytest_in_the_users_packages": ("user_site", MODULES),
    "install_a_plugin_of_pytest": ("plugin_installed", CONFIGURED),
    "have_metadata_in_the_workdir_name_a_plugin": ("plugin_in_workdir", CONFIGURED),
    "pass_by_a_conftest_above_the_tests": ("conftest", CONFIGURED),
    "have_pytest_ini_load_a_plugin": ("pytest_ini", CONFIGURED),
    "have_tox_ini_load_a_plugin": ("tox_ini", CONFIGURED),
    "have_setup_cfg_load_a_plugin": ("setup_cfg", CONFIGURED),
    "have_pyproject_load_a_plugin": ("pyproject", CONFIGURED),
    "stand_before_pytest_in_the_workdir": ("shadowing_pytest", MODULES),
    "stand_before_what_pytest_needs": ("shadowing_library", MODULES),
    "stand_before_what_pytest_needs_by_a_link": ("linked_module", MODULES),
    "stand_before_pytest_in_a_workdir_that_is_a_link": ("workdir_linked", "the workdir stays a directory"),
    "stand_before_what_pytest_needs_where_tests_go": ("below_shadowed", MODULES),
    "have_git_run_a_program": ("git_config", "no configuration of git travels that names programs"),
    "have_git_run_a_hook": ("git_hook", "no hook travels that git runs on a checkout"),
    "link_the_answer_to_the_expected_one": ("answer_linked", LINKS),
    "link_the_answer_over_other_links": ("answer_linked_twice", LINKS),
    "link_the_answer_by_way_of_proc": ("answer_by_proc", LINKS),
    "replace_python": ("python_replaced", PROGRAMS),
    "replace_grep": ("grep_replaced", PROGRAMS),
    "replace_bash": ("bash_replaced", PROGRAMS),
    "replace_the_start_of_pytest": ("pytest_patched", MODULES),
    "stand_before_grep_on_the_path": ("path_shadowed", PROGRAMS),
    "stand_before_grep_in_the_home": ("home_shadowed", PROGRAMS),
    "stand_before_grep_in_a_home_of_links": ("home_linked", PROGRAMS),
    "define_a_function_in_bashrc": ("bashrc", "no rc file travels"),
    "define_a_function_in_a_file_that_tests_source": ("local_env", PROGRAMS),
    "have_the_environment_name_a_script": ("bash_env", ALONE),
    "export_a_function": ("exported_function", ALONE),
    "have_the_environment_name_modules": ("python_path", ALONE),
    "have_the_environment_name_a_plugin": ("pytest_plugins", ALONE),
    "define_bash": ("bash_function", ALONE),
    "have_a_library_loaded_into_every_program": ("preloaded", "no list of libraries travels"),
    "have_the_environment_name_a_library": ("preload_exported", ALONE),
    "have_a_daemon_write_the_reward": ("daemon_of_rewards", ALONE),
    "have_a_daemon_rewrite_the_tests": ("daemon_of_tests", ALONE),
    "plant_a_reward_that_cannot_be_removed": ("reward_planted", FRESH),
    "plant_a_conftest_among_the_tests": ("tests_planted", FRESH),
    "plant_tests_by_a_link": ("tests_linked", FRESH),
    "escape_a_score_by_a_link_for_the_logs": ("logs_linked", FRESH),
    "escape_a_score_by_closed_logs": ("logs_closed", FRESH),
    "escape_a_score_by_a_file_for_the_logs": ("logs_a_file", FRESH),
    "escape_a_score_by_a_pipe_for_the_reward": ("reward_a_pipe", FRESH),
    "escape_a_score_by_a_file_for_the_tests": ("tests_a_file", FRESH),
    "escape_a_score_by_removing_bash": ("bash_removed", PROGRAMS),
}
"""What is attempted → the script of it, and what stops it."""
CONTROLLED = ATTACKS(
    "cheats that are tried the naive way too",
    short=one_a_wall(CHEATS),
    long=tuple(script for script, _ in CHEATS.values()),
)
"""A control runs nothing of the service but a sandbox: it changes with its script alone."""
ESCAPES = {"logs_linked", "logs_closed", "logs_a_file", "reward_a_pipe", "tests_a_file", "bash_removed"}
"""Cheats of an agent without an answer that would rather have no score than 0."""
TOGETHER = {
    "planted": (
        *(
            "bytecode",
            "library_zip",
            "sitecustomize",
            "usercustomize",
            "pth",
            "user_site",
            "plugin_installed",
        ),
        *(
            "plugin_in_workdir",
            "conftest",
            "pytest_ini",
            "tox_ini",
            "setup_cfg",
            "pyproject",
            "answer_linked",
        ),
        *("shadowing_pytest", "shadowing_library", "linked_module", "path_shadowed", "home_shadowed"),
        *("bashrc", "local_env", "tests_planted", "below_shadowed", "git_hook", "git_config", "preloaded"),
    ),
    "replaced": (
        *("home_linked", "answer_linked_twice", "tests_linked", "pytest_patched", "python_replaced"),
        *("grep_replaced", "bash_replaced"),
    ),
    "running": (
        *("reward_planted", "answer_by_proc", "daemon_of_rewards", "daemon_of_tests", "bash_env"),
        *("exported_function", "python_path", "pytest_plugins", "bash_function", "preload_exported"),
    ),
    "linked": ("workdir_linked",),
    "escaping": ("logs_linked", "tests_a_file", "bash_removed"),
    "closing": ("logs_closed", "reward_a_pipe"),
    "replacing logs": ("logs_a_file",),
}
"""Agents of the service, and what each one tries, in this order."""
HONEST = ["mkdir -p ~/.local/bin && echo '42 is the answer' > answer.txt"]
FORKED = ["for i in $(seq 700); do (trap '' TERM HUP; sleep 600) & done 2>/dev/null; true"]
FILLED = ["for i in 1 2 3 4 5; do head -c 22M /dev/urandom > file$i; done", "true"]
CLOSED = [(HERE / "all_closed.sh").read_text()]
SMALL = "storage_mb = 120\n"
OTHERS = {"honest": HONEST, "forking": FORKED, "filling": FILLED, "closed": CLOSED}
"""Agents for which there is no control."""


@functools.cache
def library() -> str:
    """A shared library that writes a reward as each program ends, packed for a shell's variable; "" where
    there is no compiler, and the tests of it are skipped.
    """
    if shutil.which("cc") is None:
        return ""
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory, "library.so")
        options = ["-shared", "-fPIC", "-nostdlib", "-Os", "-s", "-x", "c", "-", "-o", str(built)]
        subprocess.run(["cc", *options], input=LIBRARY.encode(), check=True)
        return base64.b64encode(gzip.compress(built.read_bytes())).decode()


def script_of(name: str) -> str:
    """What the agent types for a cheat."""
    text = (HERE / f"{name}.sh").read_text()
    return f"LIBRARY={library()}\n{text}" if "$LIBRARY" in text else text


async def naively(name: str, host: HostClient, task: Path) -> float | None:
    """The reward of a cheat the naive way; None = there is none."""
    info = await host.start(SandboxSpec(image="base", owner="naive"))
    box = SandboxClient(info.socket)
    try:
        await box.setup({"HOME": "/root"})
        await box.bash("mkdir -p /app /logs/agent /logs/verifier /logs/artifacts && cd /app")
        await box.bash(script_of(name), PATIENCE_S)
        await box.upload(task / "tests", "/tests")
        await box.bash("cd /app; rm -f /logs/verifier/reward.txt /logs/verifier/reward.json")
        # On a busy machine a daemon comes late, and a control must not depend on who is first.
        if name == "daemon_of_tests":
            await box.bash("until cmp -s /srv/lie.py /tests/test_outputs.py; do sleep 0.02; done", PATIENCE_S)
        done = await box.bash("bash /tests/test.sh < /dev/null", PATIENCE_S)
        if name in ("daemon_of_rewards", "git_config", "git_hook"):
            await box.bash("until [ 1 = $(</logs/verifier/reward.txt) ]; do sleep 0.02; done", PATIENCE_S / 4)
        if name == "bash_removed":
            return None if done.exit_code == 127 else 0.0
        stale = (await box.stat("/logs/verifier/reward.json")).kind  # which could not be removed
        return float(await box.read_file(f"/logs/verifier/reward.{'json' if stale else 'txt'}"))
    except (SandboxRequestError, ValueError):
        return None
    finally:
        await box.close()
        await host.release(info.id)


@dataclass(frozen=True)
class Outcomes:
    """What came of the attempts."""

    service: dict[str, Rollout]
    """By agent, of `TOGETHER` and `OTHERS`."""
    naive: dict[str, Any]
    """By cheat: the reward, or what went wrong."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """What came of the attempts that tests here ask for."""
    require_apptainer()
    here = [item for item in request.session.items if item.path == request.path]
    tests = [item.callspec.params for item in here if "outcomes" in item.fixturenames]
    agents = list(dict.fromkeys(test["agent"] for test in tests if "agent" in test))
    cheats = list(dict.fromkeys(test["cheat"] for test in tests if test.get("control")))
    root = tmp_path_factory.mktemp("harbor")
    turn = asyncio.Semaphore(AT_ONCE)

    async def attempt(cheat: str, host: HostClient) -> float | None:
        async with turn:
            return await naively(cheat, host, root / "task")

    async def made(state: Path) -> tuple[list[Rollout], list[Any]]:
        jobs = []
        for agent in agents:
            commands = [script_of(cheat) for cheat in TOGETHER.get(agent, ())] or OTHERS[agent]
            jobs.append((small if agent == "filling" else task, commands))
        controls = [attempt(cheat, HostClient(state)) for cheat in cheats]
        return await roll_many(jobs), await asyncio.gather(*controls, return_exceptions=True)

    with own_node(root / "bundles", ROLLOUT_SANDBOX_WARM="0") as state:
        task = request_of(root / "task", OFFLINE)
        small = request_of(root / "small", OFFLINE + SMALL)
        service, naive = asyncio.run(made(state))
        yield Outcomes(dict(zip(agents, service, strict=True)), dict(zip(cheats, naive, strict=True)))


def request_of(root: Path, toml: str) -> dict[str, Any]:
    """The request of the task that all agents here have."""
    return request(write_task(root, toml, test=TEST, files=FILES))


@pytest.fixture
def target(cheat: str, agent: str, control: bool, outcomes: Outcomes) -> RewardTarget:
    """The service, or the naive way, and what came of the cheat there."""
    outcome = outcomes.naive[cheat] if control else outcomes.service[agent]
    if isinstance(outcome, BaseException):
        raise outcome
    return RewardTarget(control, outcome)


def attempt_of(cheat: str, wall: str) -> Callable[..., None]:
    """The test of a cheat."""

    @attack(stopped_by=wall)
    def attempt(target: RewardTarget, cheat: str, agent: str, control: bool) -> bool:
        if control:
            return target.outcome is None if cheat in ESCAPES else target.outcome == 1.0
        done = target.outcome
        if cheat in ESCAPES:
            return done.reward != 0.0 or done.drop
        assert done.state is State.COMPLETED, done.error
        return done.reward != 0.0

    (agent,) = (agent for agent, cheats in TOGETHER.items() if cheat in cheats)
    tried = {"service": False, "control": True} if cheat in CONTROLLED else {"service": False}
    places = pytest.mark.parametrize("control", tried.values(), ids=tried)
    if "$LIBRARY" in (HERE / f"{cheat}.sh").read_text():
        attempt = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")(attempt)
    return pytest.mark.parametrize(("cheat", "agent"), [(cheat, agent)])(places(attempt))


for title, (cheat, wall) in CHEATS.items():
    globals()[f"test_{title}"] = attempt_of(cheat, wall)


def test_every_script_is_somebodys() -> None:
    tried = {cheat for cheats in TOGETHER.values() for cheat in cheats}
    assert tried == {cheat for cheat, _ in CHEATS.values()}
    assert {path.stem for path in HERE.glob("*.sh")} == tried | {"all_closed"}


@pytest.mark.parametrize("agent", ["honest"])
def test_an_agent_that_did_the_work_is_rewarded(outcomes: Outcomes, agent: str) -> None:
    assert outcomes.service[agent].reward == 1.0, outcomes.service[agent].error


@pytest.mark.parametrize("agent", ["forking", "filling", "closed"])
def test_an_agent_that_leaves_no_room_behind_is_scored_0(outcomes: Outcomes, agent: str) -> None:
    done = outcomes.service[agent]
    assert (done.reward, done.drop) == (0.0, False), done.error
