"""`/v1/tokenizers/<digest>`: what each token id stands for."""

from __future__ import annotations

import gzip

import redis
from flask import Blueprint, Response, request

from services.gateway.context import gateway
from services.gateway.http import JSON, operation
from services.gateway.problems import ApiProblem
from services.state import keys
from services.state.rollouts import payloads

blueprint = Blueprint("tokenizers", __name__, url_prefix="/v1")


def stored_texts(client: redis.Redis, digest: str) -> bytes | None:
    """The texts of a tokenizer's ids as a worker wrote them: JSON packed by gzip; None = there are none."""
    return payloads.get(client, keys.vocabulary(digest))


@blueprint.get("/tokenizers/<digest>")
@operation()
def texts(digest: str) -> Response:
    """Texts of token ids, for the tokenizer with whose digest `Trajectory.tokenizer` ends."""
    body = stored_texts(gateway().redis, digest)
    if body is None:
        detail = (
            f"the texts of tokenizer {digest!r} are not here: a RUN worker writes them when it loads the "
            "tokenizer, and ids mean the same without"
        )
        raise ApiProblem(404, "No such tokenizer", detail)
    packed = request.accept_encodings.quality("gzip") > 0
    response = Response(body if packed else gzip.decompress(body), content_type=JSON)
    if packed:
        response.headers["Content-Encoding"] = "gzip"
    response.vary.add("Accept-Encoding")
    response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    return response
