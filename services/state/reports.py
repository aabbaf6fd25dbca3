"""What trainers report of their steps: kept for a while, in bounds for each tenant."""

from __future__ import annotations

from typing import Any

import redis
from pydantic_core import from_json

from rollout.schema import Report, ReportRequest
from services.state import keys
from services.state.memory import Room
from services.state.redis import now
from services.state.scripts import Operations

MOST_RUNS = 100
"""Of a tenant; beyond it the one of which nothing was said for the longest is forgotten."""
MOST_REPORTS = 10_000
"""Steps of a run; beyond it the first ones are forgotten."""
MOST_RUN_BYTES, MOST_BYTES = 16 << 20, 64 << 20
"""Of a run's reports, which are read at once, and of a tenant's; 6 KB each at most."""
KEEP_S = 30 * 86400
"""After the last report of a run."""


class ReportStore:
    """The reports of all tenants, in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._room = Room(client)
        self._do = Operations(
            client,
            "reports",
            MOST_RUNS=MOST_RUNS,
            MOST_REPORTS=MOST_REPORTS,
            MOST_RUN_BYTES=MOST_RUN_BYTES,
            MOST_BYTES=MOST_BYTES,
            KEEP_MS=KEEP_S * 1000,
        )

    def put(self, tenant: str, request: ReportRequest) -> Report:
        """Enter a report.

        Raises:
            StoreFull: Redis has no room for it.
        """
        report = Report(at=now(self._redis), **request.model_dump(exclude={"run"}))
        text = report.model_dump_json().encode()
        self._room.require(len(text))
        self._do("put", text, tenant=tenant, run=request.run, step=request.step)
        self._redis.publish(keys.REPORTS_CHANNEL, f"{tenant} {request.run}")
        return report

    def runs(self, tenant: str) -> list[dict[str, Any]]:
        """The tenant's runs, the one reported of last first: how many steps are kept, and the last one."""
        runs = self._redis.zrange(keys.reports_of(tenant), 0, -1, desc=True, withscores=True)
        with self._redis.pipeline(transaction=False) as pipe:
            for run, _ in runs:
                pipe.zcard(keys.reports(tenant, run))
                pipe.zrange(keys.reports(tenant, run), -1, -1)
            kept = pipe.execute()
        return [
            {"run": run, "reports": count, "updated_at": at / 1000, "last": from_json(last[0])}
            for (run, at), count, last in zip(runs, kept[::2], kept[1::2], strict=True)
            if last
        ]

    def reports(self, tenant: str, run: str, limit: int) -> list[str]:
        """The latest so many steps of a run (JSON), in their order; none where there is no such run."""
        return self._redis.zrange(keys.reports(tenant, run), -limit, -1)
