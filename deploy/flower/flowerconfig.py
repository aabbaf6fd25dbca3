"""Flower's configuration: `celery -A workers.app flower --conf=deploy/flower/flowerconfig.py`.

`rollout up` uses it; docs/operations.md says how to use it by hand. Options on the command line come after it
and win.
"""

import re
from pathlib import Path
from typing import Any

from tornado.options import options

from services.flower import FlowerAuthError, credentials
from services.queues import TASK_INIT
from services.settings import settings

_file, _database = settings().flower_auth_file, settings().flower_db
try:
    # Never on the command line, where `ps` shows it to everybody. FLOWER_BASIC_AUTH serves in a container,
    # whose environment is the place of secrets.
    basic_auth = credentials(Path(_file)) if _file else options.basic_auth
except FlowerAuthError as _error:
    raise SystemExit(f"flower: {_error}") from None

# Flower leaves /metrics and /healthcheck open in any case: beyond loopback, bar them by a proxy before it.
address = options.address or "127.0.0.1"
if address not in ("127.0.0.1", "::1", "localhost") and not basic_auth:
    raise SystemExit(
        f"flower: address {address} is open to other machines and there is no password: set "
        "ROLLOUT_FLOWER_AUTH_FILE to a file of mode 0600 with a line user:password, or leave out --address"
    )

# What was seen survives a restart of Flower. It is also saved while it runs: SIGKILL costs a minute at most.
persistent = bool(_database)
db = _database or "flower"
state_save_interval = 60_000  # ms
max_tasks = 10_000  # three a rollout; a save of so many takes 0.4 s of CPU. /metrics has the long view.
purge_offline_workers = 600  # seconds; nodes of a cluster come and go


def format_task(task: Any) -> Any:
    """A stage hands on what it was given: its result tells the node that INIT chose, and nothing again."""
    if (task.result or "").startswith("{'id': "):
        node = re.search(r"'node': '([^']+)'", task.result)
        task.result = f"on {node[1]}" if node and task.name == TASK_INIT else ""
    return task


tasks_columns = "name,args,state,received,started,runtime,worker,result,uuid"
