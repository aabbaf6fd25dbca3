"""A script of Redis holds what its operation needs and nothing else, for each call runs all of it."""

from __future__ import annotations

import pytest

from services.state import scripts
from services.version import STAMP

CODE = """-- base() is what lift speaks of
local function base() return STEP end
local unused, verdicts = 1, 2
local forward
local function lift(weight)
  return base() + weight
end
local function idle() return lift(0) end
though_full()
function operations.put(ask) return lift(ask.weight) end
function operations.get(ask) forward = verdicts return put end
"""


@pytest.mark.parametrize(
    ("operation", "kept", "dropped"),
    [
        (
            "put",
            ["STEP =", "base()", "lift(weight)", "though_full()", ".put("],
            ["verdicts", "forward", ".get("],
        ),
        ("get", ["verdicts = 1, 2", "local forward", "though_full()", ".put(", "lift("], ["idle", "--"]),
    ],
)
def test_a_script_holds_what_its_operation_needs(monkeypatch, operation, kept, dropped):
    monkeypatch.setattr(scripts, "text", lambda name: CODE)
    stamp, _, script = scripts.source("some", operation, "local STEP = 1\nlocal OTHER = 2\n").partition("\n")
    assert stamp == f"-- stamp {STAMP}"
    assert [words for words in kept if words not in script] == []
    assert [words for words in [*dropped, "OTHER"] if words in script] == []


def test_a_heartbeat_does_not_carry_the_end_of_a_rollout():
    heartbeat, finish = (scripts.source("rollouts/rollouts", name) for name in ("heartbeat", "finish"))
    assert "finish_rollout" in finish and "finish_rollout" not in heartbeat
    assert len(heartbeat) < len(finish) / 5
