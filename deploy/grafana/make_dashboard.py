"""Writes deploy/grafana/dashboard.json: `python deploy/grafana/make_dashboard.py`. Edit here, not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8
"""Of a panel, in Grafana's grid of 24 columns."""
FIGURE_WIDTH, FIGURE_HEIGHT = 3, 4
"""Of a single figure of the first row."""
NODE, HANDLER = 'node=~"$node"', 'handler=~"$handler"'
"""What the board's variables choose."""
Line = tuple[str, str]
"""A query, and its legend."""
Panel = tuple[str, str, *tuple[Line, ...]]
"""Title, unit, and its lines."""


def legend(labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels.split(", "))


def per_s(selector: str) -> str:
    return f"rate({selector}[$__rate_interval])"


def value(gauge: str, labels: str) -> Line:
    return gauge, legend(labels)


def rate(counter: str, labels: str) -> Line:
    return f"sum by ({labels}) ({per_s(counter)})", legend(labels)


def quantile(share: float, histogram: str, label: str) -> Line:
    name, brace, chosen = histogram.partition("{")
    buckets = per_s(f"{name}_bucket{brace}{chosen}")
    return f"histogram_quantile({share}, sum by (le, {label}) ({buckets}))", legend(label)


def ratio(part: str, whole: str, label: str) -> Line:
    return f"{part} / {whole}", legend(label)


def backend_ratio(part: str, whole: str) -> Line:
    part, whole = (per_s(f"rollout_backend_{counter}_total") for counter in (part, whole))
    return ratio(part, whole, "backend")


def increase(counter: str, label: str) -> Line:
    return f"increase({counter}[$__rate_interval])", legend(label)


def in_use(label: str) -> Line:
    busy, slots = (f"sum by ({label}) (rollout_fleet_{what}{{{NODE}}})" for what in ("busy", "slots"))
    return ratio(busy, slots, label)


def sandbox_events(labels: str, events: str) -> Line:
    return rate(f'rollout_sandbox_events_total{{{NODE}, event=~"{events}"}}', labels)


def mean(histogram: str, grouping: str = "") -> str:
    """Of what was observed in a while. `delta`: the sum falls where rewards are negative."""
    total, count = (
        f"sum{grouping} (delta({histogram}_{part}{{{HANDLER}}}[$__rate_interval]))"
        for part in ("sum", "count")
    )
    return f"{total} / {count}"


LIVE = ("queued", "initializing", "ready", "running", "evaluating")
ATTACHED = f"sum({per_s('rollout_capture_attached_total')})"
BRANCHES = f"sum({per_s('rollout_capture_branches_total')})"
FIGURES: list[tuple[str, str, str]] = [
    ("Live rollouts", "short", f'sum(rollout_rollouts{{state=~"{"|".join(LIVE)}"}})'),
    ("Ended a second", "ops", f"sum({per_s('rollout_duration_seconds_count')})"),
    ("Reward, mean", "short", mean("rollout_reward")),
    ("Turns, mean", "short", mean("rollout_turns")),
    ("Failed or dropped a second", "ops", f"sum({per_s('rollout_dropped_total')})"),
    (
        "Slots in use",
        "percentunit",
        f"sum(rollout_fleet_busy{{{NODE}}}) / sum(rollout_fleet_slots{{{NODE}}})",
    ),
    ("Nodes", "short", f"count(count by (node) (rollout_fleet_slots{{{NODE}}}))"),
    ("LLM backends up", "short", "sum(rollout_backend_up)"),
]
"""Title, unit and query of the first row."""
ROWS: dict[str, list[Panel]] = {
    "Rollouts": [
        ("Live, by state", "short", *((f'rollout_rollouts{{state="{state}"}}', state) for state in LIVE)),
        ("Ended a second, by state", "ops", rate("rollout_duration_seconds_count", "state")),
        ("From submission to end, p95", "s", quantile(0.95, "rollout_duration_seconds", "state")),
        ("Stage time, median", "s", quantile(0.5, "rollout_stage_duration_seconds", "stage")),
        ("Stage time, p95", "s", quantile(0.95, "rollout_stage_duration_seconds", "stage")),
        ("Wait in queues, p95", "s", quantile(0.95, "rollout_queue_wait_seconds", "stage")),
    ],
    "Rewards and turns (of the handlers chosen above)": [
        ("Reward, mean", "short", (mean("rollout_reward", " by (handler)"), "{{handler}}")),
        ("Scored a second", "ops", rate(f"rollout_reward_count{{{HANDLER}}}", "handler")),
        ("Turns, mean", "short", (mean("rollout_turns", " by (handler)"), "{{handler}}")),
        ("Turns, p95", "short", quantile(0.95, f"rollout_turns{{{HANDLER}}}", "handler")),
    ],
    "What goes wrong": [
        ("Failures a second, by blame", "ops", rate("rollout_failures_total", "blame")),
        ("Attempts lost a second, by blame", "ops", rate("rollout_attempts_lost_total", "blame")),
        ("Ended, by attempts used", "ops", rate("rollout_ended_total", "attempts")),
        ("Oldest heartbeat", "s", value("rollout_lease_age_seconds", "stage")),
        ("Oldest live rollout, by state", "s", value("rollout_oldest_seconds", "state")),
        ("Lag of the reaper", "s", ("rollout_reaper_lag_seconds", "lag")),
    ],
    "Fleets": [
        ("Queue depth", "short", value("rollout_queue_depth", "queue")),
        (
            "Live workers and nodes",
            "short",
            value("rollout_workers", "stage"),
            ("count(count by (node) (rollout_fleet_slots))", "nodes"),
        ),
        (
            "Slots, and rollouts in hand, by stage",
            "short",
            ("sum by (stages) (rollout_fleet_slots)", "{{stages}} slots"),
            ("rollout_leases", "{{stage}} in hand"),
        ),
        ("Slots in use, by stage", "percentunit", in_use("stages")),
        ("Leases lost a second, by stage", "ops", rate("rollout_leases_lost_total", "stage")),
        ("Drops a second, by reason", "ops", rate("rollout_dropped_total", "reason")),
        (
            "Autoscaler: slots that stages should have",
            "short",
            value("rollout_autoscale_need_slots", "stage"),
        ),
        ("Autoscaler: nodes", "short", value("rollout_autoscale_nodes", "kind, state")),
        ("Autoscaler: actions", "short", increase("rollout_autoscale_actions_total", "action")),
    ],
    "Nodes (those chosen above)": [
        ("Slots in use, by node", "percentunit", in_use("node")),
        ("Sandboxes", "short", value(f"sum by (node, state) (rollout_sandboxes{{{NODE}}})", "node, state")),
        *(
            (title, "bytes", value(f'rollout_node_free_bytes{{{NODE}, resource="{resource}"}}', "node"))
            for title, resource in (("Free disk for sandboxes", "disk"), ("Free memory", "memory"))
        ),
        ("Sandbox events a second", "ops", sandbox_events("event", ".+")),
        (
            "Sandboxes from the warm pool",
            "percentunit",
            ratio(sandbox_events("node", "claimed_warm")[0], sandbox_events("node", "started")[0], "node"),
        ),
        (
            "Sandboxes that fail to start or die a second, by node",
            "ops",
            sandbox_events("node, event", "failed|died|expired"),
        ),
        (
            "Ahead of RUN",
            "short",
            value(f"rollout_ready_ahead{{{NODE}}}", "node"),
            (f"rollout_ready_ahead_limit{{{NODE}}}", "most on {{node}}"),
        ),
        (
            "INIT stopped, or waiting for RUN",
            "short",
            (f"rollout_node_stopped{{{NODE}}}", "{{node}} short of {{reason}}"),
            (f"rollout_node_init_waits{{{NODE}}}", "{{node}} waits"),
        ),
    ],
    "Head: gateway and Redis": [
        ("Requests a second", "reqps", rate("rollout_gateway_requests_total", "route, status")),
        (
            "Requests that wait",
            "short",
            value("rollout_gateway_waiters", "instance"),
            ("rollout_completion_streams", "streams"),
        ),
        (
            "Processor of the gateway, cores",
            "short",
            (per_s("rollout_gateway_process_cpu_seconds_total"), "{{instance}}"),
        ),
        (
            "Memory",
            "bytes",
            ("rollout_gateway_process_resident_memory_bytes", "gateway {{instance}}"),
            ("rollout_redis_memory_bytes", "Redis"),
            ("rollout_redis_memory_limit_bytes", "Redis, limit"),
            ("rollout_results_bytes", "trajectories in Redis"),
        ),
        ("Redis commands a second", "ops", (per_s("rollout_redis_commands_total"), "commands")),
        ("Redis answers in", "s", ("rollout_redis_ping_seconds", "ping")),
        ("Append-only file", "bytes", ("rollout_redis_aof_bytes", "size")),
        ("Redis connections", "short", ("rollout_redis_clients", "clients")),
        ("Webhooks a second, by outcome", "ops", rate("rollout_webhooks_total", "event")),
    ],
    "Batches": [
        ("Groups decided a second, by verdict", "ops", rate("rollout_batch_groups_total", "verdict")),
        ("Groups not kept a second, by reason", "ops", rate("rollout_batch_groups_refused_total", "reason")),
        ("Things to do", "short", ("rollout_batches_todo", "to do")),
    ],
    "Sharing": [
        ("Live rollouts, by tenant", "short", value("rollout_tenant_live", "tenant")),
        ("Waiting for INIT, by tenant", "short", value("rollout_tenant_waiting", "tenant")),
        ("Taken by INIT a second, by tenant", "ops", rate("rollout_tenant_claimed_total", "tenant")),
        (
            "Share of the quota in use",
            "percentunit",
            ratio("rollout_tenant_live", "rollout_tenant_quota_live", "tenant"),
        ),
    ],
    "LLM backends": [
        ("Up", "short", value("rollout_backend_up", "backend")),
        ("Key-value cache in use", "percentunit", value("rollout_backend_kv_usage", "backend")),
        ("Live rollouts", "short", value("rollout_backend_live_rollouts", "backend")),
        (
            "Calls running and waiting",
            "short",
            ("rollout_backend_requests_running", "{{backend}} running"),
            ("rollout_backend_requests_waiting", "{{backend}} waiting"),
        ),
        (
            "Prompt tokens found in the prefix cache",
            "percentunit",
            backend_ratio("cached_tokens", "prompt_tokens"),
        ),
        (
            "Tokens sampled a second",
            "short",
            (per_s("rollout_backend_generation_tokens_total"), "{{backend}}"),
        ),
        ("A call takes, mean", "s", backend_ratio("request_seconds", "requests")),
        ("Placements a second", "ops", rate("rollout_placements_total", "event")),
        ("Weight updates, by outcome", "short", increase("rollout_policy_updates_total", "policy, outcome")),
    ],
    "Agent programs: capture": [
        (
            "Model calls a second, by dialect and outcome",
            "reqps",
            rate("rollout_capture_calls_total", "dialect, outcome"),
        ),
        ("Calls in flight", "short", value("rollout_capture_in_flight", "instance")),
        (
            "A call takes",
            "s",
            (quantile(0.5, "rollout_capture_call_seconds", "instance")[0], "{{instance}} median"),
            (quantile(0.95, "rollout_capture_call_seconds", "instance")[0], "{{instance}} p95"),
        ),
        (
            "Calls that went on from a conversation, or began a branch",
            "percentunit",
            (f"{ATTACHED} / ({ATTACHED} + {BRANCHES})", "attached"),
            (f"{BRANCHES} / ({ATTACHED} + {BRANCHES})", "branches"),
        ),
        (
            "Calls refused at the door a second, by reason",
            "ops",
            rate("rollout_capture_refused_total", "reason"),
        ),
        ("Calls past a limit a second", "ops", rate("rollout_capture_stopped_total", "limit")),
    ],
}
"""The panels of each row, by its title."""


def panel(number: int, title: str, unit: str, lines: list[Line], x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        # A reward may be below 0.
        "fieldConfig": {"defaults": {"unit": unit, "min": None if "Reward" in title else 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": name, "datasource": SOURCE}
            for i, (query, name) in enumerate(lines)
        ],
    }


def figure(number: int, title: str, unit: str, query: str) -> dict[str, Any]:
    made = panel(number, title, unit, [(query, title)], (number - 1) * FIGURE_WIDTH, 0)
    made["gridPos"] |= {"w": FIGURE_WIDTH, "h": FIGURE_HEIGHT}
    options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"}
    return made | {"type": "stat", "options": options}


def variable(name: str, metric: str) -> dict[str, Any]:
    """One that chooses values of a label, at first all."""
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # whenever the time range changes
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    panels = [figure(number, *contents) for number, contents in enumerate(FIGURES, 1)]
    y = FIGURE_HEIGHT
    for title, contents in ROWS.items():
        head = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append(head | {"gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for i, (name, unit, *lines) in enumerate(contents):
            x, row = i * WIDTH % 24, i * WIDTH // 24
            panels.append(panel(len(panels) + 1, name, unit, lines, x, y + row * HEIGHT))
        y += (len(contents) * WIDTH + 23) // 24 * HEIGHT
    return {
        "uid": "rollout-service",
        "title": "Rollout service",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
                variable("node", "rollout_fleet_slots"),
                variable("handler", "rollout_reward_count"),
            ]
        },
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
