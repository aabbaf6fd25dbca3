"""`rollout top` in a real terminal (a pty), and `GET /v1/fleet` that it lives on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from rollout.cli.render import batches_table
from rollout.cli.top_look import Watcher
from rollout.client import ApiError, Client
from rollout.schema import Problem, RolloutRequest
from rollout.schema.batches import Batch, BatchState
from rollout.schema.fleet import Fleet
from services.state.api_keys import KeyStore, Scope
from services.state.fleet import FleetStore, NodeAdmission
from tests.helpers.keys import http
from tests.helpers.stack import NODE, ROOT, RedisServer, Stack, wait_until
from tests.helpers.terminal import Terminal

COMMAND = [sys.executable, "-m", "rollout.cli", "top"]
FLOWER = "https://flower.some-node.of-the-cluster.example:25555/flower"
ENDED = "\x1b[?1049l"
"""What puts the screen back that was there before."""


@pytest.fixture
def terminal():
    opened = []

    def open_one(url, *options, **terminal):
        command = [*COMMAND, "--url", url, "--interval", "0.5", *options]
        opened.append(Terminal(command, **terminal))
        return opened[-1]

    yield open_one
    for screen in opened:
        screen.close()


def once(url, *options, env=None):
    return subprocess.run(
        [*COMMAND, "--url", url, "--once", "--interval", "1", *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )


def test_the_screen_shows_what_happens_and_ends_clean(stack, client, terminal):
    screen = terminal(stack.url)
    screen.await_text(r"stage +workers +slots +busy")
    screen.await_text(r"run +1 +64 ")
    screen.await_text(r"backends")
    screen.await_text(rf"{NODE} +init run eval +192 ")
    (item,) = client.run([RolloutRequest(handler="noop", task={})])
    screen.await_text(rf"\d+ s +{item.id} +completed +noop")
    (held,) = client.submit(RolloutRequest(handler="noop", task={"run_s": 600}))
    screen.await_text(r"1 running")
    screen.await_text(rf"live\s+ago.*\s+\d+ s +{held.id} +running")
    client.cancel(held.id)
    screen.await_text(rf"{held.id} +cancelled +noop")
    client.run([RolloutRequest(handler="noop", task={"reward": 0.5})])
    screen.await_text(r"ended lately, mean reward 0\.\d{3}")
    assert screen.end() == 0
    assert screen.raw.endswith(ENDED) or ENDED in screen.raw[-200:]
    assert "Traceback" not in screen.text()


def test_it_shows_how_far_groups_are_and_when_they_end(stack, client, terminal):
    screen = terminal(stack.url, columns=80)
    first, second = client.submit(RolloutRequest(handler="noop", task={"run_s": 600}, n=2))
    screen.await_text(rf"{first.group_id} +0/2 .*–")
    client.cancel(first.id)
    screen.await_text(rf"{first.group_id} +1/2 .*–? +0:\d\d:\d\d")
    (line,) = once(stack.url, "--json").stdout.splitlines()
    look = json.loads(line)
    (group,) = [group for group in look["groups"] if group["id"] == first.group_id]
    assert (group["size"], group["ended"], group["reward"]) == (2, 1, None)
    assert [item["id"] for item in look["live"] if item["group_id"] == first.group_id] == [second.id]
    client.cancel(second.id)
    assert screen.end() == 0


def test_a_gateway_that_knows_one_policy_alone_is_watched_as_well(stack, client, monkeypatch):
    def absent():
        raise ApiError(404, Problem(title="Not Found", status=404))

    assert [policy.name for policy in Watcher(client).look().policies] == ["default"]
    monkeypatch.setattr(client, "policies", absent)
    look = Watcher(client).look()
    assert look.policies == [] and look.fleet.stages


def test_the_end_of_a_batch_is_expected_by_how_it_went_so_far(capsys):
    batch = Batch(id="b", state=BatchState.RUNNING, wanted=64, n=4, kept=16, created_at=1000.0)
    waits = batch.model_copy(update={"kept": 0})
    paused = batch.model_copy(update={"paused": True})
    Console(width=80).print(batches_table([batch, waits, paused], 1060.0))
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["batch", "state", "kept", "end", "in"]
    assert [re.search(r"\d+/64 +(\S+)", row)[1] for row in rows] == ["0:03:00", "–", "–"]


def test_it_follows_the_window_and_never_writes_beyond_it(stack, terminal):
    screen = terminal(stack.url, "--interval", "3600", rows=12, columns=60)
    screen.await_text(r"stage +workers")
    before = len(screen.read())
    lines = [line.rstrip("\r") for line in screen.text().split("\n")]
    assert max(map(len, lines)) <= 60
    assert "ended lately" not in screen.text()
    screen.resize(50, 150)
    # Long before the next look is due.
    screen.await_text(r"ended lately", since=before)
    assert screen.end(signal.SIGTERM) == 0
    assert ENDED in screen.raw[-200:]


def test_once_and_json_are_for_scripts(stack, client):
    (item,) = client.run([RolloutRequest(handler="noop", task={})])
    shown = once(stack.url)
    assert shown.returncode == 0, shown.stderr
    assert re.search(rf"{item.id} +completed +noop", shown.stdout)
    assert "\x1b" not in shown.stdout
    result = once(stack.url, "--json")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    look = json.loads(line)
    fleet = Fleet.model_validate(look["fleet"])
    # A worker that another test has killed may still count for some seconds.
    assert {f"{stage}@{NODE}" for stage in ("init", "run", "eval")} <= {row.name for row in fleet.workers}
    assert fleet.stages["run"].slots >= 64 and fleet.stages["run"].ended > 0
    assert set(look["rates"]["stages"]) == {"init", "run", "eval"}
    assert item.id in [row["id"] for row in look["recent"]]
    assert look["tenant"] == "*"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A gateway and its Redis, without workers, that may be ended and begun again."""
    directory = tmp_path_factory.mktemp("bare")
    env = {"ROLLOUT_FLOWER_URL": FLOWER}
    with Stack(directory, directory / "sandboxes", env, RedisServer(directory)) as stack:
        yield stack


def test_the_address_of_flower_is_whole_in_a_narrow_terminal_and_in_a_pipe(bare, terminal):
    terminal(bare.url, "--once", columns=80).await_text(rf"flower {FLOWER}\s")
    lines = once(bare.url, env={"COLUMNS": "80"}).stdout.splitlines()
    assert f"flower {FLOWER}" in lines and not any(line.endswith((" ", "…")) for line in lines)


def test_it_waits_for_a_gateway_that_is_away_and_goes_on(bare, terminal):
    screen = terminal(bare.url)
    screen.await_text(r"no live worker of stage run")
    bare.gateway.stop()
    mark = len(screen.read())
    screen.await_text(rf"{bare.url} does not answer; trying on", since=mark)
    assert screen.process.poll() is None
    away = once(bare.url)
    assert away.returncode == 1 and "Is the gateway up?" in away.stderr and "Traceback" not in away.stderr
    bare.gateway = bare.start_gateway()
    mark = len(screen.read())

    def fine():
        """A later frame, without the complaint."""
        frame = screen.text(mark).rpartition("rollout 0.")[2]
        return "no live worker of stage eval" in frame and "does not answer" not in frame

    wait_until(fine, 120, "it to go on")
    assert screen.end() == 0


def test_the_fleet_tells_of_workers_nodes_and_room(bare):
    store = FleetStore(bare.redis.client)
    store.announce("run@n1", ["run"], "n1", slots=8, most_slots=16, held=3)
    store.announce("init@n1", ["init"], "n1", slots=4)
    store.announce("all@n2", ["init", "run", "eval"], "n2", slots=2)
    store.put_admission("n1", NodeAdmission({"disk": "1 MiB of disk"}, True, 9, 9, 5 << 30, 6 << 30))
    store.put_node("n1", {"claimed": 5, "warm": 1})
    try:
        fleet = Fleet.model_validate(http.get(f"{bare.url}/v1/fleet").json())
    finally:
        for name in ("run@n1", "init@n1", "all@n2"):
            store.leave(name)
        bare.redis.client.delete("nodes", "fleet:admission")
    assert {name: (load.workers, load.slots) for name, load in fleet.stages.items()} == {
        "init": (2, 6),
        "run": (2, 10),
        "eval": (1, 2),
    }
    n1, n2 = fleet.nodes
    assert (n1.node, n1.stages, n1.slots, n1.busy) == ("n1", ["init", "run"], 12, 3)
    assert (n1.sandboxes, n1.warm, n1.free_disk, n1.free_memory) == (5, 1, 5 << 30, 6 << 30)
    assert (n1.stopped, n1.waits_for_run) == (["1 MiB of disk"], True)
    assert (n2.node, n2.stages, n2.sandboxes, n2.free_disk) == ("n2", ["init", "run", "eval"], None, None)
    assert {worker.name: worker.slots_limit for worker in fleet.workers}["run@n1"] == 16
    assert http.get(f"{bare.url}/v1/fleet?node=n1").status_code == 400


def test_a_key_shows_its_own_tenant_and_an_admin_s_all(bare, terminal):
    keys = KeyStore(bare.redis.client)
    reader = keys.create("team-a", [Scope.READ])[1]
    admin = keys.create("ops", [Scope.ADMIN])[1]

    def asks():
        with Client(bare.url, api_key=reader) as client:
            try:
                return client.status()["tenant"]["name"] == "team-a"
            except ApiError:
                return False

    try:
        wait_until(asks, 120, "the gateway to read the keys")
        result = once(bare.url, "--json", env={"ROLLOUT_API_KEY": reader})
        assert json.loads(result.stdout)["tenant"] == "team-a", result.stderr
        result = once(bare.url, "--json", env={"ROLLOUT_API_KEY": admin})
        assert json.loads(result.stdout)["tenant"] == "*", result.stderr
        screen = terminal(bare.url, env={"ROLLOUT_API_KEY": "rlt_000000000000_" + "0" * 64})
        screen.await_text(r"401")
        wait_until(lambda: screen.process.poll() == 1, 120, "a wrong key to end it")
        assert "Traceback" not in screen.text()
    finally:
        bare.redis.client.delete("api_keys", "access:version")
