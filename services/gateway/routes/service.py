"""`/`, `/v1/handlers`, `/v1/tokenizers`, `/v1/status`, `/health`, `/ready`, `/metrics`, `/openapi.json`."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis
import structlog
from flask import Blueprint, Response, current_app, jsonify, request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

import rollout
from rollout.schema import HandlerInfo
from services import flower
from services.gateway import metrics, openapi
from services.gateway.auth import caller
from services.gateway.context import gateway
from services.gateway.http import JSON, OBJECT, STRING, operation
from services.gateway.page import serving
from services.queues import STAGES
from services.state import keys
from services.state.api_keys import SHARED, Scope
from services.state.rollouts import payloads
from services.state.startup import UnfitRedis

log = structlog.get_logger("gateway")
blueprint = Blueprint("service", __name__)
PLACES = {
    "docs": "/openapi.json (and docs/ of the source)",
    "ready": "/ready",
    "metrics": "/metrics",
    "details": "/v1/status",
    "flower": "/v1/status (flower.url)",
}
"""Where `/` points to. It is open to all and names no address."""


class HandlerList(BaseModel):
    """Handlers that the caller may use."""

    handlers: list[HandlerInfo]


@blueprint.get("/v1/handlers")
@operation()
def handlers() -> HandlerList:
    """Handlers that workers have announced and the caller may use, with the schema of their tasks."""
    known = gateway().tasks.handlers(fresh=True).values()
    may_use = caller().tenant.may_use
    return HandlerList(handlers=[info for info in known if may_use("handlers", info.name)])


@blueprint.get("/v1/tokenizers/<digest>")
@operation()
def texts(digest: str) -> Response:
    """Texts of token ids, for the tokenizer with whose digest `Trajectory.tokenizer` ends; null = no worker
    has written them, and ids mean the same without."""
    packed = payloads.get(gateway().redis, keys.vocabulary(digest))
    if packed is None:
        return jsonify(texts=None)
    takes = request.accept_encodings.quality("gzip") > 0
    response = Response(packed if takes else gzip.decompress(packed), content_type=JSON)
    if takes:
        response.headers["Content-Encoding"] = "gzip"
    response.vary.add("Accept-Encoding")
    response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    return response


@blueprint.get("/v1/status")
@operation(scope=SHARED)
def status() -> dict[str, Any]:
    """Who asks and what they may have; of all tenants, rollouts, queues, workers, nodes, backends."""
    gate, me = gateway(), caller()
    url = gate.settings.flower_url
    return {
        "version": rollout.__version__,
        "tenant": {**me.tenant.model_dump(), "live": gate.tenants.live(me.tenant.name)},
        "states": gate.rollouts.counts(),
        "queues": metrics.queue_depths(gate),
        "workers": gate.fleet.alive(),
        "nodes": {node: asdict(admission) for node, admission in gate.fleet.admissions().items()},
        "backends": [backend.model_dump() for backend in gate.backends.list()],
        # Where Flower is, and its page of one rollout's tasks.
        "flower": {"url": url, "rollout": flower.tasks_link(url)} if url else None,
        "compat": compat.to_json() if (compat := current_app.extensions.get("rollout.compat")) else None,
        "parts": _parts(gate.settings.stack_record),
    }


def _parts(record: str) -> dict[str, dict[str, Any]] | None:
    """The restarts of each part of a stack of `rollout up`, and whether it is away; None = there is no such
    stack, or its record cannot be read just now."""
    if not record:
        return None
    try:
        stack = json.loads(Path(record).read_text())
        return {
            part["name"]: {key: part[key] for key in ("restarts", "away", "ended_at")}
            for part in stack["parts"]
        }
    except (OSError, ValueError, TypeError, KeyError):
        return None


@blueprint.get("/")
@operation(scope=None)
def index() -> Response:
    """What this is, and where to go on, or the web page for a browser; 200 while the process lives."""
    if serving.wanted():
        response = serving.send(serving.INDEX)
    else:
        served = {rule.rule for rule in current_app.url_map.iter_rules()}
        places = {name: path for name, path in PLACES.items() if path.split()[0] in served}
        response = jsonify(service="rollout", version=rollout.__version__, status="ok", **places)
    response.vary.add("Accept")
    return response


@blueprint.get("/health")
@operation(scope=None)
def health() -> dict[str, Any]:
    """200 while the process lives."""
    return {"status": "ok"}


@blueprint.get("/ready")
@operation(answers={200: OBJECT, 503: OBJECT}, scope=None)
def ready() -> tuple[dict[str, Any], int]:
    """200 when rollouts can be worked on; else 503 with what is missing."""
    missing = []
    try:
        gateway().start.require()
        alive = gateway().fleet.alive()
        missing = [f"no live worker of the {stage} fleet" for stage in STAGES if not alive[stage]]
    except redis.RedisError as error:
        # Whoever asks may be nobody of ours: addresses are for the log.
        log.warning("not ready: Redis does not answer", error=str(error))
        missing = ["Redis does not answer; the gateway's log says more"]
    except UnfitRedis as error:
        missing = [str(error)]
    return {"ready": not missing, "missing": missing}, 503 if missing else 200


@blueprint.get("/metrics")
@operation(answers={200: STRING}, media="text/plain", scope=Scope.METRICS)
def prometheus() -> Response:
    """Metrics in the Prometheus text format."""
    return Response(metrics.render(gateway()), content_type=CONTENT_TYPE_LATEST)


@blueprint.get("/openapi.json")
@operation(scope=None)
def spec() -> dict[str, Any]:
    """This API as an OpenAPI 3.1 document."""
    return openapi.document(current_app)
