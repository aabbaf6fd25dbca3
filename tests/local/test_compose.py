"""docker-compose.dev.yml names nothing that does not exist.

There is no Docker engine on the machines that run this, so the file is checked, not started.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from services.local.paths import REPO
from services.settings import Settings

COMPOSE = yaml.safe_load((REPO / "docker-compose.dev.yml").read_text())
SERVICES = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "rollout-service:dev"}


def run(command: list[str]) -> subprocess.CompletedProcess:
    if command[0] in ("python", "celery"):
        module = [] if command[0] == "python" else ["-m", "celery"]
        command = [sys.executable, *module, *command[1:]]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)


def test_it_has_a_service_for_each_part():
    assert set(SERVICES) >= {"redis", "gateway", "init", "run", "eval", "flower", "backend"}
    for name in ("init", "run", "eval"):
        command = OURS[name]["command"]
        assert command[command.index("-Q") + 1] == name


def test_only_loopback_ports_are_published():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", sorted(OURS))
def test_its_settings_are_settings(name):
    variables = OURS[name]["environment"]
    settings = Settings.from_env(variables)
    assert settings.redis_url == "redis://redis:6379/0"
    known = {f"ROLLOUT_{field.upper()}" for field in Settings.model_fields}
    elsewhere = {"ROLLOUT_URL", "ROLLOUT_SANDBOX_DIR"}  # of the client and of the sandbox
    assert set(variables) <= known | elsewhere


@pytest.mark.parametrize("name", ["init", "backend", "sandbox-host"])
def test_each_command_and_its_options_exist(name):
    """The fleets differ in a name and a number only, so one stands for all three."""
    command = OURS[name]["command"]
    shown = run([*command, "--help"])
    assert shown.returncode == 0, shown.stderr
    for word in command[3:]:
        if word.startswith("-"):
            assert word.partition("=")[0] in shown.stdout


def test_flower_s_options_exist():
    """Flower's help leaves them out: they are Tornado's."""
    import flower.options  # noqa: F401  it defines them
    from tornado.options import options

    command = OURS["flower"]["command"]
    assert run([*command, "--help"]).returncode == 0
    for word in command[command.index("flower") + 1 :]:
        assert word.removeprefix("--").partition("=")[0] in options


def test_the_gateway_s_factory_and_configuration_load():
    command = OURS["gateway"]["command"]
    checked = run([*command[:3], "--check-config", *command[3:]])
    assert checked.returncode == 0, checked.stderr


def test_inline_programs_compile():
    programs = [s["command"] for s in OURS.values()] + [
        s["healthcheck"]["test"][1:] for s in OURS.values() if "healthcheck" in s
    ]
    for command in programs:
        if command[:2] == ["python", "-c"]:
            compile(command[2], "<compose>", "exec")
            imports = command[2].partition(";")[0]
            exec(imports, {})  # the names that it imports are there


def test_every_file_it_mounts_or_builds_from_exists():
    assert (REPO / OURS["gateway"]["build"]["dockerfile"]).is_file()
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./") and not source.startswith("./.local/"):
                assert (REPO / source).is_file(), source
            elif not source.startswith("."):
                assert source in COMPOSE["volumes"]


def test_redis_keeps_an_append_only_file():
    assert SERVICES["redis"]["command"][1] == "/etc/rollout/redis.conf"
    lines = (REPO / "deploy" / "redis.conf").read_text().splitlines()
    assert "appendonly yes" in lines
    assert "maxmemory-policy noeviction" in lines


def test_the_dockerfile_copies_only_what_is_there():
    for line in (REPO / "deploy" / "compose" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (REPO / source).exists(), source
