"""The `rollout` command as it is used: in a terminal of 80 columns and in a pipe, against a real gateway."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollout.cli import main
from rollout.schema import RolloutRequest, State
from services.state.api_keys import KeyStore, Scope
from tests.helpers.idle import in_time
from tests.helpers.stack import RedisServer, free_port, wait_until
from tests.helpers.terminal import Terminal, shown

ROLLOUT = [sys.executable, "-m", "rollout.cli"]
WIDE = "a-long-id-" + "of-a-run-" * 8
"""As long as an id may be, or nearly: longer than the terminal."""


def piped(*command, **more):
    clean = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    options = {"capture_output": True, "text": True, "timeout": 120, "env": clean | more.pop("env", {})}
    return subprocess.run(command, **options, **more)


def called(*arguments, env):
    """The command in a pipe, in this process: most of what it takes by itself are imports."""
    env = {"COLUMNS": None} | env
    done = CliRunner().invoke(main, arguments, env=env, prog_name="rollout", catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def call(stack):
    """The command with this stack's gateway and Redis, in a pipe."""

    def run(*arguments):
        return called(*arguments, env={"ROLLOUT_URL": stack.url, "ROLLOUT_REDIS_URL": stack.redis.url})

    return run


@pytest.fixture
def on_screen(stack):
    """What a command shows in a terminal of 80 columns."""

    def run(*arguments):
        env = {"ROLLOUT_URL": stack.url, "ROLLOUT_REDIS_URL": stack.redis.url}
        screen, status = shown([*ROLLOUT, *arguments], env=env)
        assert status == 0, screen
        return screen

    return run


@pytest.fixture(scope="module")
def ended(stack):
    """A group of two rollouts that ended, whose ids are wider than the terminal."""
    client = stack.client
    rollouts = client.run([RolloutRequest(handler="noop", id=WIDE, n=2, tags=["cli"])], timeout=240)
    assert {rollout.state for rollout in rollouts} == {State.COMPLETED}
    return [rollout.id for rollout in rollouts]


READ = ("status", "list --tag cli", f"show {WIDE}.0", f"show {WIDE}", "backends list", "batches list")
READ += ("policy show", "handlers list", "keys list", "tenants show")


@pytest.mark.parametrize("command", READ)
def test_what_is_read_has_its_ids_whole_and_speaks_json(stack, client, on_screen, call, ended, command):
    (backend,) = client.backends()
    ids = {
        "status": [backend.url],
        "list --tag cli": ended,
        f"show {WIDE}.0": [f"{WIDE}.0", WIDE],
        f"show {WIDE}": ended,
        "backends list": [backend.id],
        "handlers list": ["noop", "calculator"],
        "keys list": [KeyStore(stack.redis.client).list()[0].id],
    }.get(command, [])
    arguments = command.split()
    screen = on_screen(*arguments)
    value = json.loads(call(*arguments, "--json").stdout)
    text = call(*arguments).stdout
    for name in ids:
        assert name in screen and name in json.dumps(value), (name, screen, value)
    rows = text.splitlines()
    assert rows and not any(row.endswith((" ", "…")) for row in rows), rows
    if WIDE not in screen:
        assert max(len(line) for line in screen.splitlines() if stack.url not in line) <= 80, screen
    if ids is ended:
        assert all(name in text for name in ended) and "…" not in text, text


def test_each_says_which_service_it_talks_to_and_a_pipe_stays_clean(stack, call):
    done = piped(*ROLLOUT, "status", "--json", env={"ROLLOUT_URL": stack.url})
    assert done.stderr == f"{stack.url}: from ROLLOUT_URL\n"
    assert json.loads(done.stdout)["ready"] is True
    assert call("status", "--url", stack.url).stderr == ""


def test_status_ends_with_what_to_do_next(stack, call, on_screen, client):
    assert re.search(r"^next +rollout ", on_screen("status"), re.MULTILINE)
    backend = client.backends()[0]
    client.drain_backend(backend.id)
    try:
        steps = json.loads(call("status", "--json").stdout)["next"]
        assert "rollout backends   why no LLM server takes rollouts" in steps
    finally:
        client.drain_backend(backend.id, drain=False)


def test_a_cancel_of_what_does_not_exist_fails_and_names_it(call, ended):
    done = call("cancel", ended[0], "nobody", "noone")
    assert done.returncode == 1 and "cancelled 0; 1 had ended" in done.stdout
    assert "there is no rollout nobody, noone" in done.stderr
    for option in ("--tag", "--group"):
        done = call("cancel", option, "nobody")
        assert done.returncode == 1 and f"no rollout has the {option[2:]} nobody" in done.stderr
    assert call("show", "nobody").returncode == 1
    assert f"group   {WIDE}\n" in call("show", ended[0]).stdout


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"reward": 1.0}\n' * 40)
    return str(path)


def test_rows_for_verl_are_written_only_where_all_fit(call, tmp_path):
    rows, target = tmp_path / "rows.jsonl", tmp_path / "train.parquet"
    rows.write_text('{"question": "1 plus 2", "answer": "3"}\n')
    command = ("tasks", "convert", str(rows), "--handler", "calculator", "--verl", str(target))
    done = call(*command)
    assert done.returncode == 0 and "1 tasks fit, 0 do not" in done.stderr, done.stderr
    made = target.read_bytes()
    for options in ((), ("--most-errors", "1")):
        rows.write_text('{"question": "1 plus 2", "answer": "3"}\n{"question": 3}\n')
        done = call(*command, *options)
        assert done.returncode == 1 and f"1 tasks fit, 1 do not: {target} is not written" in done.stderr
        assert "rows.jsonl, line 2: " in done.stderr and "Traceback" not in done.stderr
        assert target.read_bytes() == made


def test_submit_opens_its_file_first(call, client, tasks, tmp_path):
    before = client.results("$", limit=1).cursor
    target = tmp_path / "absent" / "out.jsonl"
    done = call("submit", tasks, "--handler", "noop", "-o", str(target))
    assert done.returncode == 1 and str(target) in done.stderr and "Traceback" not in done.stderr
    assert client.results(before, wait=1.0).rollouts == []


def test_submit_ends_with_a_summary(stack, tasks, tmp_path):
    target = tmp_path / "out.jsonl"
    command = [*ROLLOUT, "submit", tasks, "--handler", "noop", "-o", str(target), "--url", stack.url]
    screen, status = shown(command)
    assert status == 0
    assert f"40 completed, mean reward 1.000; 40 rollouts are in {target}, after" in screen
    assert len(target.read_text().splitlines()) == 40


def test_a_full_disk_leaves_whole_lines_and_the_rest_can_be_fetched(call, stack, tasks, tmp_path):
    target, rest = tmp_path / "out.jsonl", tmp_path / "rest.jsonl"
    submit = [*ROLLOUT, "submit", tasks, "--handler", "noop", "-o", str(target), "--url", stack.url]
    limited = ["bash", "-c", 'ulimit -f 16; exec "$@"', "-", *submit]
    done = piped(*limited, cwd=Path.cwd())
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"{target} cannot be written: File too large" in done.stderr
    written = [json.loads(line)["id"] for line in target.read_text().splitlines()]
    assert 0 < len(written) < 40
    assert f"{len(written)} rollouts are in {target}" in done.stderr
    command = re.search(r"rollout (fetch --ids \S+) -o REST", done.stderr)[1].split()
    try:
        fetched = call(*command, "-o", str(rest))
        assert fetched.returncode == 0, fetched.stderr
        others = [json.loads(line)["id"] for line in rest.read_text().splitlines()]
        assert len({*written, *others}) == len(written) + len(others) == 40
        assert "0 were not submitted" in done.stderr
        assert f"{len(others)} completed, mean reward 1.000" in fetched.stderr
    finally:
        Path(command[-1]).unlink()


def test_a_full_disk_behind_a_redirection_is_one_message(stack, tasks, tmp_path):
    submit = [*ROLLOUT, "submit", tasks, "--handler", "noop", "--url", stack.url]
    redirected = 'ulimit -f 16; out=$1; echo before > "$out"; shift; exec "$@" >> "$out"'
    done = piped("bash", "-c", redirected, "-", str(tmp_path / "out"), *submit)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "<stdout> cannot be written: File too large" in done.stderr
    assert (tmp_path / "out").read_text().startswith("before\n{")
    Path(re.search(r"--ids (\S+) -o", done.stderr)[1]).unlink()


@pytest.mark.parametrize("in_terminal", [True, False])
def test_a_device_that_takes_nothing_is_one_message_and_the_ids_are_kept(stack, tmp_path, in_terminal):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"reward": 1.0}\n')
    submit = [*ROLLOUT, "submit", str(tasks), "--handler", "noop", "--url", stack.url, "-o", "/dev/full"]
    text, status = shown(submit) if in_terminal else ((done := piped(*submit)).stderr, done.returncode)
    assert status == 1 and "Traceback" not in text, text
    assert "/dev/full cannot be written: No space left on device" in text
    file = Path(re.search(r"--ids (\S+) -o", text)[1])
    assert len(file.read_text().split()) == 1
    file.unlink()


@pytest.mark.parametrize("in_terminal", [True, False])
def test_a_gateway_that_is_away_at_the_start_is_told_of_soon(tasks, in_terminal):
    """In the two seconds that a person waits; starting Python comes on top. Work would wait for 30 s."""
    submit = [*ROLLOUT, "submit", tasks, "--handler", "noop", "--url", f"http://127.0.0.1:{free_port()}"]
    with in_time(15, 25):
        text, status = shown(submit) if in_terminal else ((done := piped(*submit)).stderr, done.returncode)
    assert status == 1 and "Is the gateway up?" in text, text
    assert "go on" not in text and "rollout-ids" not in text


def test_a_refusal_in_the_middle_names_the_row_and_what_goes_on(stack, client, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"run_s": 600}\n{}\n{"run_s": "soon"}\n{}\n')
    options = ["--handler", "noop", "--tag", "refused", "--in-flight", "2", "--url", stack.url]
    done = piped(*ROLLOUT, "submit", str(tasks), *options, "-o", str(tmp_path / "out"))
    held = [rollout.id for rollout in client.list(tag="refused").rollouts if not rollout.state.terminal]
    client.cancel_many(held)
    assert done.returncode == 1 and "tasks.jsonl, line 3.task.run_s: " in done.stderr, done.stderr
    assert f"1 rollouts are in {tmp_path / 'out'}. 1 that go on" in done.stderr
    assert "2 were not submitted" in done.stderr
    file = Path(re.search(r"--ids (\S+) -o", done.stderr)[1])
    assert len(held) == 1 and file.read_text().split() == held
    file.unlink()


def test_a_file_without_ids_chooses_no_rollout(call, ended, tmp_path):
    (tmp_path / "ids").write_text("\n")
    done = call("fetch", "--ids", str(tmp_path / "ids"))
    assert done.returncode == 1 and done.stdout == ""
    assert f"{tmp_path / 'ids'} names no rollout" in done.stderr


def test_fetch_writes_what_ends_first_first(stack, call, client, ended, tmp_path):
    """The one that is named first ends when the other has been written."""
    (held,) = client.submit(RolloutRequest(handler="noop", task={"run_s": 600}))
    target = tmp_path / "out"
    command = [*ROLLOUT, "fetch", held.id, ended[0], held.id, "-o", str(target), "--url", stack.url]
    screen = Terminal(command, columns=80)
    try:
        wait_until(lambda: target.exists() and target.read_text(), 120, "the second")
        client.cancel(held.id)
        wait_until(lambda: [screen.read(), screen.process.poll()][1] is not None, 120, "it to end")
    finally:
        client.cancel(held.id)
        screen.close()
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == [ended[0], held.id]


def test_a_pipe_has_each_row_on_one_line_in_the_characters_that_it_takes(stack, client, call, ended):
    status = {**client.status(), "queues": {f"init.a-node-of-the-cluster-{number}": 0 for number in range(9)}}
    code = "import json, sys; from rollout.cli import common, render; "
    code += "common.show_view(render.status_view(json.loads(sys.argv[1])))"
    rows = piped(sys.executable, "-c", code, json.dumps(status)).stdout.splitlines()
    assert any("cluster-0 0" in row and "cluster-8 0" in row for row in rows), rows
    assert max(map(len, rows)) < 1000
    env = {"ROLLOUT_REDIS_URL": stack.redis.url, "PYTHONIOENCODING": "ascii"}
    done = piped(*ROLLOUT, "keys", "list", env=env)
    assert done.returncode == 0 and " ? " in done.stdout, done
    assert max(map(len, call("show", ended[0]).stdout.splitlines())) < 1000


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_reading_command_whose_output_takes_nothing_says_so(stack, option):
    command = [*ROLLOUT, "status", "--url", stack.url, *option]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr == "Error: standard output cannot be written: No space left on device\n"


def test_fetch_writes_by_tag_and_names_what_is_unknown(call, ended):
    done = call("fetch", "--tag", "cli")
    assert sorted(json.loads(line)["id"] for line in done.stdout.splitlines()) == sorted(ended)
    done = call("fetch", ended[0], "nobody")
    assert done.returncode == 1 and "not known, or not kept any more: nobody" in done.stderr
    assert json.loads(done.stdout)["id"] == ended[0]


def test_submit_names_what_goes_on_when_the_gateway_stays_away(stack, client, tmp_path):
    """It is stopped in the middle; only the client's patience is made shorter here."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"run_s": 600}\n{"run_s": 600}\n')
    code = "import rollout.cli.tasks as t; t.WORK_PATIENCE_S = 1.0; import rollout.cli as c; c.main()"
    command = [sys.executable, "-c", code, "submit", str(tasks), "--handler", "noop", "--tag", "away"]
    screen = Terminal([*command, "--url", stack.url, "-o", str(tmp_path / "out")], columns=80)
    try:
        wait_until(lambda: len(client.list(state="running", tag="away").rollouts) == 2, 120, "both to run")
        stack.gateway.stop()
        wait_until(lambda: [screen.read(), screen.process.poll()][1] is not None, 120, "it to give up")
        text = screen.text()
    finally:
        screen.close()
        stack.gateway = stack.start_gateway()
    ids = [rollout.id for rollout in client.list(tag="away").rollouts]
    client.cancel_many(ids)
    file = Path(re.search(r"rollout fetch --ids (\S+) -o REST", text)[1])
    assert sorted(file.read_text().split()) == sorted(ids)
    file.unlink()
    assert "2 that go on" in text and "0 were not submitted" in text
    assert screen.process.returncode == 1


def submitting(stack, directory, tag) -> Terminal:
    """A terminal in which `submit` waits for a rollout of ten minutes."""
    tasks = directory / "tasks.jsonl"
    tasks.write_text('{"run_s": 600}\n')
    submit = [*ROLLOUT, "submit", str(tasks), "--handler", "noop", "--tag", tag, "--url", stack.url]
    return Terminal([*submit, "-o", str(directory / "out")], columns=80)


def test_who_does_not_cancel_at_ctrl_c_is_told_how_to_fetch_the_rest(stack, client, tmp_path):
    screen = submitting(stack, tmp_path, "ctrl-c")
    try:
        wait_until(lambda: client.list(state="running", tag="ctrl-c").rollouts, 120, "it to run")
        os.write(screen.master, b"\x03")
        screen.await_text(r"Cancel the 1 rollouts not ended\?")
        os.write(screen.master, b"n\n")
        wait_until(lambda: [screen.read(), screen.process.poll()][1] is not None, 120, "it to end")
        text = screen.text()
    finally:
        screen.close()
    (held,) = client.list(tag="ctrl-c").rollouts
    client.cancel(held.id)
    file = Path(re.search(r"rollout fetch --ids (\S+) -o REST", text)[1])
    assert file.read_text().split() == [held.id] and screen.process.returncode == 130
    file.unlink()


def test_a_cancel_that_fails_at_ctrl_c_names_what_goes_on(stack, client, tmp_path):
    screen = submitting(stack, tmp_path, "cut-off")
    try:
        wait_until(lambda: client.list(state="running", tag="cut-off").rollouts, 120, "it to run")
        stack.gateway.stop()
        os.write(screen.master, b"\x03")
        screen.await_text(r"Cancel the 1 rollouts not ended\?")
        os.write(screen.master, b"y\n")
        wait_until(lambda: [screen.read(), screen.process.poll()][1] is not None, 15, "it to end")
        text = screen.text()
    finally:
        screen.close()
        stack.gateway = stack.start_gateway()
    (held,) = client.list(tag="cut-off").rollouts
    client.cancel(held.id)
    assert "not cancelled: POST " in text and screen.process.returncode == 130, text
    file = Path(re.search(r"rollout fetch --ids (\S+) -o REST", text)[1])
    assert file.read_text().split() == [held.id]
    file.unlink()


def test_the_shell_completes_commands_options_and_ids(stack, call, ended):
    script = call("completion", "bash").stdout
    ask = """
    eval "$1"; shift
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rollout_completion rollout; printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def completed(*words):
        env = {"PATH": path, "ROLLOUT_URL": stack.url, "ROLLOUT_REDIS_URL": stack.redis.url}
        done = piped("bash", "-c", ask, "-", script, "rollout", *words, env=env)
        assert done.stderr == "", done.stderr
        return done.stdout.split()

    assert completed("ba") == ["backends", "batches"]
    assert {"keys", "slurm", "up"} <= set(completed(""))
    assert completed("status", "--js") == ["--json"]
    assert sorted(completed("show", WIDE[:20])) == sorted(ended)
    assert completed("submit", "--handler", "calc") == ["calculator"]
    assert completed("tenants", "show", "def") == ["default"]
    assert completed("backends", "drain", "") == [backend.id for backend in stack.client.backends()]
    for text in (call("completion", "zsh").stdout, call("completion", "fish").stdout):
        assert "_ROLLOUT_COMPLETE" in text
    assert 'eval "$(rollout completion bash)"' in call("completion").stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Redis without a key."""
    server = RedisServer(tmp_path_factory.mktemp("bare"))
    yield server
    server.stop()


def test_keys_and_tenants_speak_to_no_redis_that_nobody_meant(bare, tmp_path):
    """Neither without a service of ours, nor where another one is named than our own."""
    env = {"ROLLOUT_HOME": str(tmp_path), "ROLLOUT_REDIS_URL": ""}
    for more in ({}, {"ROLLOUT_SLURM_RUN": str(tmp_path)}):
        for command in (("keys", "list"), ("tenants", "show")):
            done = called(*command, env=env | more)
            assert done.returncode == 1 and "Error: no Redis is named" in done.stderr, done.stderr


def test_keys_and_tenants_in_a_terminal(bare):
    env = {"ROLLOUT_REDIS_URL": bare.url}
    screen, status = shown([*ROLLOUT, "keys", "create", "ann"], env=env)
    assert status == 0 and "WARNING: no key of the scope admin or operate works" in screen
    assert "WARNING" not in shown([*ROLLOUT, "keys", "create", "operator", "--scope", "admin"], env=env)[0]
    assert "WARNING" not in shown([*ROLLOUT, "keys", "create", "bob"], env=env)[0]
    store = KeyStore(bare.client)
    store.create("a-tenant-with-a-long-name", [Scope.SUBMIT, Scope.READ, Scope.METRICS])
    screen, _ = shown([*ROLLOUT, "keys", "list"], env=env)
    for key in store.list():
        assert re.search(rf"^{key.id} +{key.tenant} ", screen, re.MULTILINE), screen
    assert max(map(len, screen.splitlines())) <= 80
    (admin,) = (key.id for key in store.list() if key.tenant == "operator")
    assert "WARNING: no key" in called("keys", "revoke", admin, env=env).stderr

    typo = called("tenants", "set", "anm", "--weight", "2", env=env)
    assert typo.returncode == 1 and "there is no tenant 'anm', only a-tenant" in typo.stderr
    assert "anm" not in called("tenants", "show", env=env).stdout
    assert called("tenants", "set", "anm", "--create", "--weight", "2", env=env).returncode == 0
    assert called("tenants", "set", "ann", "--quota-live", "5", env=env).returncode == 0
    screen, _ = shown([*ROLLOUT, "tenants", "show"], env=env)
    assert re.search(r"^anm +0 +any ", screen, re.MULTILINE) and max(map(len, screen.splitlines())) <= 80
