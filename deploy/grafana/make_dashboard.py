"""Writes deploy/grafana/dashboard.json: `python deploy/grafana/make_dashboard.py`. Edit here, not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).with_name("dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8
"""Of a panel, in Grafana's grid of 24 columns."""


def quantile(share: float, histogram: str, label: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {label}) (rate({histogram}_bucket[$__rate_interval])))"


def rate(counter: str, label: str) -> str:
    return f"sum by ({label}) (rate({counter}[$__rate_interval]))"


def sandbox_events(label: str, events: str) -> str:
    chosen = f'rollout_sandbox_events_total{{event=~"{events}"}}'
    return f"sum by ({label}) (rate({chosen}[$__rate_interval]))"


ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Rollouts",
        [
            (
                "Live, by state",
                "short",
                [
                    (f'rollout_rollouts{{state="{s}"}}', s)
                    for s in ("queued", "initializing", "ready", "running", "evaluating")
                ],
            ),
            (
                "Ended a second, by state",
                "ops",
                [(rate("rollout_duration_seconds_count", "state"), "{{state}}")],
            ),
            (
                "From submission to end, p95",
                "s",
                [(quantile(0.95, "rollout_duration_seconds", "state"), "{{state}}")],
            ),
            (
                "Stage time, median",
                "s",
                [(quantile(0.5, "rollout_stage_duration_seconds", "stage"), "{{stage}}")],
            ),
            (
                "Stage time, p95",
                "s",
                [(quantile(0.95, "rollout_stage_duration_seconds", "stage"), "{{stage}}")],
            ),
            (
                "Wait in queues, p95",
                "s",
                [(quantile(0.95, "rollout_queue_wait_seconds", "stage"), "{{stage}}")],
            ),
        ],
    ),
    (
        "What goes wrong",
        [
            ("Failures a second, by blame", "ops", [(rate("rollout_failures_total", "blame"), "{{blame}}")]),
            (
                "Attempts lost a second, by blame",
                "ops",
                [(rate("rollout_attempts_lost_total", "blame"), "{{blame}}")],
            ),
            ("Ended, by attempts used", "ops", [(rate("rollout_ended_total", "attempts"), "{{attempts}}")]),
            ("Oldest heartbeat", "s", [("rollout_lease_age_seconds", "{{stage}}")]),
            ("Oldest live rollout, by state", "s", [("rollout_oldest_seconds", "{{state}}")]),
            ("Lag of the reaper", "s", [("rollout_reaper_lag_seconds", "lag")]),
        ],
    ),
    (
        "Fleets",
        [
            ("Queue depth", "short", [("rollout_queue_depth", "{{queue}}")]),
            (
                "Live workers and nodes",
                "short",
                [
                    ("rollout_workers", "{{stage}}"),
                    ("count(count by (node) (rollout_fleet_slots))", "nodes"),
                ],
            ),
            (
                "Slots, and rollouts in hand, by stage",
                "short",
                [
                    ("sum by (stages) (rollout_fleet_slots)", "{{stages}} slots"),
                    ("rollout_leases", "{{stage}} in hand"),
                ],
            ),
            (
                "Slots in use, by stage",
                "percentunit",
                [
                    (
                        "sum by (stages) (rollout_fleet_busy) / sum by (stages) (rollout_fleet_slots)",
                        "{{stages}}",
                    )
                ],
            ),
            (
                "Leases lost a second, by stage",
                "ops",
                [(rate("rollout_leases_lost_total", "stage"), "{{stage}}")],
            ),
            (
                "Drops a second, by reason",
                "ops",
                [(rate("rollout_dropped_total", "reason"), "{{reason}}")],
            ),
            (
                "Autoscaler: slots that stages should have",
                "short",
                [("rollout_autoscale_need_slots", "{{stage}}")],
            ),
            (
                "Autoscaler: nodes",
                "short",
                [("rollout_autoscale_nodes", "{{kind}} {{state}}")],
            ),
            (
                "Autoscaler: actions",
                "short",
                [("increase(rollout_autoscale_actions_total[$__rate_interval])", "{{action}}")],
            ),
        ],
    ),
    (
        "Nodes (of a Slurm cluster, or of any other)",
        [
            (
                "Slots in use, by node",
                "percentunit",
                [("sum by (node) (rollout_fleet_busy) / sum by (node) (rollout_fleet_slots)", "{{node}}")],
            ),
            ("Sandboxes", "short", [("sum by (node, state) (rollout_sandboxes)", "{{node}} {{state}}")]),
            ("Free disk for sandboxes", "bytes", [('rollout_node_free_bytes{resource="disk"}', "{{node}}")]),
            ("Free memory", "bytes", [('rollout_node_free_bytes{resource="memory"}', "{{node}}")]),
            (
                "Sandbox events a second",
                "ops",
                [(rate("rollout_sandbox_events_total", "event"), "{{event}}")],
            ),
            (
                "Sandboxes from the warm pool",
                "percentunit",
                [
                    (
                        f"{sandbox_events('node', 'claimed_warm')} / {sandbox_events('node', 'started')}",
                        "{{node}}",
                    )
                ],
            ),
            (
                "Sandboxes that fail to start or die a second, by node",
                "ops",
                [
                    (
                        sandbox_events("node, event", "failed|died|expired"),
                        "{{node}} {{event}}",
                    )
                ],
            ),
            (
                "Ahead of RUN",
                "short",
                [
                    ("rollout_ready_ahead", "{{node}}"),
                    ("rollout_ready_ahead_limit", "most on {{node}}"),
                ],
            ),
            (
                "INIT stopped, or waiting for RUN",
                "short",
                [
                    ("rollout_node_stopped", "{{node}} short of {{reason}}"),
                    ("rollout_node_init_waits", "{{node}} waits"),
                ],
            ),
        ],
    ),
    (
        "Head: gateway and Redis",
        [
            (
                "Requests a second",
                "reqps",
                [(rate("rollout_gateway_requests_total", "route, status"), "{{route}} {{status}}")],
            ),
            (
                "Requests that wait",
                "short",
                [("rollout_gateway_waiters", "{{instance}}"), ("rollout_completion_streams", "streams")],
            ),
            (
                "Processor of the gateway, cores",
                "short",
                [("rate(rollout_gateway_process_cpu_seconds_total[$__rate_interval])", "{{instance}}")],
            ),
            (
                "Memory",
                "bytes",
                [
                    ("rollout_gateway_process_resident_memory_bytes", "gateway {{instance}}"),
                    ("rollout_redis_memory_bytes", "Redis"),
                    ("rollout_redis_memory_limit_bytes", "Redis, limit"),
                    ("rollout_results_bytes", "trajectories in Redis"),
                ],
            ),
            (
                "Redis commands a second",
                "ops",
                [("rate(rollout_redis_commands_total[$__rate_interval])", "commands")],
            ),
            ("Redis answers in", "s", [("rollout_redis_ping_seconds", "ping")]),
            ("Append-only file", "bytes", [("rollout_redis_aof_bytes", "size")]),
            ("Redis connections", "short", [("rollout_redis_clients", "clients")]),
            (
                "Webhooks a second, by outcome",
                "ops",
                [(rate("rollout_webhooks_total", "event"), "{{event}}")],
            ),
        ],
    ),
    (
        "Batches",
        [
            (
                "Groups decided a second, by verdict",
                "ops",
                [(rate("rollout_batch_groups_total", "verdict"), "{{verdict}}")],
            ),
            (
                "Groups not kept a second, by reason",
                "ops",
                [(rate("rollout_batch_groups_refused_total", "reason"), "{{reason}}")],
            ),
            ("Things to do", "short", [("rollout_batches_todo", "to do")]),
        ],
    ),
    (
        "Sharing",
        [
            ("Live rollouts, by tenant", "short", [("rollout_tenant_live", "{{tenant}}")]),
            ("Waiting for INIT, by tenant", "short", [("rollout_tenant_waiting", "{{tenant}}")]),
            (
                "Taken by INIT a second, by tenant",
                "ops",
                [(rate("rollout_tenant_claimed_total", "tenant"), "{{tenant}}")],
            ),
            (
                "Share of the quota in use",
                "percentunit",
                [("rollout_tenant_live / rollout_tenant_quota_live", "{{tenant}}")],
            ),
        ],
    ),
    (
        "LLM backends",
        [
            ("Up", "short", [("rollout_backend_up", "{{backend}}")]),
            ("Key-value cache in use", "percentunit", [("rollout_backend_kv_usage", "{{backend}}")]),
            ("Live rollouts", "short", [("rollout_backend_live_rollouts", "{{backend}}")]),
            (
                "Calls running and waiting",
                "short",
                [
                    ("rollout_backend_requests_running", "{{backend}} running"),
                    ("rollout_backend_requests_waiting", "{{backend}} waiting"),
                ],
            ),
            (
                "Prompt tokens found in the prefix cache",
                "percentunit",
                [
                    (
                        "rate(rollout_backend_cached_tokens_total[$__rate_interval]) / "
                        "rate(rollout_backend_prompt_tokens_total[$__rate_interval])",
                        "{{backend}}",
                    )
                ],
            ),
            (
                "Tokens sampled a second",
                "short",
                [("rate(rollout_backend_generation_tokens_total[$__rate_interval])", "{{backend}}")],
            ),
            (
                "A call takes, mean",
                "s",
                [
                    (
                        "rate(rollout_backend_request_seconds_total[$__rate_interval]) / "
                        "rate(rollout_backend_requests_total[$__rate_interval])",
                        "{{backend}}",
                    )
                ],
            ),
            ("Placements a second", "ops", [(rate("rollout_placements_total", "event"), "{{event}}")]),
            (
                "Weight updates, by outcome",
                "short",
                [("increase(rollout_policy_updates_total[$__rate_interval])", "{{outcome}}")],
            ),
        ],
    ),
]
"""Title of each row, and its panels: title, unit, then query and legend of each line."""


def panel(number: int, title: str, unit: str, lines: list[tuple[str, str]], x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for i, (query, legend) in enumerate(lines)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, contents in ROWS:
        at = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": at,
            }
        )
        y += 1
        for i, (name, unit, lines) in enumerate(contents):
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
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}]
        },
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
