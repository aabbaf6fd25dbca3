"""`/v1/batches`: groups of rollouts with dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flask import Blueprint, Response
from flask import request as http
from pydantic import BaseModel, ValidationError

from rollout.batch import (
    MAX_PROMPTS_PER_CALL,
    Batch,
    BatchList,
    BatchRequest,
    Group,
    GroupPage,
    PromptsRequest,
    PromptsResponse,
)
from rollout.schema import FieldError, Rollout, RolloutRequest, new_id
from services.gateway.answers import Answer
from services.gateway.auth import caller, check_permitted, holder, needs, tenant_filter
from services.gateway.bodies import body_json
from services.gateway.context import (
    choice,
    gateway,
    number,
    reject_unknown_parameters,
    waiter,
)
from services.gateway.problems import ApiProblem, from_validation, invalid, over_quota
from services.gateway.routes.webhooks import check_webhooks
from services.gateway.tasks import check_sizes
from services.gateway.waiting import Interest
from services.state.api_keys import Scope
from services.state.batches import BatchConflict, BatchEnded, BatchRuns, Decided, NoSuchBatch
from services.state.requests import stored_form
from services.state.results import is_cursor
from services.state.tenants import QuotaExceeded

blueprint = Blueprint("batches", __name__, url_prefix="/v1")

INCLUDE = ("trajectory", "summary", "verdicts")
MAX_GROUPS = 100
"""Groups of one page: each is up to 1,000 rollouts."""
AHEAD = 4
"""Pages after the next one whose beginnings an answer tells; more of short ones."""
LOOKED_AT = 40
"""Groups, at least, that are looked at for that."""


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status=status, content_type="application/json")


def _absent(error: NoSuchBatch) -> ApiProblem:
    return ApiProblem(404, "No such batch", str(error))


def _few_prompts(body: Any) -> Any:
    """The body, unless it holds more prompts than a call may; before each is made a model.

    Raises:
        ApiProblem: It does.
    """
    prompts = body.get("prompts") if isinstance(body, dict) else None
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS_PER_CALL:
        raise invalid(
            "prompts", f"{len(prompts)} in one call; at most {MAX_PROMPTS_PER_CALL}: extend the batch"
        )
    return body


def _check(prompts: Sequence[RolloutRequest], n: int) -> None:
    """Refuse prompts that could not be submitted one by one.

    Raises:
        ApiProblem: Naming the fields.
    """
    gate = gateway()
    try:
        check_permitted(prompts, gate.tasks.handlers(), gate.settings, single=False)
        gate.tasks.check(prompts, single=False)
        check_sizes(prompts, gate.settings.max_group_bytes, single=False, n=n)
        check_webhooks(gate, prompts, single=False)
    except ApiProblem as problem:
        # They speak of requests; here these are called prompts.
        body = problem.problem
        errors = [
            FieldError(field=error.field.replace("requests.", "prompts.", 1), message=error.message)
            for error in body.errors
        ]
        detail = f"{errors[0].field}: {errors[0].message}" if errors else body.detail
        raise ApiProblem(body.status, body.title, detail, errors, headers=problem.headers) from None


@blueprint.post("/batches")
@needs(Scope.SUBMIT)
def create() -> Response:
    """Start a batch. With the id of one that is there, and the same body, it is that one."""
    reject_unknown_parameters()
    try:
        wanted = BatchRequest.model_validate(_few_prompts(body_json()))
    except ValidationError as error:
        raise from_validation(error) from None
    _check(wanted.prompts, wanted.n)
    gate, tenant = gateway(), caller().tenant
    known = gate.fleet.filters() if wanted.filters else []
    for position, spec in enumerate(wanted.filters or ()):
        if spec.name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise invalid(
                f"filters.{position}.name", f"unknown filter {spec.name!r}; the workers have: {there}"
            )
    batch_id = wanted.id or new_id()
    try:
        gate.batches.create(batch_id, wanted, tenant.name, tenant.quota_bytes)
    except BatchConflict as error:
        raise ApiProblem(409, "Id in use", str(error), [FieldError(field="id", message=str(error))]) from None
    except (NoSuchBatch, BatchRuns) as error:
        raise invalid("carry_from", str(error)) from None
    except QuotaExceeded as error:
        raise over_quota(error) from None
    return _json(gate.batches.get(batch_id, tenant.name), 202)


@blueprint.get("/batches")
def list_batches() -> Response:
    """The newest first."""
    reject_unknown_parameters("limit", "tenant")
    gate, tenant = gateway(), tenant_filter()
    limit = int(number("limit", 100, low=1, high=1000))
    found = []
    for batch_id in gate.batches.ids(tenant, limit):
        try:
            found.append(gate.batches.get(batch_id, tenant))
        except NoSuchBatch:  # past its retention
            continue
    return _json(BatchList(batches=found))


def _get(batch_id: str, tenant: str | None) -> Batch:
    try:
        return gateway().batches.get(batch_id, tenant)
    except NoSuchBatch as error:
        raise _absent(error) from None


@blueprint.get("/batches/<batch_id>")
def get(batch_id: str) -> Response:
    """One batch; with `wait`, answers when it has ended or when the wait is over."""
    reject_unknown_parameters("wait", "tenant")
    gate, tenant = gateway(), tenant_filter()
    wait = number("wait", 0.0, low=0.0, high=gate.settings.max_wait_s)
    if wait:
        ended = lambda: _get(batch_id, tenant).state.ended  # noqa: E731 (looked at again and again)
        gate.waiting.wait(ended, wait, Interest(batch_id=batch_id), waiter(), holder())
    return _json(_get(batch_id, tenant))


@blueprint.get("/batches/<batch_id>/groups")
def groups(batch_id: str) -> Response:
    """Groups in the order in which they were decided, since a cursor; `wait`s for one or the end."""
    reject_unknown_parameters("cursor", "wait", "limit", "include", "tenant", "verdict")
    gate, tenant = gateway(), tenant_filter()
    wait = number("wait", 0.0, low=0.0, high=gate.settings.max_wait_s)
    limit = int(number("limit", 16, low=1, high=MAX_GROUPS))
    include = choice("include", INCLUDE, "trajectory")
    verdict = choice("verdict", ("kept", "all"), "kept")
    cursor = http.args.get("cursor", "0")
    if not is_cursor(cursor):
        raise invalid("cursor", f"{cursor!r} is no cursor; use one from an earlier answer, or '0'")
    page: list[Decided] = []
    later: list[Decided] = []
    batch: Batch | None = None
    last = False
    count = max(limit * (1 + AHEAD), LOOKED_AT)

    def look() -> bool:
        nonlocal batch, cursor, last
        # It first: what is decided until it has ended is then in what is read after it.
        batch = gate.batches.get(batch_id, tenant)
        while len(page) < limit:
            # What comes after the page tells where those ahead begin.
            found = gate.batches.groups(batch_id, cursor, count)
            last = batch.state.ended and len(found) < count
            if not found:
                break
            for one in found:
                full = len(page) == limit
                if not full:
                    cursor = one.cursor
                if verdict == "all" or one.verdict == "kept":
                    (later if full else page).append(one)
        return bool(page) or batch.state.ended

    try:
        gate.waiting.wait(look, wait, Interest(batch_id=batch_id), waiter(), holder())
    except NoSuchBatch as error:
        raise _absent(error) from None
    if page and not batch.state.ended:
        # Its counters with these groups in them. Behind an empty page it must not have ended since: more
        # groups may have been decided until then.
        batch = _get(batch_id, tenant)
    answer = Answer()
    found = GroupPage(
        groups=_groups(answer, page, include),
        cursor=cursor,
        # Each after a page that is full, and before a group.
        ahead=[one.cursor for one in later[limit - 1 : -1 : limit]],
        batch=batch,
        last=last and not later,
    )
    return answer.send(found)


def _groups(answer: Answer, page: Sequence[Decided], include: str) -> list[Group]:
    gate = gateway()
    records = list(zip(page, gate.batches.group_many([one.group_id for one in page]), strict=True))
    members: dict[str, Rollout] = {}
    if include != "verdicts":
        # All of the page at once: a round trip for each group is most of what short ones cost.
        ids = [rollout_id for _, record in records if record for rollout_id in record.rollout_ids]
        found = answer.rollouts(ids, trajectory=include == "trajectory")
        members = {rollout.id: rollout for rollout in found}
    return [
        Group(
            id=one.group_id,
            batch=record.batch,
            verdict=one.verdict,
            reason=one.reason,
            carried=record.carried,
            rollouts=[members[name] for name in record.rollout_ids if name in members],
        )
        for one, record in records
        if record is not None
    ]


@blueprint.post("/batches/<batch_id>/prompts")
@needs(Scope.SUBMIT)
def extend(batch_id: str) -> Response:
    """More prompts for a batch that is not closed."""
    reject_unknown_parameters("tenant")
    try:
        wanted = PromptsRequest.model_validate(_few_prompts(body_json()))
    except ValidationError as error:
        raise from_validation(error) from None
    gate, tenant = gateway(), tenant_filter()
    batch = _get(batch_id, tenant)
    _check(wanted.prompts, batch.n)
    prompts = [stored_form(prompt) for prompt in wanted.prompts]
    most = gate.tenants.get(batch.tenant).quota_bytes
    try:
        waiting = gate.batches.extend(batch_id, prompts, wanted.closed, tenant, wanted.id, most)
    except QuotaExceeded as error:
        raise over_quota(error) from None
    except NoSuchBatch as error:
        raise _absent(error) from None
    except BatchEnded as error:
        raise ApiProblem(409, "The batch takes no more prompts", str(error)) from None
    return _json(PromptsResponse(waiting=waiting))


@blueprint.post("/batches/<batch_id>/pause", defaults={"action": "pause"})
@blueprint.post("/batches/<batch_id>/resume", defaults={"action": "resume"})
@blueprint.post("/batches/<batch_id>/cancel", defaults={"action": "cancel"})
@needs(Scope.SUBMIT)
def control(batch_id: str, action: str) -> Response:
    """Pause (start no more groups), resume, or cancel. Twice is harmless."""
    reject_unknown_parameters("tenant")
    store, tenant = gateway().batches, tenant_filter()
    try:
        if action == "cancel":
            return _json(store.cancel(batch_id, tenant))
        return _json(store.pause(batch_id, action == "pause", tenant))
    except NoSuchBatch as error:
        raise _absent(error) from None
