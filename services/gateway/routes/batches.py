"""`/v1/batches`: groups of rollouts with dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from flask import Blueprint, Response

from rollout.schema import FieldError, Rollout, new_id
from rollout.schema.batches import (
    MAX_PROMPTS_PER_CALL,
    Batch,
    BatchList,
    BatchRequest,
    Group,
    GroupPage,
    PromptsRequest,
    PromptsResponse,
)
from services.gateway.answers import Answer
from services.gateway.auth import caller
from services.gateway.context import gateway
from services.gateway.forks import requests_of
from services.gateway.http import Cursor, Limit, Tenant, Wait, operation, page_size, query
from services.gateway.problems import ApiProblem, invalid, respond
from services.gateway.waiting import Interest
from services.state.api_keys import Scope
from services.state.batches.store import BatchConflict, BatchEnded, BatchRuns, Decided, NoSuchBatch
from services.state.requests import stored_form
from services.state.results.stream import is_cursor

blueprint = Blueprint("batches", __name__, url_prefix="/v1")


@blueprint.errorhandler(NoSuchBatch)
def _absent(error: NoSuchBatch) -> Response:
    return respond(ApiProblem(404, "No such batch", str(error)).problem)


MAX_GROUPS = 100
"""Groups of one page: each is up to 1,000 rollouts."""
AHEAD = 4
"""Pages after the next one whose beginnings an answer tells; more of short ones."""
LOOKED_AT = 40
"""Groups, at least, that are looked at for that."""


def _few_prompts(body: Any) -> Any:
    """The body, or an ApiProblem where it holds more prompts than a call may; before each is made a model."""
    prompts = body.get("prompts") if isinstance(body, dict) else None
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS_PER_CALL:
        raise invalid(
            "prompts", f"{len(prompts)} in one call; at most {MAX_PROMPTS_PER_CALL}: extend the batch"
        )
    return body


@blueprint.post("/batches")
@operation(404, 409, 429, status=202, scope=Scope.SUBMIT)
def create(body: Annotated[BatchRequest, _few_prompts]) -> Batch:
    """Start a batch: groups of rollouts, of which informative ones are kept.

    With the id of one that is there, and the same body, it is that one.
    """
    gate, tenant = gateway(), caller().tenant
    try:
        prompts = requests_of(body.prompts, "prompts", body.n, wait_s=gate.settings.retention_s)
    except ApiProblem:
        # It is what it was, whatever has become since of rollouts that its prompts go on from.
        if body.id is None or not gate.batches.is_there(body.id, body, tenant.name):
            raise
        return gate.batches.get(body.id, tenant.name)
    known = gate.fleet.filters() if body.filters else []
    for position, spec in enumerate(body.filters or ()):
        if spec.name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise invalid(
                f"filters.{position}.name", f"unknown filter {spec.name!r}; the workers have: {there}"
            )
    batch_id = body.id or new_id()
    try:
        gate.batches.create(batch_id, body, tenant.name, tenant.quota_bytes, prompts)
    except BatchConflict as error:
        raise ApiProblem(409, "Id in use", str(error), [FieldError(field="id", message=str(error))]) from None
    except (NoSuchBatch, BatchRuns) as error:
        raise invalid("carry_from", str(error)) from None
    return gate.batches.get(batch_id, tenant.name)


@blueprint.get("/batches")
@operation()
def list_batches(limit: Limit, tenant: Tenant) -> BatchList:
    """List batches, the newest first."""
    store, batches = gateway().batches, []
    for batch_id in store.ids(tenant, limit):
        try:
            batches.append(store.get(batch_id, tenant))
        except NoSuchBatch:  # past its retention
            continue
    return BatchList(batches=batches)


@blueprint.get("/batches/<batch_id>")
@operation(429)
def get(batch_id: str, wait: Wait, tenant: Tenant) -> Batch:
    """One batch and its counters; with `wait`, answers when it has ended or when the wait is over."""
    gate = gateway()

    def ended() -> bool:
        return gate.batches.get(batch_id, tenant).state.ended

    if wait:
        gate.waiting.wait(ended, wait, Interest(batch_id=batch_id))
    return gate.batches.get(batch_id, tenant)


@blueprint.get("/batches/<batch_id>/groups")
@operation(429, answers={200: GroupPage}, arrays=True)
def groups(
    batch_id: str,
    cursor: Cursor,
    wait: Wait,
    limit: Annotated[int, page_size(16, MAX_GROUPS)],
    include: Annotated[
        Literal["trajectory", "summary", "verdicts"], query("What comes along.", "trajectory")
    ],
    verdict: Annotated[Literal["kept", "all"], query("Only groups that were kept, or all.", "kept")],
    tenant: Tenant,
) -> Response:
    """Groups in the order in which they were decided, since a cursor; `wait`s for one or the end."""
    gate = gateway()
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
            decided = gate.batches.groups(batch_id, cursor, count)
            last = batch.state.ended and len(decided) < count
            if not decided:
                break
            for group in decided:
                full = len(page) == limit
                if not full:
                    cursor = group.cursor
                if verdict == "all" or group.verdict == "kept":
                    (later if full else page).append(group)
        return bool(page) or batch.state.ended

    gate.waiting.wait(look, wait, Interest(batch_id=batch_id))
    if page and not batch.state.ended:
        # Its counters with these groups in them. Behind an empty page it must not have ended since: more
        # groups may have been decided until then.
        batch = gate.batches.get(batch_id, tenant)
    answer = Answer()
    return answer.send(
        GroupPage(
            groups=_groups(answer, page, include),
            cursor=cursor,
            # Each after a page that is full, and before a group.
            ahead=[group.cursor for group in later[limit - 1 : -1 : limit]],
            batch=batch,
            last=last and not later,
        )
    )


def _groups(answer: Answer, page: Sequence[Decided], include: str) -> list[Group]:
    records = gateway().batches.group_many([group.group_id for group in page])
    members: dict[str, Rollout] = {}
    if include != "verdicts":
        # All of the page at once: a round trip for each group is most of what short ones cost.
        ids = [rollout_id for record in records if record for rollout_id in record.rollout_ids]
        rollouts = answer.rollouts(ids, trajectory=include == "trajectory")
        members = {rollout.id: rollout for rollout in rollouts}
    return [
        Group(
            id=group.group_id,
            batch=record.batch,
            verdict=group.verdict,
            reason=group.reason,
            carried=record.carried,
            rollouts=[members[name] for name in record.rollout_ids if name in members],
        )
        for group, record in zip(page, records, strict=True)
        if record is not None
    ]


@blueprint.post("/batches/<batch_id>/prompts")
@operation(409, 429, scope=Scope.SUBMIT)
def extend(batch_id: str, body: Annotated[PromptsRequest, _few_prompts], tenant: Tenant) -> PromptsResponse:
    """More prompts for a batch that is not closed."""
    gate = gateway()
    batch = gate.batches.get(batch_id, tenant)
    wait_s = gate.settings.retention_s
    requests = requests_of(body.prompts, "prompts", batch.n, tenant=batch.tenant, wait_s=wait_s)
    prompts = [stored_form(request) for request in requests]
    most = gate.tenants.get(batch.tenant).quota_bytes
    try:
        waiting = gate.batches.extend(batch_id, prompts, body.closed, tenant, body.id, most)
    except BatchEnded as error:
        raise ApiProblem(409, "The batch takes no more prompts", str(error)) from None
    return PromptsResponse(waiting=waiting)


@blueprint.post("/batches/<batch_id>/pause", defaults={"action": "pause"})
@blueprint.post("/batches/<batch_id>/resume", defaults={"action": "resume"})
@blueprint.post("/batches/<batch_id>/cancel", defaults={"action": "cancel"})
@operation(scope=Scope.SUBMIT)
def control(batch_id: str, action: str, tenant: Tenant) -> Batch:
    """Pause (start no more groups), resume, or cancel a batch. Twice is harmless."""
    store = gateway().batches
    if action == "cancel":
        return store.cancel(batch_id, tenant)
    return store.pause(batch_id, action == "pause", tenant)
