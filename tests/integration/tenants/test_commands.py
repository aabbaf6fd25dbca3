"""`rollout keys` and `rollout tenants`."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from rollout import account
from services.key_commands import keys as keys_command
from services.key_commands import tenants as tenants_command
from services.launch.redis import Choice, ping, prepare
from services.launch.slurm.rundir import DOWN, UP, Head, RunDir
from services.state import keys as names
from tests.helpers.stack import Process, free_port, redis_binary, wait_until
from tests.helpers.tenants import run


def test_an_operator_makes_lists_rotates_and_revokes_keys(world):
    made = run(keys_command, "create", "team-a", "--scope", "submit,read", "--expires", "30d", url=world.url)
    text = made.stdout.strip()
    assert world.get("/v1/status", text).json["tenant"]["name"] == "team-a"
    old = text.split("_")[1]

    rotated = run(keys_command, "rotate", old, "--grace", "1h", url=world.url).stdout.strip()
    new = rotated.split("_")[1]
    assert [world.get("/v1/status", secret).status_code for secret in (text, rotated)] == [200, 200]
    assert "replaced by" not in run(keys_command, "rotate", new, "--grace", "0s", url=world.url).stdout
    refused = world.get("/v1/status", rotated)
    assert refused.status_code == 401 and "is expired and was replaced by" in refused.json["detail"]

    run(keys_command, "revoke", old, url=world.url)
    assert "is revoked" in world.get("/v1/status", text).json["detail"]
    run(keys_command, "revoke", old, url=world.url)
    assert "is revoked" in run(keys_command, "rotate", old, url=world.url, code=1).output

    shown = run(keys_command, "list", "--json", url=world.url).stdout
    by_id = {entry["id"]: entry for entry in json.loads(shown)}
    assert [by_id[id_]["state"] for id_ in (old, new)] == ["revoked", "expired"]
    assert by_id[old]["replaced_by"] == new and by_id[new]["scopes"] == ["read", "submit"]
    kept = shown + json.dumps(world.redis.hgetall(names.API_KEYS))
    assert text.split("_")[2] not in kept and rotated.split("_")[2] not in kept


def test_keys_for_trainers_and_operators_are_made_shown_and_rotated(world):
    scopes = ("--scope", "submit,train:a.1", "--scope", "operate")
    made = run(keys_command, "create", "team-a", *scopes, "--policies", "a.*,judge", url=world.url)
    assert "operate, submit, train:a.1" in made.stderr and "WARNING" not in made.output
    rotated = run(keys_command, "rotate", made.stdout.split("_")[1], url=world.url).stdout.strip()
    shown = json.loads(run(keys_command, "list", "--json", url=world.url).stdout)
    assert [key["scopes"] for key in shown] == [["operate", "submit", "train:a.1"]] * 2
    assert world.get("/metrics", rotated).status_code == 200
    assert world.get("/v1/rollouts", rotated).status_code == 403
    assert world.tenants.get("team-a").policies == ("a.*", "judge")
    assert "a.*, judge" in run(tenants_command, "show", "team-a", url=world.url).stdout
    run(tenants_command, "set", "team-a", "--policies", "any", url=world.url)
    assert world.tenants.get("team-a").policies is None
    trainer = run(keys_command, "create", "team-b", "--scope", "train:b", url=world.url)
    assert "WARNING" not in trainer.output
    run(keys_command, "revoke", rotated.split("_")[1], url=world.url)
    run(keys_command, "revoke", made.stdout.split("_")[1], url=world.url)
    assert (
        "no key of the scope admin or operate works"
        in run(keys_command, "create", "team-b", "--scope", "train:b", url=world.url).stderr
    )


def test_a_key_made_elsewhere_can_be_given(world):
    text = f"rlt_{'a' * 12}_{'b' * 64}"
    args = ("create", "team-a", "--scope", "admin", "--from-env")
    for _ in range(2):
        assert text not in run(keys_command, *args, url=world.url, env={"ROLLOUT_API_KEY": text}).output
    assert world.get("/v1/status", text).status_code == 200
    second_key = f"rlt_{'a' * 12}_{'c' * 64}"
    run(keys_command, *args, url=world.url, env={"ROLLOUT_API_KEY": second_key}, code=1)
    refused = run(keys_command, *args, url=world.url, env={"ROLLOUT_API_KEY": "secret-stuff"}, code=1)
    assert "secret-stuff" not in refused.output and "is no key" in refused.output


@pytest.fixture
def away_from_home(monkeypatch, tmp_path):
    """No service is found but what a test announces."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    for name in ("ROLLOUT_URL", "ROLLOUT_REDIS_URL", "ROLLOUT_SLURM_RUN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own_redis(tmp_path):
    """A Redis as a stack or a head starts it: its address, with a password."""
    chosen = prepare(Choice("ours", binary=Path(redis_binary())), tmp_path / "redis", free_port())
    process = Process("redis", chosen.command, tmp_path)
    wait_until(lambda: ping(chosen.url) is None, 120, "Redis to answer", process)
    yield chosen.url
    process.stop()


def announced(url: str, redis: str, **fields) -> None:
    service = account.Service(url, "rlt_key", account.boot(), time.time(), redis=redis, **fields)
    account.announce(hashlib.sha256(url.encode()).hexdigest(), service)


def listed(**env):
    return CliRunner().invoke(keys_command, ["list"], env=env)


def test_they_speak_to_the_redis_of_the_service_that_other_commands_find(
    away_from_home, own_redis, tmp_path, monkeypatch
):
    """As that of `up --state-dir`, which no directory leads to."""
    gateway = f"http://127.0.0.1:{free_port()}"
    announced(gateway, own_redis, home=str(tmp_path / "home"))
    done = listed()
    assert done.exit_code == 0 and "every call" in done.stdout
    assert f"***@{own_redis.partition('@')[2]}: the service of {tmp_path / 'home'}" in done.stderr
    assert own_redis.partition("@")[0] not in done.stderr
    assert listed(ROLLOUT_URL=gateway).exit_code == 0

    elsewhere = listed(ROLLOUT_URL="http://gateway.example:8080")
    assert elsewhere.exit_code == 1 and "Error: no Redis is named, nor known" in elsewhere.stderr
    assert "(http://gateway.example:8080: from ROLLOUT_URL)" in elsewhere.stderr
    assert "secret" not in listed(ROLLOUT_URL="https://me:secret@gateway.example").output
    broken = listed(ROLLOUT_URL="http://gateway.example:99999")
    assert broken.exit_code == 1 and "ROLLOUT_URL is no address" in broken.stderr
    monkeypatch.setattr(account, "other_owners", lambda place: {65534})
    stranger = listed(ROLLOUT_URL=gateway)
    assert stranger.exit_code == 1 and "user 65534 listens at 127.0.0.1" in stranger.stderr


def test_a_stack_of_an_older_release_needs_its_redis_named(away_from_home, tmp_path):
    announced("http://127.0.0.1:1", "", home=str(tmp_path / "home"))
    refused = listed()
    assert refused.exit_code == 1 and "Error: no Redis is named" in refused.stderr


def test_they_speak_to_the_redis_of_a_slurm_run(away_from_home, own_redis, tmp_path):
    run_dir = RunDir(tmp_path / "slurm-run")
    run_dir.make()
    place = urlsplit(own_redis)
    run_dir.redis.mkdir(mode=0o700)
    run_dir.write_private(run_dir.redis / "password", f"{place.password}\n")
    head = Head("12", "n1", "127.0.0.1", UP, f"http://10.9.8.7:{free_port()}", "", place.port)
    run_dir.write_head(head)
    done = listed(ROLLOUT_SLURM_RUN=str(run_dir.path))
    assert done.exit_code == 0 and f": the Slurm service of {run_dir.path}" in done.stderr, done.output
    run_dir.write_head(replace(head, redis_port=None))
    done = listed(ROLLOUT_SLURM_RUN=str(run_dir.path))
    assert done.exit_code == 1 and "uses a Redis of yours: set ROLLOUT_REDIS_URL" in done.stderr
    run_dir.write_head(replace(head, state=DOWN))
    done = listed(ROLLOUT_SLURM_RUN=str(run_dir.path))
    assert done.exit_code == 1 and "its service has no head that is up" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("create", "Team A"), "a name has 1 to 63"),
        (("create", "a", "--scope", "root"), "scopes are submit, read, metrics, admin"),
        (
            ("create", "a", "--scope", "read,train"),
            "'train': scopes are submit, read, metrics, admin, operate and",
        ),
        (("create", "a", "--scope", "train:A"), "'train:A': a policy's name has 1 to 63 lower-case letters"),
        (("create", "a", "--scope", "train:*"), "a policy's name has"),
        (("create", "a", "--policies", "Judge"), "names of policies have lower-case letters"),
        (("create", "a", "--expires", "soon"), "write 90s, 15m, 1h or 30d"),
        (("create", "a", "--quota-live", "-1"), "neither a number"),
        (("revoke", "nobody"), "there is no key 'nobody'"),
        (("rotate", "nobody"), "there is no key 'nobody'"),
    ],
)
def test_what_a_command_cannot_do_it_says_and_makes_nothing(world, args, message):
    result = CliRunner().invoke(keys_command, [*args, "--redis", world.url])
    assert result.exit_code in (1, 2) and message in result.output
    assert world.keys.list() == [] and world.tenants.list() == []


def test_limits_of_a_tenant_are_set_shown_and_taken_away(world):
    run(keys_command, "create", "a", "--quota-live", "5", "--handlers", "math,swe-*", url=world.url)
    run(tenants_command, "set", "a", "--per-minute", "60", "--quota-live", "any", url=world.url)
    shown = json.loads(run(tenants_command, "show", "a", "--json", url=world.url).stdout)
    assert shown == [
        {
            "name": "a",
            "quota_live": None,
            "per_minute": 60,
            "quota_bytes": None,
            "handlers": ["math", "swe-*"],
            "images": None,
            "policies": None,
            "runtimes": None,
            "mounts": None,
            "weight": 1.0,
            "live": 0,
        }
    ]
    assert "swe-*" in run(tenants_command, "show", url=world.url).stdout
    run(tenants_command, "set", "a", "--weight", "2.5", "--mounts", "/data/a,/data/b*", url=world.url)
    tenant = world.tenants.get("a")
    assert (tenant.weight, tenant.mounts, tenant.per_minute) == (2.5, ("/data/a", "/data/b*"), 60)
    run(tenants_command, "set", "a", "--mounts", "any", url=world.url)
    assert world.tenants.get("a").mounts is None
    refused = CliRunner().invoke(tenants_command, ["set", "a", "--weight", "0", "--redis", world.url])
    assert refused.exit_code == 2 and "0.01" in refused.output
