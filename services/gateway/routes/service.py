"""`/v1/handlers`, `/v1/status`, `/health`, `/ready`, `/metrics`, `/openapi.json`."""

from __future__ import annotations

import redis
from flask import Blueprint, Response, jsonify

import rollout
from services.gateway import metrics, openapi
from services.gateway.context import gateway
from services.queues import STAGES

blueprint = Blueprint("service", __name__)


@blueprint.get("/v1/handlers")
def handlers() -> Response:
    """Handlers that workers have announced, with the schema of their tasks."""
    known = gateway().tasks.handlers(fresh=True)
    return jsonify(handlers=[info.model_dump() for info in known.values()])


@blueprint.get("/v1/status")
def status() -> Response:
    """Rollouts by state, depth of the queues, live workers, backends."""
    gate = gateway()
    return jsonify(
        version=rollout.__version__,
        states=gate.rollouts.counts(),
        queues=metrics.queue_depths(gate.redis),
        workers=gate.fleet.alive(),
        backends=[backend.model_dump() for backend in gate.backends.list()],
    )


@blueprint.get("/health")
def health() -> Response:
    """200 while the process lives."""
    return jsonify(status="ok")


@blueprint.get("/ready")
def ready() -> tuple[Response, int]:
    """200 when rollouts can be worked on; else 503 with what is missing."""
    missing = []
    try:
        alive = gateway().fleet.alive()
        missing = [f"no live worker of the {stage} fleet" for stage in STAGES if not alive[stage]]
    except redis.RedisError as error:
        missing = [f"Redis does not answer: {error}"]
    return jsonify(ready=not missing, missing=missing), 503 if missing else 200


@blueprint.get("/metrics")
def prometheus() -> Response:
    """Metrics in the Prometheus text format."""
    return Response(metrics.render(gateway()), content_type=metrics.CONTENT_TYPE)


@blueprint.get("/openapi.json")
def spec() -> Response:
    """This API as an OpenAPI 3.1 document."""
    return jsonify(openapi.document())
