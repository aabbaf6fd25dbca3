"""Redis in operation: start checks, addresses, cut connections, restarts, failover."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import redis

from docs.make_tables import described_keys
from rollout.client import Client
from rollout.schema import RolloutRequest, State
from services.gateway.app import create_app
from services.queues import TASK_INIT, make_celery
from services.settings import Settings
from services.state import keys
from services.state.redis import LoopConnection, connect
from services.state.rollouts import payloads
from services.state.startup import UnfitRedis, prepare, risks
from tests.helpers.keys import http, keyed
from tests.helpers.sentinel import PASSWORD, RedisGroup
from tests.helpers.stack import ROOT, Process, Stack, free_port, redis_binary, wait_until
from tests.integration.conftest import emptied

GOOD = {
    "redis_version": "7.0.15",
    "role": "master",
    "cluster_enabled": 0,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
}


client = emptied


# -- start checks ----------------------------------------------------------------------------


def test_a_fit_redis_has_no_risks():
    assert risks(GOOD) == []


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "CONFIG SET maxmemory-policy noeviction"),
        ({"aof_enabled": 0}, "CONFIG SET appendonly yes"),
    ],
)
def test_what_endangers_the_data_is_said_with_its_remedy(info, says):
    (risk,) = risks(GOOD | info)
    assert says in risk


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"redis_version": "6.0.16"}, "6.0.16 is too old: the service needs 6.2 or later"),
        ({"role": "slave", "master_host": "m", "master_port": 1}, "is a replica"),
        ({"cluster_enabled": 1}, "node of a cluster"),
    ],
)
def test_a_redis_that_cannot_serve_is_refused(info, says):
    with pytest.raises(UnfitRedis, match=says):
        risks(GOOD | info)


def test_a_risky_redis_is_a_loud_warning_and_in_strict_mode_a_refusal(client, server, capfd):
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    try:
        app = create_app(Settings(redis_url=server.url))
        log = capfd.readouterr().err
        assert "REDIS MAY LOSE DATA: maxmemory-policy is allkeys-lru" in log
        assert "REDIS MAY LOSE DATA: the append-only file is off" in log
        assert keyed(app).get("/v1/status").status_code == 200
        with pytest.raises(UnfitRedis, match="ROLLOUT_REDIS_STRICT"):
            create_app(Settings(redis_url=server.url, redis_strict=True))
        with pytest.raises(UnfitRedis, match="ROLLOUT_REDIS_STRICT"):
            prepare(client, Settings(redis_strict=True))
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")


def test_our_own_configuration_is_fit(tmp_path):
    port = free_port()
    conf = ROOT / "deploy" / "redis" / "redis.conf"
    argv = [redis_binary(), str(conf), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    process = Process("redis", argv, tmp_path)
    try:
        client = redis.Redis(port=port, decode_responses=True)
        wait_until(lambda: _pings(client), 120, "Redis", process)
        assert risks(client.info()) == []
        limits = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
        assert "pubsub 33554432 8388608 60" in limits
        assert client.config_get("appendfsync")["appendfsync"] == "everysec"
        assert client.config_get("save")["save"] == ""
    finally:
        process.stop()


def _pings(client):
    try:
        return client.ping()
    except redis.RedisError:
        return False


def test_an_unfit_redis_that_comes_late_is_refused_at_the_first_request(client, server):
    url = f"redis://127.0.0.1:{free_port()}/0"
    late = create_app(Settings(redis_url=url, redis_strict=True))
    gate = late.extensions["rollout"]
    gate.start._client = client
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        answer = late.test_client().get("/v1/status")
        assert answer.status_code == 503 and "ROLLOUT_REDIS_STRICT" in answer.json["detail"]
        assert "ROLLOUT_REDIS_STRICT" in late.test_client().get("/ready").json["missing"][0]
        assert late.test_client().get("/health").status_code == 200
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert late.test_client().get("/v1/backends").status_code == 503, "its own Redis is still away"
    assert gate.start.passed


# -- addresses -------------------------------------------------------------------------------


def round_trip(url):
    """Our client writes a key, Celery a message, and each finds the other's in the same database."""
    client = connect(url)
    client.set("test:mine", "1")
    app = make_celery(Settings(redis_url=url))
    app.send_task(TASK_INIT)
    assert client.llen("init") == 1
    with app.connection() as connection:
        assert connection.default_channel.client.get("test:mine") in (b"1", "1")
    client.delete("init", "test:mine")


def test_a_unix_socket_serves_client_and_broker():
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as short:
        directory = Path(short)
        path = directory / "r.sock"
        argv = [redis_binary(), "--port", "0", "--unixsocket", str(path), "--requirepass", "pw"]
        process = Process("redis", [*argv, "--dir", short, "--appendonly", "yes"], directory)
        try:
            wait_until(path.exists, 120, "the socket", process)
            url = f"unix://:pw@{path}?db=3"
            wait_until(lambda: _pings(connect(url, retries=0)), 120, "Redis", process)
            round_trip(url)
        finally:
            process.stop()


@pytest.mark.may_skip  # needs a server that was built with TLS, and openssl for a certificate
def test_tls_serves_client_and_broker_and_checks_the_certificate(tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out"]
    subprocess.run([*command, str(certificate)], check=True, capture_output=True)
    port = free_port()
    argv = [redis_binary(), "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    argv += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--dir", str(tmp_path)]
    process = Process("redis", argv, tmp_path)
    trusted = f"rediss://127.0.0.1:{port}/2?ssl_ca_certs={certificate}"
    try:
        try:
            wait_until(lambda: _pings(connect(trusted, retries=0)), 120, "Redis over TLS", process)
        except RuntimeError:
            pytest.skip("this Redis was built without TLS")
        round_trip(trusted)
        over_tls = connect(trusted)
        over_tls.set("large", b"x" * 100_000)
        assert payloads.get_many(over_tls, ["large", "absent"]) == [b"x" * 100_000, None]
        assert over_tls.get("large") == "x" * 100_000
        with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
            connect(f"rediss://127.0.0.1:{port}/2", retries=0).ping()
        with pytest.raises(Exception, match="certificate verify failed"):
            make_celery(Settings(redis_url=f"rediss://127.0.0.1:{port}/2")).connection().connect()
    finally:
        process.stop()


# -- a service whose Redis is not always there --------------------------------------------------


def flood(url, count, **fields):
    """Submit `count` rollouts from a thread; the ids that were acknowledged so far, and the thread."""
    acknowledged: list[str] = []

    def submit():
        with Client(url, retry_for=240) as mine:
            for _ in range(count // 10):
                request = RolloutRequest(handler="noop", n=10, task={"reward": 1.0, "run_s": 0.05}, **fields)
                acknowledged.extend(rollout.id for rollout in mine.submit(request))

    thread = threading.Thread(target=submit)
    thread.start()
    return acknowledged, thread


def wait_for_all(stack, ids, timeout_s=240):
    """Until all have ended; then each must be in the stream of results once."""
    with Client(stack.url, retry_for=240) as mine:
        ended = list(mine.stream(ids=ids, timeout=timeout_s))
    assert sorted(rollout.id for rollout in ended) == sorted(ids)
    return ended


def completions(client):
    return [fields["id"] for _, fields in client.xrange(keys.RESULTS)]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """One gateway and one worker for all three stages; no sandbox, no model."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes:
        env = {"ROLLOUT_LEASE_S": "30"}
        with Stack(tmp_path_factory.mktemp("service"), Path(sandboxes), env) as stack:
            stack.start_worker("init,run,eval", "all")
            yield stack


def alive(stack):
    return [process.popen.poll() for process in stack.processes] == [None] * len(stack.processes)


def test_connections_cut_under_load_cost_nothing(service):
    client = connect(service.redis.url)
    before = len(completions(client))
    ids, thread = flood(service.url, 100)
    cut, pause_s, count = 0, 0.05, 0
    while thread.is_alive():
        for kind in ("normal", "pubsub"):
            cut += client.client_kill_filter(_type=kind, skipme=True)
        time.sleep(pause_s)
        # A starved gateway may need longer than that for one call, and would never get through.
        pause_s, count = (0.05 if len(ids) > count else min(2 * pause_s, 1.0)), len(ids)
    thread.join()
    ended = wait_for_all(service, ids)
    assert len(ids) == 100 and cut > 0
    assert {(rollout.state, rollout.reward) for rollout in ended} == {(State.COMPLETED, 1.0)}
    new = completions(client)[before:]
    assert len(new) == len(set(new)) == 100
    assert alive(service)


def test_a_restart_from_the_append_only_file_goes_unnoticed_but_for_ready(service):
    ids, thread = flood(service.url, 100)
    wait_until(lambda: len(ids) >= 30, 120, "some to be acknowledged")
    service.redis.crash()
    count = len(ids)
    answer = http.get(f"{service.url}/ready", timeout=240)
    assert answer.status_code == 503
    assert "Redis does not answer" in answer.json()["missing"][0]
    assert http.get(f"{service.url}/health", timeout=240).status_code == 200
    service.redis = service.redis.restarted()
    thread.join()
    # The process was killed, not the machine: the kernel has every write that was acknowledged.
    ended = wait_for_all(service, ids)
    assert count >= 30 and len(ids) == 100
    assert {rollout.state for rollout in ended} == {State.COMPLETED}
    assert {rollout.reward for rollout in ended} == {1.0}
    wait_until(lambda: http.get(f"{service.url}/ready").status_code == 200, 120, "the gateway to be ready")
    assert alive(service)


def test_every_key_is_in_the_documented_schema(service):
    service.client.run([RolloutRequest(handler="noop", n=3, tags=["documented"])])
    patterns = (re.escape(key).replace(r"\[/POLICY\]", "(/.+)?") for key in described_keys())
    schema = [re.compile(re.sub(r"[A-Z]+(_[A-Z]+)*", ".+", pattern)) for pattern in patterns]
    celery = ("_kombu.", "celery", "init", "run", "eval", "epoch")
    unknown = [
        key
        for key in service.redis.client.scan_iter(count=1000)
        if not any(form.fullmatch(key) for form in schema) and not key.startswith(celery)
    ]
    assert unknown == [], "describe them in services/state/keys.py"


def test_a_worker_refuses_an_unfit_redis(service):
    """A worker process as an operator starts it; the running ones go on."""
    client = service.redis.client
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        argv = [*service.worker_argv("init", "late"), "-c", "1"]
        process = service.start("late", argv, env={"ROLLOUT_REDIS_STRICT": "true"})
        assert process.popen.wait(60) != 0
        assert "maxmemory-policy is allkeys-lru" in process.tail(50)
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        service.processes.remove(process)
    assert alive(service)


def test_a_failover_by_sentinel_loses_nothing_that_was_acknowledged(tmp_path):
    env = {"ROLLOUT_LEASE_S": "30", "ROLLOUT_HANDLERS": "tests.helpers.chaos_handlers:Gated"}
    gates = tmp_path / "gates"
    gates.mkdir()
    for stage in ("init", "eval"):
        (gates / stage).touch()
    with (
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes,
        RedisGroup(tmp_path) as group,
        Stack(tmp_path, Path(sandboxes), env, redis=group) as stack,
    ):
        stack.start_worker("init,run,eval", "all")
        task = {"gates": str(gates), "reward": 0.5}
        (slow,) = stack.client.submit(RolloutRequest(handler="gated", task=task))
        wait_until((gates / f"run.{slow.id}").exists, 120, "it to run")
        ids, thread = flood(stack.url, 50)
        wait_until(lambda: len(ids) >= 10, 120, "some to be acknowledged")
        thread.join()
        old = group.kill_master()
        (gates / "run").touch()
        after, thread = flood(stack.url, 50)
        thread.join()
        ended = wait_for_all(stack, [slow.id, *ids, *after])
        assert group.master() != old
        assert asyncio.run(LoopConnection(group.url).send([("PING",), ("ROLE",)]))[1][0] == "master"
        assert len(ids) == 50 and len(after) == 50
        assert {rollout.state for rollout in ended} == {State.COMPLETED}
        rewards = {rollout.id: rollout.reward for rollout in ended}
        assert rewards.pop(slow.id) == 0.5 and set(rewards.values()) == {1.0}
        ended_ids = completions(group.client)
        assert len(ended_ids) == len(set(ended_ids)) == 101
        # Cancels go by pub/sub, which has to find the new master, too.
        wait_until(
            lambda: dict(group.client.pubsub_numsub(keys.CANCEL_CHANNEL))[keys.CANCEL_CHANNEL] == 1,
            60,
            "the worker to listen at the new master",
        )
        assert alive(stack)
        for process in stack.processes:
            assert PASSWORD not in process.log.read_text(), f"{process.name} logs the password"
