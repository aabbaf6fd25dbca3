"""docker-compose.dev.yml in containers: its image is built, all is started, broken and ended with Podman.

test_compose_stack.py is the short form, without containers. What only Docker does, such as waiting for a
health check, is not tried here: podman-compose starts everything at once, and what is too early starts anew.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from rollout.client import Client
from rollout.schema import RolloutRequest, State
from tests.helpers.long_forms import COMPOSE
from tests.helpers.podman import Podman, PodmanError
from tests.helpers.stack import ROOT, free_port, wait_until

FILE = ROOT / "docker-compose.dev.yml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]
ONCE = {name for name, service in SERVICES.items() if service["restart"] == "on-failure"}
START_S = 180.0
ROLLOUTS_S = 240.0
TASK = {"question": "37 times 85", "answer": "3145"}
REQUEST = RolloutRequest(handler="calculator", task=TASK, n=8)


class Project:
    """The services of the file, as containers."""

    def __init__(self, podman: Podman) -> None:
        self.podman = podman
        self.name = f"rollout{secrets.token_hex(3)}"
        self.key = f"rlt_{secrets.token_hex(6)}_{secrets.token_hex(32)}"
        self.flower_user = ("operator", secrets.token_hex(24))
        self.url, self.flower = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        podman.env |= {
            "ROLLOUT_API_KEY": self.key,
            "ROLLOUT_REDIS_PASSWORD": secrets.token_hex(32),
            "FLOWER_BASIC_AUTH": ":".join(self.flower_user),
            "ROLLOUT_GATEWAY_PORT": self.url.rpartition(":")[2],
            "ROLLOUT_FLOWER_PORT": self.flower.rpartition(":")[2],
            "ROLLOUT_CAPTURE_PORT": str(free_port()),
        }

    def compose(self, *args: str) -> str:
        return self.podman.run("podman-compose", "-p", self.name, "-f", FILE, *args)

    def inspect(self, service: str) -> dict:
        return json.loads(self.podman("inspect", f"{self.name}_{service}_1"))[0]

    def healthy(self, service: str) -> bool:
        """The file's own health check, once; Podman repeats it only under systemd."""
        try:
            self.podman("exec", f"{self.name}_{service}_1", *SERVICES[service]["healthcheck"]["test"][1:])
        except PodmanError:
            return False
        return True

    def logs(self, service: str) -> str:
        return self.podman("logs", "--tail", "40", f"{self.name}_{service}_1")

    def ended_well(self, service: str) -> bool:
        state = self.inspect(service)["State"]
        return state["Status"] == "exited" and state["ExitCode"] == 0


@pytest.fixture(scope="module")
def project():
    podman = Podman()
    try:
        python = (
            'rm "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',
            'ln -s ../../bin/python3 "$1/usr/local/bin/python"',
        )
        build = SERVICES["gateway"]["build"]
        (base,) = (
            line.split()[1]
            for line in Path(ROOT, build["dockerfile"]).read_text().splitlines()
            if line[:5] == "FROM "
        )
        podman.make_base(f"docker.io/library/{base}", "python3,python3-pip,ca-certificates", *python)
        data = 'chroot "$1" install -d -o redis -g redis /data'
        podman.make_base(f"docker.io/library/{SERVICES['redis']['image']}", "redis-server", data)
        podman.build(SERVICES["gateway"]["image"], ROOT / build["dockerfile"], ROOT / build["context"])
        project = Project(podman)
        project.compose("up", "-d", "--no-build")
        yield project
        project.compose("stop", "-t", "25", "node")
        assert project.inspect("node")["State"]["ExitCode"] != 128 + signal.SIGKILL, project.logs("node")
        project.compose("down", "-v")
        podman("network", "rm", f"{project.name}_default")  # which this podman-compose leaves
        assert not podman("ps", "-aq") + podman("volume", "ls", "-q")
        assert not podman.processes()
    finally:
        podman.end()
    assert not podman.processes()
    assert not podman.left()


@pytest.fixture
def client(project):
    with Client(project.url, api_key=project.key) as client:
        yield client


@COMPOSE.only
@pytest.mark.timeout(900)
def test_every_service_runs_without_root_and_capabilities(project, client):
    wait_until(lambda: all(map(project.ended_well, ONCE)), START_S, f"{ONCE} to have done their work")
    wait_until(lambda: client.ready()["ready"], START_S, "the fleets")
    for name, service in SERVICES.items():
        if "healthcheck" in service:
            wait_until(lambda name=name: project.healthy(name), START_S, f"{name} to be healthy")
        if name in ONCE:
            continue
        pid = project.inspect(name)["State"]["Pid"]
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        uids = set(status["Uid"].split())
        assert "0" not in uids if name == "redis" else uids == {"1000"}, name
        assert int(status["CapBnd" if name != "redis" else "CapEff"], 16) == 0, name
        assert (status["NoNewPrivs"] == "1") == (name != "redis"), name
        # Rootless Apptainer is for the node alone.
        assert (status["Seccomp"] == "0") == (name == "node"), name


@COMPOSE.only
@pytest.mark.timeout(600)
def test_rollouts_from_outside_run_in_apptainer_and_flower_shows_them(project, client):
    done = client.run([REQUEST], timeout=ROLLOUTS_S)
    assert {item.state for item in done} == {State.COMPLETED}, project.logs("node")
    assert {item.sandbox.runtime for item in done} == {"apptainer"}
    assert all(
        missing.startswith("hard memory") for item in done for missing in item.sandbox.isolation_missing
    )
    assert httpx.get(f"{project.url}/v1/status").status_code == 401
    assert httpx.get(f"{project.flower}/api/tasks").status_code == 401

    def stages() -> set[str]:
        query = {"search": done[0].id}
        answer = httpx.get(f"{project.flower}/api/tasks", params=query, auth=project.flower_user, timeout=240)
        return {task["name"] for task in answer.json().values()}

    names = {"rollout.init", "rollout.run", "rollout.evaluate"}
    wait_until(lambda: names <= stages(), START_S, "Flower to have seen the rollout")


@COMPOSE.only
@pytest.mark.timeout(600)
def test_bubblewrap_works_in_the_node_s_container(project):
    name = f"{project.name}_node_1"
    assert project.podman(
        "exec", name, "python", "-m", "sandbox.check", "--runtime", "bubblewrap"
    ).startswith("bubble")


@COMPOSE.only
@pytest.mark.timeout(600)
@pytest.mark.parametrize("service", ["node", "redis", "gateway", "backend"])
def test_rollouts_end_though_a_service_is_killed(project, client, service):
    ids = [submitted.id for submitted in client.submit([REQUEST] * 3)]
    wait_until(lambda: any(client.get(id).state == State.RUNNING for id in ids), START_S, "a rollout to run")
    os.kill(project.inspect(service)["State"]["Pid"], signal.SIGKILL)
    wait_until(
        lambda: project.inspect(service)["State"]["Running"], START_S, f"{service} to have started anew"
    )
    done = list(client.stream(ids, timeout=ROLLOUTS_S))
    assert {item.id for item in done} == set(ids)
    assert {item.state for item in done} == {State.COMPLETED}, [item.error for item in done]
