"""docker-compose.dev.yml fits the Compose specification and names nothing that does not exist.

test_compose_stack.py runs what it says without containers, test_compose_containers.py with them.
"""

from __future__ import annotations

import json
import re

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft7Validator

from services.key_commands import keys
from services.launch.paths import REPO, home
from services.settings import Settings

COMPOSE = yaml.safe_load((REPO / "docker-compose.dev.yml").read_text())
SERVICES = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "rollout-service:dev"}


def test_it_fits_the_schema_of_the_compose_specification():
    """The one that Docker's own Compose carries; `make setup-tests` fetches it from PyPI."""
    (path,) = home().glob("compose/compose/config/compose_spec.json")
    schema = json.loads(path.read_text())
    # A draft that it names with a # at its end, and that jsonschema knows without.
    schema.pop("$schema")
    checker = Draft7Validator(schema)
    assert [f"{error.json_path}: {error.message}" for error in checker.iter_errors(COMPOSE)] == []
    broken = COMPOSE | {"services": {"redis": {**SERVICES["redis"], "health_check": {}}}}
    assert not checker.is_valid(broken)


def test_what_a_service_waits_for_can_be_waited_for():
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[needed], f"{name} waits for the health of {needed}"
            else:
                assert how == {"condition": "service_completed_successfully"}


def test_secrets_come_from_the_caller_s_environment_and_are_asked_for():
    text = (REPO / "docker-compose.dev.yml").read_text()
    for name in ("ROLLOUT_API_KEY", "FLOWER_BASIC_AUTH"):
        assert f"{name}: ${{{name}:?" in text
    # A sandbox with `network: host` is in the network of the containers.
    assert "redis://:${ROLLOUT_REDIS_PASSWORD:?" in text and "requirepass %s" in text


def test_it_has_a_service_for_each_part():
    assert set(SERVICES) >= {"redis", "gateway", "capture", "node", "flower", "backend"}
    script = OURS["node"]["command"][-1]
    assert {line.split()[1] for line in script.splitlines() if line.startswith("fleet ")} == {
        "init",
        "run",
        "eval",
    }


def test_only_the_node_has_more_than_a_container_without_privileges():
    for name, service in OURS.items():
        assert service["cap_drop"] == ["ALL"]
        options = {"seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"}
        assert set(service["security_opt"]) == {"no-new-privileges"} | (options if name == "node" else set())
        assert not {"privileged", "devices", "cap_add", "user", "pid", "network_mode"} & set(service)


def test_only_loopback_ports_are_published():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", sorted(OURS))
def test_its_settings_are_settings(name):
    variables = OURS[name]["environment"]
    given = {
        name: re.sub(r"\$\{ROLLOUT_REDIS_PASSWORD[^}]*\}", "pw", value) for name, value in variables.items()
    }
    settings = Settings.from_env(given)
    assert settings.redis_url == "redis://:pw@redis:6379/0"
    names = {f"ROLLOUT_{field.upper()}" for field in Settings.model_fields}
    # Of the client, of the sandbox, and of Flower itself.
    elsewhere = {"ROLLOUT_URL", "ROLLOUT_API_KEY", "ROLLOUT_SANDBOX_DIR", "FLOWER_BASIC_AUTH"}
    assert set(variables) <= names | elsewhere
    # Nothing that runs beside handlers and sandboxes has the key.
    assert ("ROLLOUT_API_KEY" in variables) == (name in ("keys", "register-backend"))
    assert ("FLOWER_BASIC_AUTH" in variables) == (name == "flower")


def test_the_gateway_has_a_key_before_it_listens_to_other_containers():
    words = OURS["keys"]["command"]
    assert words[:2] == ["rollout", "keys"]
    shown = CliRunner().invoke(keys, [words[2], "--help"])
    assert shown.exit_code == 0
    assert all(word in shown.output for word in words[3:] if word.startswith("--"))
    assert OURS["gateway"]["depends_on"]["keys"] == {"condition": "service_completed_successfully"}


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
    command = SERVICES["redis"]["command"]
    assert command[:2] == ["sh", "-c"] and "include /etc/rollout/redis.conf" in command[2]
    lines = (REPO / "deploy" / "redis" / "redis.conf").read_text().splitlines()
    assert "appendonly yes" in lines
    assert "maxmemory-policy noeviction" in lines


def test_the_dockerfile_copies_only_what_is_there():
    for line in (REPO / "deploy" / "compose" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (REPO / source).exists(), source
