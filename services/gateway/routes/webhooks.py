"""`/v1/webhooks`: what is on its way and what was given up."""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from rollout.schema import RedeliverRequest
from services.gateway.context import gateway
from services.gateway.http import operation
from services.state.api_keys import Scope

blueprint = Blueprint("webhooks", __name__, url_prefix="/v1")


@blueprint.get("/webhooks")
@operation(scope=Scope.ADMIN)
def webhooks() -> dict[str, Any]:
    """Webhooks on their way, and the latest that were given up."""
    gate = gateway()
    totals = gate.results.totals()
    return {
        "pending": gate.webhooks.pending(),
        "delivered": totals.get("webhooks_delivered", 0),
        "given_up": totals.get("webhooks_given_up", 0),
        "failures": gate.webhooks.failures(),
    }


@blueprint.post("/webhooks/redeliver")
@operation(scope=Scope.ADMIN)
def redeliver(body: RedeliverRequest) -> dict[str, Any]:
    """Send webhooks of ended rollouts once more."""
    return {"redelivering": gateway().webhooks.redeliver(body.ids)}
