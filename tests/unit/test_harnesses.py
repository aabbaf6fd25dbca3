"""Seams: how each program is told its task and its model; their catalogue; the pack, with a stand-in npm."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rollout.schema import RolloutRequest
from rollout.trajectory import FinishReason, Message
from services.settings import Settings
from tests.helpers.stack import wait_until
from workers.errors import TaskError
from workers.handlers.base import AgentHandler
from workers.handlers.calculator import Calculator
from workers.harnesses import catalogue, pack
from workers.harnesses.base import PACK, Harness, Job, Launch, fed
from workers.harnesses.commands import harness as harness_command
from workers.harnesses.drive import Driven

LONGEST_ARGUMENT = 131071
URL, KEY, MODEL = "http://127.0.0.1:8790", "sk-not-to-be-seen", "policy-7"
INSTRUCTIONS = {
    "quotes": 'it\'s "quoted" `id` $HOME \\ \\n',
    "lines": "\n first\n\nthird\r\n\ttab \n",
    "dashes": "--help -- -p",
    "slash": "/help @README.md !ls #x",
    "braces": "{instruction} {key} {{model}} {} {0} ${KEY} {{ task }} {% x %}",
    "unicode": "schön 漢字 🙂 \u2028",
    "long": "x" * 100_000,
    "very long": "wörd " * 300_000,
}
PROGRAMS = [name for name in catalogue.OWN if name != "command"]


def job(home: Path | str = "/home/agent", instruction: str = "do it", **rest) -> Job:
    given = {"base_url": URL, "key": KEY, "model": MODEL, "workspace": "/workspace", **rest}
    return Job(instruction=instruction, home=str(home), context_tokens=60_000, timeout_s=900.0, **given)


def told(launch: Launch) -> str:
    """All that a program can read."""
    return "\n".join([*launch.argv, *launch.env.values(), *launch.files.values()])


def arrived(name: str, launch: Launch) -> str:
    """The instruction as the program reads it, after its files were written."""
    for path, text in launch.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(text.encode())
    if name == "mini_swe_agent":
        return json.loads(launch.files[launch.argv[4].partition("=")[2]])["run"]["task"]
    if name == "openhands":
        return Path(launch.argv[3]).read_bytes().decode()
    start = launch.argv.index(next(word for word in launch.argv if word.startswith(PACK)))
    return subprocess.run([*launch.argv[:start], "cat"], capture_output=True, check=True).stdout.decode()


@pytest.mark.parametrize("instruction", INSTRUCTIONS.values(), ids=INSTRUCTIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_instruction_arrives_as_it_is_whatever_is_in_it(name, instruction, tmp_path):
    launch = catalogue.find(name).launch(job(tmp_path, instruction))
    # What begins with a slash is a command of some programs' own, but not in a second line.
    moved = instruction.startswith("/") and name not in ("mini_swe_agent", "openhands")
    assert arrived(name, launch) == ("\n" if moved else "") + instruction
    assert max(len(word.encode()) for word in [*launch.argv, *launch.env.values()]) <= LONGEST_ARGUMENT


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_told_where_its_model_is_and_shows_its_key_in_no_list_of_processes(name):
    launch = catalogue.find(name).launch(job())
    assert URL in told(launch) and MODEL in told(launch)
    assert KEY not in " ".join(launch.argv)
    assert KEY in launch.env.values(), "a file would stay among the transcripts"
    assert not any(KEY in text for text in launch.files.values())
    assert all(path.startswith("/home/agent/") for path in launch.files)
    assert launch.transcripts and not any(place.startswith("/") for place in launch.transcripts)
    assert any(word.startswith(f"{PACK}/") for word in launch.argv)


@pytest.mark.parametrize("name", catalogue.OWN)
def test_variables_of_the_request_go_before_a_seams_own(name):
    harness = catalogue.find(name)
    variable = next(iter(harness.launch(job(command=["true"])).env))
    env = harness.launch(job(command=["true"], env={variable: "mine", "FURTHER": "1"})).env
    assert env[variable] == "mine" and env["FURTHER"] == "1"


def test_codex_is_configured_by_a_file_that_is_toml():
    model = 'a"b\\c\n[x] 🙂'
    launch = catalogue.find("codex").launch(job(model=model))
    config = tomllib.loads(launch.files[f"{launch.env['CODEX_HOME']}/config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert config["model"] == model and config["model_context_window"] == 60_000
    assert provider["base_url"] == f"{URL}/v1" and launch.env[provider["env_key"]] == KEY
    assert not any(config["features"].values())


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "mini_swe_agent"])
def test_a_program_that_shortens_its_history_is_told_when(name):
    launch = catalogue.find(name).launch(job())
    if name == "gemini_cli":  # it has one context for all models, of which it takes a share
        settings = json.loads(launch.files["/home/agent/.gemini/settings.json"])
        assert 30_000 < settings["model"]["compressionThreshold"] * 1048576 < 55_000
    else:
        assert "60000" in told(launch)


def test_claude_code_gets_an_address_without_a_version_and_one_model_for_all_its_roles():
    env = catalogue.find("claude_code").launch(job()).env
    assert env["ANTHROPIC_BASE_URL"] == URL and env["IS_SANDBOX"] == "1"
    roles = [value for name, value in env.items() if name.endswith("_MODEL")]
    assert roles == [MODEL] * 5


# ------------------------------------------------------------------------------------ any program


def test_places_of_a_command_are_filled_in_once_and_by_no_shell():
    instruction = "{key} $(id) 'x' \"{model}\""
    command = [
        "prog",
        "--task={instruction}",
        "{model}@{base_url}",
        "{key}",
        "{other} {{model}} {}",
        "{home}:{workspace}",
    ]
    launch = catalogue.find("command").launch(job(instruction=instruction, command=command))
    assert launch.argv == (
        *("prog", f"--task={instruction}", f"{MODEL}@{URL}", KEY),
        *("{other} {" + MODEL + "} {}", "/home/agent:/workspace"),
    )
    assert launch.env["OPENAI_BASE_URL"] == f"{URL}/v1" and launch.env["ANTHROPIC_BASE_URL"] == URL


def test_a_command_with_a_long_instruction_reads_it_from_a_file():
    instruction = "ü" * 70_000
    seam = catalogue.find("command")
    with pytest.raises(ValueError, match="instruction_file"):
        seam.launch(job(instruction=instruction, command=["prog", "{instruction}"]))
    launch = seam.launch(job(instruction=instruction, command=["prog", "{instruction_file}"]))
    assert launch.files[launch.argv[1]] == instruction


def test_a_command_without_a_program_is_refused():
    with pytest.raises(ValueError, match=r"agent\.command"):
        catalogue.find("command").launch(job())


def test_what_is_fed_keeps_arguments_and_exit_code(tmp_path):
    home = tmp_path / "a 'b'"
    argv = ["sh", "-c", 'printf "%s|" "$@"; cat; exit 7', "sh", "a b", "", "-x", "*"]
    launch = fed(job(home, "from the file"), argv, {}, {"c/d": "e"}, "t")
    for path, text in launch.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    done = subprocess.run(launch.argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "a b||-x|*|from the file")
    assert (home / "c/d").read_text() == "e" and launch.transcripts == ("t",)


# -------------------------------------------------------------------------------------- catalogue


def test_each_harness_is_found_by_its_name():
    assert set(catalogue.OWN) <= set(catalogue.names())
    for name in catalogue.OWN:
        assert catalogue.find(name).name == name


def test_an_unknown_name_lists_those_that_are_known():
    with pytest.raises(catalogue.UnknownHarness, match=r"'claude'.*claude_code, codex.*qwen_code"):
        catalogue.find("claude")


class Mine(Harness):
    name = "mine"

    def launch(self, job: Job) -> Launch:
        return Launch(("mine",))


def test_a_package_may_add_a_harness_and_replace_one(monkeypatch):
    values = {
        "mine": f"{__name__}:Mine",
        "codex": f"{__name__}:Mine",
        "broken": "no.such:Thing",
        "odd": "json:dumps",
    }
    points = [EntryPoint(name, value, catalogue.GROUP) for name, value in values.items()]
    monkeypatch.setattr(
        catalogue, "entry_points", lambda group, name=None: [p for p in points if name in (None, p.name)]
    )
    assert isinstance(catalogue.find("mine"), Mine) and isinstance(catalogue.find("codex"), Mine)
    assert {"mine", "broken", "pi"} <= set(catalogue.names())
    for name in ("broken", "odd"):
        with pytest.raises(catalogue.UnknownHarness, match=f"'{name}' cannot be loaded"):
            catalogue.find(name)
    assert catalogue.find("pi").name == "pi"


# ------------------------------------------------------------------------------------------- pack

NPM = """#!/bin/sh
# A stand-in: npm install --prefix PLACE …
echo "$@" >>"$NPM_CALLS"
case "$*" in *broken*) echo "npm error 404 no such package" >&2; exit 1 ;; esac
while [ -e "${NPM_HELD:-/none}" ]; do sleep 0.05; done
mkdir -p "$3/node_modules/node/bin" "$3/node_modules/.bin"
echo node >"$3/node_modules/node/bin/node"
echo program >"$3/node_modules/.bin/program"
chmod 700 "$3/node_modules/.bin/program" "$3/node_modules/.bin"
"""


class Program(Mine):
    name = "program"
    packages = ("npm:program",)


class Broken(Mine):
    name = "broken"
    packages = ("npm:broken",)


class Snake(Mine):
    name = "snake"
    packages = ("pypi:snake",)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A pack of its own, versions of its own, and what npm is called with."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(NPM)
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent), prepend=":")
    monkeypatch.setenv("NPM_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    pinned = {"npm:node": "22.0.0", "npm:program": "1.0.0", "npm:broken": "2.0.0", "pypi:snake": "3"}
    monkeypatch.setattr(pack, "versions", lambda: pinned)
    path = tmp_path / "calls"
    return lambda: path.read_text().splitlines() if path.exists() else []


def mute(_: str) -> None:
    pass


def test_versions_pin_just_what_harnesses_are_made_of():
    used = {package for name in catalogue.OWN for package in catalogue.find(name).packages}
    assert set(pack.versions()) == used | {"npm:node"}
    assert all(version[0].isdigit() and " " not in version for version in pack.versions().values())


def test_a_part_is_built_once_and_readable_by_all(calls):
    with pytest.raises(pack.PackError, match=r"program 1\.0\.0 and node 22\.0\.0: not in .*build program"):
        pack.require(Program())
    assert pack.build(Program(), mute)
    pack.require(Program())
    assert not pack.build(Program(), mute), "it is there"
    assert [line.split()[-1] for line in calls()] == ["node@22.0.0", "program@1.0.0"]
    assert (pack.directory() / "node/bin/node").read_text() == "node\n"
    assert not (pack.directory() / "node/node_modules").exists()
    place = pack.directory() / "program/node_modules/.bin"
    assert place.stat().st_mode & 0o555 == 0o555 and (place / "program").stat().st_mode & 0o555 == 0o555
    assert sorted(path.name for path in pack.directory().iterdir()) == [
        *(".lock", "node", "node@22.0.0", "program", "program@1.0.0")
    ]


def test_another_version_takes_the_place_of_one_that_stays_for_who_uses_it(calls):
    pack.build(Program(), mute)
    pack.versions()["npm:program"] = "1.1.0"
    with pytest.raises(pack.PackError, match=r"program 1\.1\.0: not in"):
        pack.require(Program())
    pack.build(Program(), mute)
    assert (pack.directory() / "program").readlink() == Path("program@1.1.0")
    assert (pack.directory() / "program@1.0.0/node_modules").is_dir()


def test_what_fails_tells_its_output_and_leaves_what_was_there(calls):
    pack.build(Program(), mute)
    with pytest.raises(pack.PackError, match=r"(?s)broken: cannot install npm:broken@2\.0\.0:.*error 404"):
        pack.build(Broken(), mute)
    assert not list(pack.directory().glob("*broken*")) and not list(pack.directory().glob(".new-*"))
    pack.require(Program())


def test_two_builds_at_once_install_once(calls, monkeypatch, tmp_path):
    waits, held = "another build is under way; waiting for it", tmp_path / "held"
    held.touch()
    monkeypatch.setenv("NPM_HELD", str(held))
    heard: list[str] = []
    threads = [threading.Thread(target=pack.build, args=(Program(), heard.append)) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: heard.count(waits) == 2, 60, "the others to wait for the first")
    finally:
        held.unlink()
    for thread in threads:
        thread.join()
    assert len(calls()) == 2 and heard.count(waits) == 2
    pack.require(Program())


def test_a_python_that_is_too_old_is_named(calls, tmp_path):
    old = tmp_path / "bin" / "old-python"
    old.write_text('#!/bin/sh\necho \'[[3, 11, 2], "/usr/bin/python3", "/usr/lib/python3.11"]\'\n')
    old.chmod(0o755)
    with pytest.raises(
        pack.PackError, match=r"old-python is not Python 3\.12 or newer; name one by --python"
    ):
        pack.build(Snake(), mute, str(old))
    with pytest.raises(pack.PackError, match=r"/no/python is not Python 3\.12"):
        pack.build(Snake(), mute, "/no/python")


def test_the_commands_build_what_they_can_and_list_it(calls, monkeypatch):
    known = {"program": Program(), "broken": Broken()}
    monkeypatch.setattr(catalogue, "names", lambda: sorted(known))
    monkeypatch.setattr(catalogue, "find", lambda name: known[name])
    built = CliRunner().invoke(harness_command, ["build"])
    assert built.exit_code == 1 and "program 1.0.0: built in" in built.output
    assert "broken: FAILED" in built.output and "could not be built: broken" in built.output
    again = CliRunner().invoke(harness_command, ["build", "program"])
    assert again.exit_code == 0 and "program 1.0.0: there already" in again.output
    listed = json.loads(CliRunner().invoke(harness_command, ["list", "--json"]).output)
    assert {row["name"]: row["built"] for row in listed["harnesses"]} == {"program": True, "broken": False}
    assert "program" in CliRunner().invoke(harness_command, ["list"]).output


def test_a_handler_that_has_nothing_to_tell_a_program_is_named_before_anything_is_booted():
    class Own(Calculator):
        """Asks by itself."""

        prompt = AgentHandler.prompt

        async def run(self, ctx):
            return FinishReason.STOP

    class Late(Own):
        """Has to do something for its question."""

        async def opening(self, ctx):
            return [Message(role="user", content="?")]

    def begun(handler: type[Calculator], harness: str) -> str:
        agent = {"harness": harness} | ({"command": ["true"]} if harness == "command" else {})
        request = RolloutRequest(handler="calculator", agent=agent)
        booted = SimpleNamespace(boot=None, booted=True)
        driven = Driven(handler(), request, Settings(capture_url="http://capture.test"))
        with pytest.raises((TaskError, TypeError)) as raised:
            asyncio.run(driven.init(SimpleNamespace(sandboxes=booted)))
        return str(raised.value)

    assert "handler 'calculator' has neither `prompt` nor `opening`" in begun(Own, "command")
    for handler, harness in (Calculator, "command"), (Late, "command"), (Own, "external"):
        assert "not callable" in begun(handler, harness), "it boots a sandbox"
