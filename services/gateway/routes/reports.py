"""`/v1/reports`: what trainers say of their steps."""

from __future__ import annotations

import json
from typing import Annotated, Any

from flask import Blueprint, Response

from rollout.schema import Report, ReportRequest
from services.gateway.auth import caller
from services.gateway.context import gateway
from services.gateway.http import JSON, OneTenant, operation, page_size
from services.gateway.problems import ApiProblem
from services.state.api_keys import Scope
from services.state.reports import MOST_REPORTS

blueprint = Blueprint("reports", __name__, url_prefix="/v1")


@blueprint.post("/reports")
@operation(scope=Scope.SUBMIT)
def put(body: ReportRequest) -> Report:
    """Report a step of a training run; the same step again takes the place of the first."""
    return gateway().reports.put(caller().tenant.name, body)


@blueprint.get("/reports")
@operation()
def runs(tenant: OneTenant) -> dict[str, Any]:
    """The runs that were reported of, the latest first."""
    return {"runs": gateway().reports.runs(tenant)}


@blueprint.get("/reports/<run>")
@operation()
def reports(
    run: str, limit: Annotated[int, page_size(MOST_REPORTS, MOST_REPORTS)], tenant: OneTenant
) -> Response:
    """The steps of a run, in their order."""
    steps = gateway().reports.reports(tenant, run, limit)
    if not steps:
        detail = f"nothing was reported of a run {run!r}, or it is forgotten; GET /v1/reports lists the runs"
        raise ApiProblem(404, "No such run", detail)
    # As they are kept: ten thousand are not read and written once more.
    return Response(f'{{"run":{json.dumps(run)},"reports":[{",".join(steps)}]}}', content_type=JSON)
