"""Every Redis key of the service. The scripts in `lua/` build the same names: change both.

A rollout's own keys carry its id as the hash tag, so that they stay together on any layout.
"""

from __future__ import annotations


def record(rollout_id: str) -> str:
    """Hash: the record of a rollout."""
    return f"rollout:{{{rollout_id}}}"


def timeline(rollout_id: str) -> str:
    """List: its changes of state, oldest first."""
    return f"rollout:{{{rollout_id}}}:timeline"


def trajectory(rollout_id: str) -> str:
    """String: its trajectory as JSON."""
    return f"rollout:{{{rollout_id}}}:trajectory"


def group(group_id: str) -> str:
    """Set: ids of the group's rollouts."""
    return f"group:{{{group_id}}}"


def by_state(state: str) -> str:
    """Sorted set: ids in that state by time of creation (ms)."""
    return f"rollouts:state:{state}"


def by_tag(tag: str) -> str:
    """Sorted set: ids with that tag by time of creation (ms)."""
    return f"rollouts:tag:{tag}"


CREATED = "rollouts:created"
"""Sorted set: every id by time of creation (ms)."""
DUE = "rollouts:due"
"""Sorted set: when somebody must look at a rollout (ms)."""
COUNTS = "rollouts:counts"
"""Hash: number of rollouts in each state; those of terminal states only grow."""
COMPLETIONS = "completions"
"""Stream: rollouts that ended, in that order."""
EVENTS = "events"
"""Stream: every change of state (trimmed)."""
CANCEL_CHANNEL = "rollouts:cancel"
"""Pub/sub: ids to cancel now. Lossy; the record's flag is what counts."""
TOTALS = "rollouts:totals"
"""Hash: sums for /metrics (seconds of each stage, attempts, blame)."""
REAPER_LOCK = "reaper:lock"
NODES = "nodes"
"""Hash: node → what its sandbox host last said of itself (JSON with the time)."""
HANDLERS = "handlers"
"""Hash: handler name → what the workers announced of it."""
BACKENDS = "backends"
"""Hash: backend id → its description (JSON)."""
BACKEND_LOAD = "backends:load"
"""Sorted set, the min-heap: backend id by load."""
BACKEND_CHOSEN = "backends:chosen"
"""Hash: backend id → when it was chosen last (a counter), to break ties."""
BACKEND_PINS = "backends:pins"
"""Hash: rollout id → `<backend> <load>`."""


def workers(stage: str) -> str:
    """Sorted set: worker names of a stage by when they were last heard of (ms)."""
    return f"workers:{stage}"
