"""The pack for real: programs of npm and PyPI, read-only in a sandbox without a network, on a scripted model.

Those of `SHORT` are what set-up installs; the others run where somebody has built them
(`rollout harness build`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import scripted_model
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, private_host, sandbox_of
from tests.helpers.long_forms import HARNESSES
from tests.sandbox.conftest import why_not
from workers.harnesses import catalogue, pack
from workers.harnesses.base import PACK, Job

PORT, KEY, MODEL = 8790, "sk-of-one-attempt", "policy-1"
INSTRUCTION = "--Write 'hello' to \"out.txt\".\n{braces} $(id) \\n\nas it is."
SECONDS = 300.0
SERVER = "/workspace/.model.py"


@dataclass(frozen=True)
class Program:
    """What is known of one: the route that it calls, how often for one command and an end, and its shell."""

    route: str
    shell: str
    stream: bool = True
    calls: int = 2


CHAT = "/v1/chat/completions"
PROGRAMS = {
    "claude_code": Program("/v1/messages", "Bash"),
    "codex": Program("/v1/responses", "exec_command"),
    "gemini_cli": Program(f"/v1beta/models/{MODEL}:streamGenerateContent", "run_shell_command"),
    "mini_swe_agent": Program(CHAT, "bash", stream=False),
    "opencode": Program(CHAT, "bash"),
    "openhands": Program(CHAT, "terminal", stream=False),
    "pi": Program(CHAT, "bash"),
    "qwen_code": Program(CHAT, "run_shell_command"),
}
SHORT = ("claude_code", "codex", "gemini_cli", "qwen_code")
OTHERS = [pytest.param(name, marks=pytest.mark.may_skip) for name in PROGRAMS if name not in SHORT]


@pytest.fixture(scope="module")
def host() -> Iterator[SyncHostClient]:
    """Of sandboxes that may show the pack."""
    if reason := why_not("apptainer"):
        pytest.skip(reason)
    pack.directory().mkdir(parents=True, exist_ok=True)
    with private_host(
        runtime="apptainer", ROLLOUT_SANDBOX_BINDS=f"{pack.directory()}:ro", ROLLOUT_SANDBOX_WARM="0"
    ) as host:
        yield host


@pytest.fixture
def client(host: SyncHostClient, name: str) -> Iterator[SyncSandboxClient]:
    """A sandbox that shows the pack, in which the program is."""
    harness = catalogue.find(name)
    try:
        if name not in SHORT:
            pack.require(harness)
        pack.build(harness, print)
    except pack.PackError as error:
        pytest.skip(f"{error} (deploy/setup/harnesses.sh)")
    bind = {"source": str(pack.directory()), "target": PACK, "read_only": True}
    with sandbox_of(host, runtime="apptainer", binds=(bind,)) as (_, client):
        yield client


RUN = HARNESSES(
    "programs alone with a fake server, without the service", short=["codex"], long=[*SHORT, *OTHERS]
)


@pytest.mark.parametrize("name", RUN)
def test_a_program_does_a_task_of_two_turns_and_calls_nothing_else(client: SyncSandboxClient, name: str):
    program = PROGRAMS[name]
    home = "/home/sandbox/agent"
    job = Job(
        instruction=INSTRUCTION,
        base_url=f"http://127.0.0.1:{PORT}",
        key=KEY,
        model=MODEL,
        home=home,
        workspace="/workspace",
        context_tokens=200_000,
        timeout_s=SECONDS,
    )
    launch = catalogue.find(name).launch(job)
    order = {
        "argv": launch.argv,
        "env": {"HOME": home, **launch.env},
        "files": dict(launch.files),
        "port": PORT,
        "workspace": "/workspace",
        "timeout_s": SECONDS,
        "ends_by_shell": name == "mini_swe_agent",
    }
    client.write_file(SERVER, Path(scripted_model.__file__).read_text())
    client.write_file(f"{SERVER}.json", json.dumps(order))
    ran = client.exec(
        ["python3", SERVER, f"{SERVER}.json"], timeout=SECONDS + 60, max_output_chars=50_000_000
    )
    assert ran.exit_code == 0, ran
    told = json.loads(ran.stdout)
    said = f"{told['out'][-3000:]}\n{told['err']}"
    print(f"{name}: {ran.wall_s:.1f} s, {ran.cpu_s:.1f} s of processor")

    assert told["code"] == 0, said
    assert client.read_file("out.txt") == b"hello\n", said
    calls = [call for call in told["calls"] if call["dialect"]]
    assert [call["path"] for call in calls] == [program.route] * program.calls, said
    assert {(call["model"], call["key"], call["stream"]) for call in calls} == {(MODEL, KEY, program.stream)}
    assert [call["acted"] for call in calls] == [True, False]
    assert {call["shell"][0] for call in calls} == {program.shell}
    others = [(call["method"], call["path"]) for call in told["calls"] if not call["dialect"]]
    assert others == ([("HEAD", "/")] if name == "claude_code" else []), "it is asked whether it answers"

    as_json = json.dumps(INSTRUCTION)[1:-1]
    assert all(as_json in call["turns"] for call in calls), "the instruction is not as it was given"
    assert "hello" in calls[-1]["turns"].rpartition(as_json)[2], "the second turn has no output of the tool"
    kept = [
        path
        for path in told["written"]
        for place in launch.transcripts
        if path.startswith(f"{home}/{place}/")
    ]
    assert kept, told["written"]
    assert client.exec(["test", "-w", f"{PACK}/{name}"]).exit_code == 1
