"""What `rollout top` draws of policies, without a service."""

from __future__ import annotations

import io

from rich.console import Console

from rollout.cli.top_look import Look
from rollout.cli.top_view import view
from rollout.schema import PolicyStatus
from rollout.schema.fleet import Fleet


def drawn(*policies: PolicyStatus) -> str:
    empty = {name: [] for name in ("backends", "batches", "groups", "live", "recent")}
    rates = {"stages": {}, "ended": {}, "tokens": {}}
    none = {"workers": [], "stages": {}, "nodes": [], "states": {}, "oldest_s": {}, "leases_lost": 0}
    fleet = Fleet(at=0.0, reaper_lag_s=0.0, **none)
    look = Look(
        at=0.0, version="1", tenant="*", flower=None, fleet=fleet, rates=rates, policies=policies, **empty
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(view(look, "http://here"))
    return console.export_text()


def test_policies_are_shown_where_there_are_several_and_who_waits_for_them():
    nothing = {"current": None, "update": None, "history": []}
    one = PolicyStatus(**nothing)
    other = PolicyStatus(name="judge", backends=["b1", "b2"], waiting=3, longest_wait_s=12.4, **nothing)
    assert "policies" not in drawn(one)
    lines = drawn(one, other).splitlines()
    at = lines.index(next(line for line in lines if line.startswith("policies")))
    assert lines[at + 1].split() == ["policy", "version", "update", "backends", "waiting", "longest"]
    assert lines[at + 2].split() == ["default", "–", "–", "0", "0", "–"]
    assert lines[at + 3].split() == ["judge", "–", "–", "2", "3", "12", "s"]
