"""`/v1/webhooks`: what is on its way and what was given up; and which webhooks a request may name."""

from __future__ import annotations

from collections.abc import Sequence

from flask import Blueprint, Response, jsonify
from pydantic import ValidationError

from rollout.schema import FieldError, RedeliverRequest, RolloutRequest
from services.gateway.auth import needs
from services.gateway.bodies import body_json
from services.gateway.context import Gateway, gateway, reject_unknown_parameters
from services.gateway.problems import ApiProblem, from_validation
from services.state.api_keys import Scope
from services.webhook_address import AddressRefused

blueprint = Blueprint("webhooks", __name__, url_prefix="/v1")


def check_webhooks(gate: Gateway, requests: Sequence[RolloutRequest], *, single: bool) -> None:
    """Refuse webhooks that could never be delivered.

    Raises:
        ApiProblem: 400 naming the fields.
    """
    errors = []
    for position, wanted in enumerate(requests):
        if wanted.webhook is None:
            continue
        field = "webhook.url" if single else f"requests.{position}.webhook.url"
        if not gate.settings.webhook_secret.get_secret_value():
            message = "this service signs no webhooks: the operator has set no ROLLOUT_WEBHOOK_SECRET"
            errors.append(FieldError(field=field, message=message))
            continue
        try:
            gate.webhook_addresses.check_url(wanted.webhook.url)
        except AddressRefused as error:
            errors.append(FieldError(field=field, message=str(error)))
    if errors:
        raise ApiProblem(400, "Invalid request", f"{errors[0].field}: {errors[0].message}", errors)


@blueprint.get("/webhooks")
@needs(Scope.ADMIN)
def webhooks() -> Response:
    """Deliveries on their way, and the latest that were given up."""
    reject_unknown_parameters()
    gate = gateway()
    totals = gate.results.totals()
    return jsonify(
        pending=gate.webhooks.pending(),
        delivered=totals.get("webhooks_delivered", 0),
        given_up=totals.get("webhooks_given_up", 0),
        failures=gate.webhooks.failures(),
    )


@blueprint.post("/webhooks/redeliver")
@needs(Scope.ADMIN)
def redeliver() -> Response:
    """Send webhooks of ended rollouts once more."""
    try:
        wanted = RedeliverRequest.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None
    return jsonify(redelivering=gateway().webhooks.redeliver(wanted.ids))
