"""A key reaches nothing that others can read, in the whole service."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from rollout.client import ApiError, Client
from rollout.schema import RolloutRequest, State
from services.key_commands import keys as keys_command
from tests.helpers.sandboxes import stop_host
from tests.helpers.stack import Stack, wait_until
from tests.helpers.tenants import run

LOOK_FOR_KEYS = "(env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline) 2>/dev/null | grep -aq 'rlt_[0-9a-f]'"


def test_a_key_reaches_no_log_no_record_and_no_sandbox(tmp_path):
    """With the key in the environment of every process, and logs as talkative as they get."""
    text = f"rlt_{'5a' * 6}_{'5e' * 32}"
    secret = text.split("_")[2]
    env = {"ROLLOUT_API_KEY": text, "ROLLOUT_LOG_LEVEL": "DEBUG"}
    # Socket paths end at 107 bytes: pytest's own directories are too long for them.
    with tempfile.TemporaryDirectory(prefix="ra-", dir="/tmp") as sandbox_dir:
        try:
            with Stack(tmp_path, Path(sandbox_dir), env) as stack:
                args = ("create", "team-a", "--scope", "submit,read", "--from-env", "--quota-live", "3")
                run(keys_command, *args, url=stack.redis.url, env=env)
                stack.start_worker("init,run,eval", "all")
                with Client(stack.url, api_key="") as nobody:
                    assert _refused(nobody)
                with Client(stack.url, api_key=text) as client:
                    # The gateway has read the keys before there was this one.
                    wait_until(lambda: not _refused(client), 120, "the gateway to read the keys again")
                    task = {"command": LOOK_FOR_KEYS}
                    noop, looked = client.run(
                        [RolloutRequest(handler="noop"), RolloutRequest(handler="in_tool", task=task)]
                    )
                    with pytest.raises(ApiError, match="403 Scope missing"):
                        client.add_backend("http://127.0.0.1:9")
                    with pytest.raises(ApiError, match="403 Larger than the quota"):
                        client.submit(RolloutRequest(handler="noop", n=4))
                    assert client.status()["tenant"]["live"] == 0
        finally:
            stop_host(Path(sandbox_dir))
    assert [noop.state, looked.state] == [State.COMPLETED] * 2
    assert noop.tenant == looked.tenant == "team-a"
    assert looked.metrics["exit_code"] == 1  # grep found nothing, and there was something to read
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    everything = b"".join(written.values()) + looked.model_dump_json().encode()
    assert b"team-a" in everything and text.split("_")[1].encode() in everything
    assert [path for path, data in written.items() if secret.encode() in data] == []
    assert secret.encode() not in everything
    log = next(path for path in written if path.name == "all.log").read_text()
    assert re.search(rf"rollout completed.*{noop.id}.*tenant=team-a", re.sub(r"\x1b\[[0-9;]*m", "", log))


def _refused(client: Client) -> bool:
    try:
        client.status()
    except ApiError as error:
        return error.status == 401
    return False
