"""Errors as problem documents (RFC 9457): what is wrong, in which field, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import islice

import redis
import structlog
from flask import Flask, Response, request
from kombu.exceptions import OperationalError
from pydantic import ValidationError
from werkzeug.exceptions import HTTPException

from rollout.schema import FieldError, Problem
from services.state.requests import Unstorable
from services.state.startup import UnfitRedis
from services.state.tenants import QuotaExceeded

log = structlog.get_logger("gateway")

MAX_ERRORS = 20
"""Field errors listed in one answer; the first ones say enough."""
MAX_FIELD, MAX_MESSAGE, MAX_DETAIL = 200, 500, 1000
"""Characters of an error: a message may hold the value at fault, and that may be 5 MB."""
RETRY_AFTER_S = 2
MODEL_PATH = re.compile(
    r"(/v1)?/((chat/)?completions|complete|embeddings|models|messages(/count_tokens)?|moderations|responses)"
)
"""What the SDKs of OpenAI and Anthropic call."""
MODEL_HINT = (
    "This is the gateway of a rollout service and serves no models itself: GET /v1/backends lists the LLM "
    "servers, whose URLs are what such a client needs; POST /v1/rollouts has a task worked on."
)
FULL_RETRY_AFTER_S = 10
"""Room comes as results are read and acknowledged, or past their retention."""
_LATER = {"Retry-After": str(RETRY_AFTER_S)}


class ApiProblem(Exception):
    """An answer other than the one asked for. Without a detail of its own it has that of its first error."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str = "",
        errors: Iterable[FieldError] = (),
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        first = [*islice(errors, MAX_ERRORS)]
        shown = [
            FieldError(field=short(error.field, MAX_FIELD), message=short(error.message, MAX_MESSAGE))
            for error in first
        ]
        if first and not detail:
            detail = f"{first[0].field}: {first[0].message}"
        detail = short(detail, MAX_DETAIL)
        self.problem = Problem(title=title, status=status, detail=detail, errors=shown)
        super().__init__(f"{status} {title}: {detail}")
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)


def short(text: str, most: int) -> str:
    """A text in so many characters, the middle of a longer one left out, and one that UTF-8 can hold."""
    if len(text) > most:
        part = (most - 3) // 2
        text = f"{text[:part]} … {text[-part:]}"
    return text.encode(errors="backslashreplace").decode()


def invalid(field: str, message: str) -> ApiProblem:
    """A 400 that names one field."""
    return ApiProblem(400, "Invalid request", errors=[FieldError(field=field, message=message)])


def absent(rollout_id: str) -> ApiProblem:
    """The refusal of a rollout that is not there, or not the tenant's."""
    detail = f"there is no rollout {rollout_id!r} that can be read; it may be past its retention"
    return ApiProblem(404, "No such rollout", detail)


def refuse(errors: Iterable[FieldError], status: int = 400, title: str = "Invalid request") -> None:
    """Raise a problem that names the fields, if there are any; as many are looked for as are shown."""
    if shown := list(islice(errors, MAX_ERRORS)):
        raise ApiProblem(status, title, errors=shown)


def over_quota(error: QuotaExceeded) -> ApiProblem:
    """A 429 that says when to come again, or a 403 where waiting does not help."""
    detail = f"{error}; nothing was enqueued"
    if error.wait_s is None:
        return ApiProblem(403, "Larger than the quota", detail)
    return ApiProblem(429, "Over quota", detail, retry_after_s=max(1, math.ceil(error.wait_s)))


def from_validation(error: ValidationError, prefix: str = "") -> ApiProblem:
    """A 400 that names the fields a pydantic model refused."""
    errors = [
        FieldError(
            field=prefix + ".".join(str(part) for part in item["loc"]) or "(body)",
            message=item["msg"].removeprefix("Value error, "),
        )
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    return ApiProblem(400, "Invalid request", errors=errors)


def respond(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """A problem document as an answer."""
    return Response(
        problem.model_dump_json(),
        status=problem.status,
        headers=headers,
        content_type="application/problem+json",
    )


def register(app: Flask) -> None:
    """Make every error of the app a problem document."""

    @app.errorhandler(ApiProblem)
    def _known(error: ApiProblem) -> Response:
        return respond(error.problem, error.headers)

    @app.errorhandler(QuotaExceeded)
    def _over_quota(error: QuotaExceeded) -> Response:
        return _known(over_quota(error))

    @app.errorhandler(Unstorable)
    def _unstorable(error: Unstorable) -> Response:
        return respond(invalid("(body)", str(error)).problem)

    @app.errorhandler(HTTPException)
    def _http(error: HTTPException) -> Response:
        status = error.code or 500
        detail = error.description or ""
        if status in (404, 405) and MODEL_PATH.fullmatch(request.path):
            detail = f"{detail} {MODEL_HINT}"
        if status == 413:
            detail = f"the body is larger than {app.config['MAX_CONTENT_LENGTH']} bytes; send several calls"
        return respond(Problem(title=error.name, status=status, detail=detail))

    @app.errorhandler(UnfitRedis)
    def _unfit(error: Exception) -> Response:
        log.critical("this Redis must not be used", error=str(error))
        return respond(Problem(title="Service unavailable", status=503, detail=str(error)), _LATER)

    @app.errorhandler(redis.RedisError)
    @app.errorhandler(OperationalError)
    def _redis(error: Exception) -> Response:
        log.error("Redis does not answer", path=request.path, error=str(error))
        detail = "Redis does not answer; nothing is lost, try again"
        return respond(Problem(title="Service unavailable", status=503, detail=detail), _LATER)

    @app.errorhandler(redis.OutOfMemoryError)
    def _full(error: redis.OutOfMemoryError) -> Response:
        log.error("Redis is full", path=request.path, error=str(error))
        problem = Problem(title="No room for new work", status=503, detail=str(error))
        return respond(problem, {"Retry-After": str(FULL_RETRY_AFTER_S)})

    @app.errorhandler(Exception)
    def _unknown(error: Exception) -> Response:
        log.exception("request failed", method=request.method, path=request.path)
        detail = f"{type(error).__name__}; the gateway's log has the traceback"
        return respond(Problem(title="Internal error", status=500, detail=detail))
