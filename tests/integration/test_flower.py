"""Flower as `rollout up` and Slurm's head start it: closed, lasting, and telling what a task is about."""

from __future__ import annotations

import os
import subprocess
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from rollout.schema import RolloutRequest
from services import flower
from services.flower import FlowerAuthError
from tests.helpers.stack import NODE, ROOT, free_port, wait_until


class Monitor:
    """Flower with a password file and a database in a directory, on the stack's Redis."""

    def __init__(self, stack, directory):
        self.stack = stack
        self.port = free_port()
        self.auth_file = flower.ensure_auth_file(directory / "flower.auth")
        self.env = flower.environment(self.auth_file, directory / "flower.db")
        self.url = f"http://127.0.0.1:{self.port}"
        self.user = tuple(flower.credentials(self.auth_file)[0].split(":", 1))
        self.http = httpx.Client(base_url=self.url, auth=self.user, timeout=240)
        self.start()

    def start(self):
        self.process = self.stack.start("flower", flower.command(self.port), self.env)
        wait_until(lambda: self.answer("/healthcheck"), 120, "Flower", self.process)

    def answer(self, path, **params):
        try:
            reply = self.http.get(path, params=params)
        except httpx.HTTPError:
            return None
        return reply if reply.status_code == 200 else None

    def json(self, path, **params):
        reply = self.answer(path, **params)
        return reply.json() if reply else {}


@pytest.fixture(scope="module")
def monitor(stack, tmp_path_factory):
    monitor = Monitor(stack, tmp_path_factory.mktemp("flower"))
    yield monitor
    monitor.process.stop()


def tasks_of(monitor, rollout_id):
    """What the linked page asks Flower for: its script makes `name:VALUE` of the address' `name`."""
    link = flower.tasks_link(monitor.url, rollout_id)
    (value,) = parse_qs(urlsplit(link).query)["name"]
    return monitor.json("/api/tasks", search=f"name:{value}")


def listed(monitor, rollout_id):
    """The rows of the page with a rollout's tasks."""
    link = flower.tasks_link(monitor.url, rollout_id)
    (value,) = parse_qs(urlsplit(link).query)["name"]
    query = {"draw": 1, "start": 0, "length": 10, "search[value]": f"name:{value}"}
    query |= {"order[0][column]": 0, "order[0][dir]": "asc", "columns[0][data]": "name"}
    return monitor.json("/tasks/datatable", **query)["data"]


def test_it_shows_the_fleets_and_whose_each_task_is_and_keeps_that_over_a_restart(stack, client, monitor):
    names = {f"{stage}@{NODE}" for stage in ("init", "run", "eval")}

    def workers():
        return monitor.json("/api/workers", refresh="true")

    wait_until(lambda: names <= set(workers()), 120, "Flower to see the fleets", monitor.process)
    fleets = workers()
    queues = {name: {queue["name"] for queue in fleets[name]["active_queues"]} for name in names}
    assert queues[f"init@{NODE}"] == {"init"}
    assert queues[f"run@{NODE}"] == {"run", f"run.{NODE}"}
    assert queues[f"eval@{NODE}"] == {"eval", f"eval.{NODE}"}

    items = client.run([RolloutRequest(handler="noop", n=4), RolloutRequest(handler="noop", task={})])

    def view(item):
        tasks = tasks_of(monitor, item.id).values()
        return {(task["name"], task["args"]) for task in tasks if task["state"] == "SUCCESS"}

    for item in items:
        args = f"noop {item.id} attempt 1"
        pairs = {(f"rollout.{name}", args) for name in ("init", "run", "evaluate")}
        wait_until(lambda item=item, pairs=pairs: pairs <= view(item), 60, f"tasks of {item.id}")

    shown = {task["name"]: task for task in listed(monitor, items[0].id)}
    args = f"noop {items[0].id} attempt 1"
    assert {(task["args"], task["result"]) for task in shown.values()} == {(args, "")}, "noop has no sandbox"
    assert len(shown) == 3

    (slow,) = client.submit([RolloutRequest(handler="noop", task={"init_s": 60.0})])

    def claimed(state):
        (task,) = tasks_of(monitor, slow.id).values() or [{}]
        return task.get("state") == state and task

    wait_until(lambda: claimed("CLAIMED"), 120, "the task that claimed it")
    assert claimed("CLAIMED")["args"] == f"noop {slow.id} attempt 1"
    client.cancel(slow.id)
    wait_until(lambda: claimed("STOPPED"), 120, "the end of its chain")
    assert claimed("STOPPED")["result"] == "cancelled"

    monitor.process.stop(60)  # it writes what it has seen
    monitor.start()
    kept = view(items[0])
    assert {name for name, _ in kept} == {"rollout.init", "rollout.run", "rollout.evaluate"}


def test_pages_and_api_want_the_password_that_no_command_line_shows(monitor):
    for path in ("/tasks", "/workers", "/api/tasks", "/broker"):
        assert httpx.get(monitor.url + path, timeout=240).status_code == 401, path
        guess = httpx.get(monitor.url + path, auth=(monitor.user[0], "guess"), timeout=240)
        assert guess.status_code == 401, path
    assert monitor.answer("/tasks")
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(monitor.process.pid)], capture_output=True)
    assert b"flower" in shown.stdout and monitor.user[1].encode() not in shown.stdout


def test_beyond_loopback_it_does_not_start_without_a_password(stack):
    env = {**stack.env}
    for name in (flower.AUTH_VARIABLE, "FLOWER_BASIC_AUTH"):
        env.pop(name, None)
    argv = flower.command(free_port(), "0.0.0.0")
    ended = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0
    assert "address 0.0.0.0 is open to other machines and there is no password" in ended.stderr


def test_a_password_file_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "auth"
    old = os.umask(0)
    try:
        flower.ensure_auth_file(path)
    finally:
        os.umask(old)
    first = flower.credentials(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(first) == 1 and len(first[0]) > 30
    flower.ensure_auth_file(path)
    assert flower.credentials(path) == first


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("u:p\n", 0o640, "can be read by others (mode 640): chmod 600"),
        ("u:p\njustauser\n", 0o600, "each line must be user:password"),
        (":p\n", 0o600, "each line must be user:password"),
        ("# nobody\n", 0o600, "there must be one"),
        (None, 0, "cannot be read (No such file or directory)"),
    ],
)
def test_a_password_file_that_protects_nothing_is_refused(tmp_path, text, mode, why):
    path = tmp_path / "auth"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(FlowerAuthError) as caught:
        flower.credentials(path)
    assert why in str(caught.value) and str(path) in str(caught.value)
