"""`/v1/reports`: what trainers say of their steps."""

from __future__ import annotations

import json
from typing import Annotated, Any

from flask import Blueprint, Response

from rollout.schema import Report, ReportRequest
from services.gateway.auth import caller
from services.gateway.context import gateway
from services.gateway.http import JSON, Tenant, operation, page_size
from services.gateway.problems import ApiProblem, invalid
from services.state.api_keys import Scope
from services.state.reports import MOST_REPORTS

blueprint = Blueprint("reports", __name__, url_prefix="/v1")


def _one(tenant: str | None) -> str:
    if tenant is None:
        raise invalid("tenant", "name one tenant: runs are each tenant's own")
    return tenant


@blueprint.post("/reports")
@operation(scope=Scope.SUBMIT)
def put(body: ReportRequest) -> Report:
    """Report a step of a training run; the same step again takes the place of the first."""
    return gateway().reports.put(caller().tenant.name, body)


@blueprint.get("/reports")
@operation()
def runs(tenant: Tenant) -> dict[str, Any]:
    """The runs that were reported of, the latest first."""
    return {"runs": gateway().reports.runs(_one(tenant))}


@blueprint.get("/reports/<run>")
@operation()
def reports(
    run: str, limit: Annotated[int, page_size(MOST_REPORTS, MOST_REPORTS)], tenant: Tenant
) -> Response:
    """The steps of a run, in their order."""
    found = gateway().reports.reports(_one(tenant), run, limit)
    if not found:
        detail = f"nothing was reported of a run {run!r}, or it is forgotten; GET /v1/reports lists the runs"
        raise ApiProblem(404, "No such run", detail)
    # As they are kept: ten thousand are not read and written once more.
    return Response(f'{{"run":{json.dumps(run)},"reports":[{",".join(found)}]}}', content_type=JSON)
