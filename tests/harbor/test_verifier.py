"""Verification of Harbor tasks: what travels to it, what a reward is, and whose fault it is if none is."""

from __future__ import annotations

import asyncio
import json

import pytest

from rollout.schema import Blame, Rollout, Stage, State
from sandbox.config import HostConfig
from tests.helpers.harbor_agents import LIMITS, OFFLINE, roll, roll_many
from tests.helpers.harbor_tasks import request, write_task
from workers.handlers.harbor import carry, verifier


def log_of(rollout: Rollout) -> str:
    assert rollout.error is None, rollout.error
    return rollout.trajectory.artifacts["verifier.log"]


def withheld(rollout: Rollout) -> dict[str, str]:
    """Path → reason."""
    lines = rollout.trajectory.artifacts.get("withheld", "").splitlines()
    return dict(line.split(": ", 1) for line in lines)


# -- what travels ------------------------------------------------------------------------------------------

HONEST = r"""
mkdir -p /app/src /app/empty && cd /app
printf 'def twice(x):\n    return 2 * x\n' > src/maths.py
printf '#!/bin/sh\necho tool\n' > /usr/local/bin/toy-tool && chmod 755 /usr/local/bin/toy-tool
echo 'setting = 1' >> /etc/debconf.conf
mkdir -p /srv/www && echo page > /srv/www/index.html
echo note > ~/note.txt && mkdir -m 711 ~/secret
rm -r /usr/games /opt && rm /etc/issue
ln -s src/maths.py link.py && ln -s /srv/www site
printf 'x' > closed && chmod 0 closed && mkdir -m 0 dark
chmod 4711 src/maths.py
printf 'in\tit' > "$(printf 'od\377d name')"
git init -q . && git add src && git -c user.name=a -c user.email=a@b commit -qm one
"""
WHEEL = r"""
mkdir -p /tmp/w/toy_pkg-1.0.dist-info /tmp/w/toy_pkg && cd /tmp/w
echo 'VALUE = 7' > toy_pkg/__init__.py
printf 'Metadata-Version: 2.1\nName: toy-pkg\nVersion: 1.0\n' > toy_pkg-1.0.dist-info/METADATA
printf 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n' > toy_pkg-1.0.dist-info/WHEEL
printf '[console_scripts]\ntoy-main = toy_pkg:VALUE.bit_length\n' > toy_pkg-1.0.dist-info/entry_points.txt
printf 'toy_pkg/__init__.py,,\ntoy_pkg-1.0.dist-info/METADATA,,\ntoy_pkg-1.0.dist-info/WHEEL,,\n' > R
printf 'toy_pkg-1.0.dist-info/entry_points.txt,,\ntoy_pkg-1.0.dist-info/RECORD,,\n' >> R
mv R toy_pkg-1.0.dist-info/RECORD
python3 -m zipfile -c /tmp/toy_pkg-1.0-py3-none-any.whl toy_pkg toy_pkg-1.0.dist-info
pip install -q --no-index --break-system-packages /tmp/toy_pkg-1.0-py3-none-any.whl
"""
TRAVELLED = r"""
set -e
cd /app
python3 -c 'import sys; sys.path.insert(0, "src"); import maths; assert maths.twice(2) == 4'
python3 -c 'import toy_pkg; assert toy_pkg.VALUE == 7'
test -x "$(command -v toy-main)"
test "$(toy-tool)" = tool
grep -q 'setting = 1' /etc/debconf.conf
test "$(cat /app/site/index.html)" = page
test "$(readlink link.py)" = src/maths.py
test "$(cat ~/note.txt)" = note
test "$(stat -c %a ~/secret)" = 711
test ! -e /opt
test ! -e /etc/issue
test -d empty
test "$(stat -c %a closed dark src/maths.py | tr '\n' ' ')" = '0 0 4711 '
test "$(cat "$(printf 'od\377d name')")" = "$(printf 'in\tit')"
test "$(git log --format=%s)" = one
git diff --quiet HEAD -- src
echo 1 > /logs/verifier/reward.txt
"""


def test_what_an_agent_did_honestly_is_there_for_the_verifier(tmp_path):
    task = request(write_task(tmp_path / "task", OFFLINE, test=TRAVELLED))
    done = roll(task, HONEST, WHEEL)
    assert done.reward == 1.0, (log_of(done), withheld(done))
    assert withheld(done) == {"/usr/games": "of the system"}
    assert done.metrics["verification_s"] > 0


SYSTEM = "of the system"
PROGRAM = "stands before a program"
LIBRARY = "stands before a library"
MODULE = "stands before a module, or adds to one"
SHADOW = "stands before a module"
TESTS = "configures tests"
NAMED = "configures tests or the start of programs"
START = "configures the start of programs"
GIT = "has git run programs"
WAY = "a link in the place of what the verifier uses"
LEADS = "leads to what only the verifier has"
DIST = "/usr/local/lib/python3.11/dist-packages"
FILES = {
    "/usr/bin/grep": SYSTEM,
    "/usr/lib/python3/dist-packages/pytest/__init__.py": SYSTEM,
    "/usr/share/perl5/Debconf/Config.pm": SYSTEM,
    "/usr/local/bin/grep": PROGRAM,
    "/usr/local/bin/uvx": PROGRAM,
    "/root/.local/bin/cat": PROGRAM,
    "/usr/local/lib/libc.so.6": LIBRARY,
    "/usr/lib/python3/dist-packages/_pytest/more.py": MODULE,
    f"{DIST}/pluggy.py": MODULE,
    "/usr/lib/python3.11/typing/__init__.py": MODULE,
    "/home/sandbox/.local/lib/python3.11/site-packages/pytest/__init__.py": MODULE,
    "/usr/lib/python311.zip": NAMED,
    f"{DIST}/more.pth": NAMED,
    "/home/sandbox/.local/lib/python3.11/site-packages/usercustomize.py": NAMED,
    f"{DIST}/sitecustomize/__init__.py": NAMED,
    "/conftest.py": NAMED,
    "/app/deep/conftest.py": NAMED,
    "/pytest.ini": NAMED,
    "/app/jest.config.js": NAMED,
    "/etc/ssl/openssl.cnf": NAMED,
    f"{DIST}/evil-1.dist-info/entry_points.txt=[pytest11]\nevil = evil\n": TESTS,
    "/app/evil.egg-info/entry_points.txt=[ console_scripts ]\na = b:c\n[pytest11 ]\nevil = evil\n": TESTS,
    "/pyproject.toml=[tool.'pytest'.ini_options]\naddopts = '-p evil'\n": TESTS,
    '/app/pyproject.toml=tool."py\\u0074est".ini_options.addopts = "-p evil"\n': TESTS,
    "/app/a/pyproject.toml=no TOML, which stops pytest": TESTS,
    "/tox.ini=[pytest]\naddopts = -p evil\n": TESTS,
    "/setup.cfg=[metadata]\nname = x\n[tool:pytest]\naddopts = -p evil\n": TESTS,
    "/etc/ld.so.preload.d": None,
    "/etc/ld.so.conf.d/evil.conf": START,
    "/etc/profile.d/evil.sh": START,
    "/etc/apt/apt.conf.d/99evil": START,
    "/etc/nsswitch.conf": START,
    "/usr/bin/pyvenv.cfg": START,
    "/usr/pyvenv.cfg": START,
    "/root/.bashrc": START,
    "/root/.config/pip/pip.conf": START,
    "/home/other/.profile": START,
    "/root/.curlrc": START,
    "/node_modules/chai/index.js": "runs tests",
    "/app/node_modules/jest/index.js": "runs tests",
    "/srv/any/where/pytest.py": SHADOW,
    "/srv/any/where/_pytest/__init__.py": SHADOW,
    "/srv/entered/json.py": SHADOW,
    "/app/below/json.py": SHADOW,
    "/root/.cache/uv/archive-v0/x/y.py": START,
    "/root/.local/share/uv/python/bin/python3": START,
    "/app/.git/hooks/post-checkout": GIT,
    "/app/.git/config=[core]\n\tfsMonitor = /srv/evil\n": GIT,
    '/srv/repo/.git/modules/a/config=[filter "a"] smudge = /srv/evil\n': GIT,
    "/root/.gitconfig=[include]\n\tpath = /srv/evil\n": GIT,
    "/app/pytest.py": SHADOW,
    "/app/pathlib.py": SHADOW,
    "/app/json/__init__.py": SHADOW,
    "/app/pluggy.cpython-311-x86_64-linux-gnu.so": SHADOW,
    "/app/link_to_tests -> /tests/expected": LEADS,
    "/app/link_to_link -> up/tests": LEADS,
    "/app/link_to_self -> /proc/self/root/tests/expected": LEADS,
    "/app/types -> /srv/types": SHADOW,
    "/root/.cargo -> /srv/cargo": WAY,
    "/app/x.dist-info -> /srv/info": WAY,
    # What stays.
    "/app/up -> /": None,
    "/srv/types/__init__.py": None,
    "/srv/cargo/bin/grep": None,
    "/srv/info/entry_points.txt": None,
    "/usr/local/bin/tool": None,
    "/usr/local/lib/libtoy.so.1": None,
    "/usr/local/etc/toy.conf": None,
    "/usr/share/toy/data": None,
    f"{DIST}/toy/__init__.py": None,
    f"{DIST}/toy-1.dist-info/entry_points.txt=[console_scripts]\ntoy = toy:main\n": None,
    "/app/pyproject/pyproject.toml=[project]\nname = 'toy'\n[tool.ruff]\nline-length = 100\n": None,
    "/app/tox/tox.ini=[tox]\nenvlist = py311\n": None,
    "/app/json/data.json": None,
    "/app/test/test_toy.py": None,
    "/app/pkg/pathlib.py": None,
    "/app/.bashrc": None,
    "/app/node_modules/leftpad/index.js": None,
    "/app/tests/conf.py": None,
    "/etc/toy.conf": None,
    "/root/.config/toy": None,
    "/root/.local/bin/toy": None,
    "/tmp/result.txt": None,
    "/var/tmp/result.txt": None,
    "/new/place": None,
    "/srv/repo.git/hooks/post-receive": None,
    "/srv/repo.git/config=[core]\n\tbare = true\n": None,
    "/app/bin/run": None,
    "/app/venv/pyvenv.cfg": None,
    "/app/venv/bin/python3": None,
}
"""Path, ` -> ` where a link leads, `=` what is in it → why it is withheld; None = it travels."""
MAKE = """
import json, os
for name in json.load(open("/tmp/files.json")):
    path, is_link, target = name.partition(" -> ")
    path, is_file, text = path.partition("=")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if is_link:
        os.symlink(target, path)
    else:
        mode = "a" if os.path.exists(path) else "w"
        open(path, mode).write(text or "# changed\\n")
"""


def test_what_would_run_the_verifier_does_not_travel(tmp_path):
    names = {name.partition(" -> ")[0].partition("=")[0]: why for name, why in FILES.items()}
    travels = [name for name, why in names.items() if why is None]
    test = "cd /srv/entered; cd below; " + "\n".join(
        f"test -e {name} || {{ echo missing {name}; exit 1; }}" for name in travels
    )
    task = request(
        write_task(tmp_path / "task", OFFLINE, test=f"{test}\necho 1 > /logs/verifier/reward.txt\n")
    )
    files = f"cat > /tmp/files.json <<'EOF'\n{json.dumps(list(FILES))}\nEOF\n"
    files += f"cat > /tmp/make.py <<'EOF'\n{MAKE}\nEOF"
    done = roll(task, files, "python3 /tmp/make.py")
    assert withheld(done) == {name: why for name, why in names.items() if why is not None}
    assert done.reward == 1.0, log_of(done)
    told = f"not verified with {len(withheld(done))} of the agent's files: "
    assert any(warning.startswith(told) for warning in done.trajectory.warnings)


def test_all_of_it_travels_where_the_task_trusts_it(tmp_path):
    test = "grep -q no-such-thing /etc/hostname && echo 1 > /logs/verifier/reward.txt"
    task = request(write_task(tmp_path / "task", OFFLINE, test=test), trust_system=True)
    script = "cp /bin/true /tmp/true; mv -f /tmp/true /usr/bin/grep; ln -s /tests /app/tests"
    done = roll(task, script)
    assert (done.reward, withheld(done)) == (1.0, {"/app/tests": LEADS})


# -- what a reward is --------------------------------------------------------------------------------------

HOSTILE = {
    "a link": "ln -s /app/one reward.txt",
    "a directory": "mkdir reward.txt",
    "a pipe": "mkfifo reward.txt",
    "100 MB": "head -c 100M /dev/zero > reward.txt",
    "no text": "printf '1\\377' > reward.txt",
    "a json before a text": "echo 1 > reward.txt; echo '{' > reward.json",
    "nothing": "true",
    "no numbers": """echo '{"reward": true}' > reward.json""",
    "which": """echo '{"a": 1, "b": 1}' > reward.json""",
}


def test_a_reward_file_that_is_none_is_the_tasks_fault_and_read_without_harm(tmp_path):
    async def all_of_them() -> list[Rollout]:
        jobs = []
        for number, line in enumerate(HOSTILE.values()):
            test = f"echo 1 > /app/one; cd /logs/verifier; {line}\n"
            root = write_task(tmp_path / str(number), OFFLINE, test=test, solution=None)
            jobs.append((request(root), ["true"]))
        return await roll_many(jobs)

    for what, done in zip(HOSTILE, asyncio.run(all_of_them()), strict=True):
        assert (done.state, done.error.blame, done.drop) == (State.FAILED, Blame.TASK, True), what
        assert "without a solution" in done.error.message, (what, done.error.message)


def test_several_rewards_are_components_and_one_is_named(tmp_path):
    test = """echo '{"speed": 0.25, "style": 1}' > /logs/verifier/reward.json\n"""
    task = request(write_task(tmp_path / "task", OFFLINE, test=test), reward_key="speed")
    done = roll(task, "true")
    assert (done.reward, done.reward_components) == (0.25, {"speed": 0.25, "style": 1.0})


def test_a_stale_reward_of_the_agents_is_none(tmp_path):
    plant = "cd /logs/verifier; echo 1 > reward.txt; echo 1 > reward.json; echo a > ../artifacts/a"
    test = "ls /logs/verifier/* /logs/artifacts; echo 0.5 > /logs/verifier/reward.txt"
    done = roll(request(write_task(tmp_path / "task", OFFLINE, test=test)), plant)
    assert (done.reward, log_of(done).split()[-1]) == (0.5, "a")
    assert "reward.json" not in log_of(done).replace("cannot access", "")


# -- whose fault it is -------------------------------------------------------------------------------------

BREAKABLE = """
test -e /app/broken && exit 1
test -e /app/slow && sleep 60
test -f /app/done.txt
echo $((1 - $?)) > /logs/verifier/reward.txt
"""


def test_an_agent_whose_files_keep_the_verifier_from_a_reward_is_scored_0(tmp_path):
    task = request(write_task(tmp_path / "task", OFFLINE, test=BREAKABLE, solution="touch done.txt\n"))
    done = roll(task, "touch broken done.txt")
    assert (done.state, done.reward, done.drop) == (State.COMPLETED, 0.0, False), done.error
    assert any("the verifier writes no reward" in warning for warning in done.trajectory.warnings)


def test_a_task_whose_own_solution_gets_no_reward_is_to_blame(tmp_path):
    task = request(write_task(tmp_path / "task", OFFLINE, test=BREAKABLE, solution="touch broken\n"))
    done = roll(task, "touch broken")
    assert (done.state, done.error.blame, done.drop) == (State.FAILED, Blame.TASK, True)
    assert "for the files of its own solution" in done.error.message


def test_a_verifier_that_wrote_no_reward_once_is_run_again(tmp_path):
    # Its first run begins soon after the agent's end, and waits until a second one would not.
    test = "if [ $(($(date +%s%N) / 1000000 - $(cat /app/ended))) -lt 5000 ]; then sleep 5; exit 1; fi\n"
    test += BREAKABLE
    task = request(write_task(tmp_path / "task", OFFLINE, test=test, solution=None))
    done = roll(task, "touch done.txt; echo $(($(date +%s%N) / 1000000)) > ended")
    assert done.reward == 1.0, done.error


def test_a_verifier_that_hangs_on_the_agents_files_is_the_agents_fault(tmp_path):
    toml = f"{OFFLINE}[verifier]\ntimeout_sec = 2.0\n"
    task = request(write_task(tmp_path / "task", toml, test=BREAKABLE, solution="touch done.txt\n"))
    done = roll(task, "touch slow done.txt")
    assert (done.reward, done.drop) == (0.0, False), done.error
    assert any("did not end within 2 s" in warning for warning in done.trajectory.warnings)


def test_a_hang_is_nobodys_fault_where_eval_leaves_the_verifier_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(verifier, "FAIR", 10_000)  # so often what the oracle's files take is never there
    toml = f"{OFFLINE}[verifier]\ntimeout_sec = 900.0\n"
    task = request(write_task(tmp_path / "task", toml, test=BREAKABLE, solution="touch done.txt\n"))
    done = roll(task, "touch slow", limits=LIMITS.model_copy(update={"eval_timeout_s": 23.0}))
    assert done.error.blame is Blame.TASK and "eval_timeout_s left it" in done.error.message, done.error


def test_more_than_may_travel_is_scored_0(tmp_path, monkeypatch):
    monkeypatch.setattr(carry, "MOST_BYTES", 1 << 20)
    task = request(write_task(tmp_path / "task", OFFLINE))
    done = roll(task, "touch done.txt; head -c 2M /dev/zero > big")
    assert (done.reward, done.drop) == (0.0, False), done.error
    assert any("at app/big" in warning for warning in done.trajectory.warnings)


def test_no_agent_drops_its_sample_by_files_that_a_sandbox_of_the_nodes_largest_has_to_hold(tmp_path):
    most = HostConfig.from_environment().disk_mb.most
    task = request(write_task(tmp_path / "task", f"{OFFLINE}\nstorage_mb = {most}"))
    done = roll(task, "touch done.txt; head -c 10M /dev/zero > big")
    assert done.reward == 1.0, done.error


@pytest.mark.parametrize(("where", "reward"), [("", 1.0), ('environment_mode = "separate"', 0.0)])
def test_an_agent_that_closes_its_sandbox_is_scored_for_its_files(tmp_path, where, reward):
    task = request(write_task(tmp_path / "task", f"{OFFLINE}\n[verifier]\n{where}"))
    done = roll(task, "touch done.txt; chmod 000 / /run")
    assert (done.reward, done.drop) == (reward, False), done.error


# -- a verifier of its own ---------------------------------------------------------------------------------


def test_a_separate_verifier_has_the_artifacts_and_what_collect_made_alone(tmp_path):
    toml = f"""
artifacts = ["out.txt", {{ source = "/srv/data", exclude = ["*.tmp"] }}, "missing"]
{OFFLINE}
[verifier]
environment_mode = "separate"
env = {{ WORD = "${{UNSET:-yes}}" }}
[[verifier.collect]]
command = "cat /app/hidden > /logs/artifacts/collected; pwd > /logs/artifacts/where"
[[verifier.collect]]
command = "exit 3"
"""
    test = """
cd /app
test "$WORD" = yes && test "$(cat out.txt)" = out && test ! -e hidden && test ! -e /usr/local/bin/mine &&
test "$(cat /srv/data/a)" = a && test ! -e /srv/data/b.tmp && test ! -e missing &&
test "$(cat /logs/artifacts/collected /logs/artifacts/where | tr '\\n' ' ')" = "deep /app "
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
    script = (
        "echo out > out.txt; echo deep > hidden; touch /usr/local/bin/mine; mkdir /srv/data; cd /srv/data"
    )
    done = roll(request(write_task(tmp_path / "task", toml, test=test)), f"{script}; echo a > a; touch b.tmp")
    assert done.reward == 1.0, log_of(done)


def test_files_that_a_step_came_with_are_the_tasks_and_what_the_agent_made_of_them_counts(tmp_path):
    toml = f'{OFFLINE}[[steps]]\nname = "only"\n'
    test = """
cd /app
test "$(cat src/pluggy/__init__.py conftest.py)" = "changed
given" && test ! -e removed && test -e kept && test ! -e src/iniconfig.py
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
    step = "steps/only/"
    files = {
        f"{step}workdir/{name}": "given\n"
        for name in ("src/pluggy/__init__.py", "conftest.py", "removed", "kept")
    }
    files |= {f"{step}instruction.md": "Change it.", f"{step}tests/test.sh": f"PYTHONPATH=/app/src\n{test}"}
    task = write_task(tmp_path / "task", toml, instruction=None, test=None, solution=None, files=files)
    script = "echo changed | tee src/pluggy/__init__.py conftest.py > src/iniconfig.py; rm removed"
    done = roll(request(task), script)
    assert done.reward == 1.0, (done.error, done.trajectory.artifacts)


def test_a_runtime_without_a_system_of_its_own_is_refused_before_anything_is_made(tmp_path):
    task = request(write_task(tmp_path / "task", OFFLINE))
    done = roll(task, "true", sandbox_runtime="local-unsafe")
    assert (done.error.blame, done.error.stage) == (Blame.TASK, Stage.INIT)
    assert "a system of its own" in done.error.message
