"""`/v1/rollouts`: submit, get, list, cancel."""

from __future__ import annotations

from typing import Annotated

from flask import Blueprint, Response, jsonify
from flask import request as http
from pydantic import BaseModel, Field, ValidationError

from rollout.schema import (
    FieldError,
    Rollout,
    RolloutId,
    RolloutPage,
    RolloutRequest,
    State,
    SubmitRequest,
    SubmitResponse,
    Tag,
)
from rollout.schema.base import Items, Strict
from services.dispatch import IdConflict
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
from services.state.tenants import QuotaExceeded

blueprint = Blueprint("rollouts", __name__, url_prefix="/v1")

INCLUDE = ("trajectory", "summary")
MAX_PAGE = 1000
_SCAN_PAGES = 20
"""Pages of an index that one listing reads while it looks for matches."""


class CancelRequest(Strict):
    """Which rollouts to cancel: exactly one of the fields."""

    ids: Annotated[Items[RolloutId], Field(max_length=MAX_PAGE)] | None = None
    group_id: RolloutId | None = None
    tag: Tag | None = None


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status=status, content_type="application/json")


@blueprint.post("/rollouts")
@needs(Scope.SUBMIT)
def submit() -> Response:
    """Accept one request or many; all or none."""
    body = body_json()
    single = not (isinstance(body, dict) and "requests" in body)
    try:
        if single:
            requests = [RolloutRequest.model_validate(body)]
        else:
            requests = SubmitRequest.model_validate(body).requests
    except ValidationError as error:
        raise from_validation(error) from None
    gate = gateway()
    # First what the tenant may use: whether another handler exists is none of its business.
    check_permitted(requests, gate.tasks.handlers(), gate.settings, single=single)
    gate.tasks.check(requests, single=single)
    check_sizes(requests, gate.settings.max_group_bytes, single=single)
    check_webhooks(gate, requests, single=single)
    try:
        submitted = gate.dispatcher.submit(requests, caller().tenant)
    except IdConflict as error:
        wrong = set(error.ids)
        fields = [
            FieldError(
                field="id" if single else f"requests.{position}.id",
                message="this id is in use with another body or by somebody else; choose another id",
            )
            for position, item in enumerate(requests)
            if wrong & set(item.rollout_ids()[1])
        ]
        raise ApiProblem(409, "Id in use", f"{error}; nothing was enqueued", fields) from None
    except QuotaExceeded as error:
        raise over_quota(error) from None
    return _json(SubmitResponse(rollouts=submitted), 202)


def _absent(rollout_id: str) -> ApiProblem:
    detail = f"there is no rollout {rollout_id!r} that can be read; it may be past its retention"
    return ApiProblem(404, "No such rollout", detail)


@blueprint.get("/rollouts/<rollout_id>")
def get(rollout_id: str) -> Response:
    """One rollout; with `wait`, answers when it has ended or when the wait is over."""
    reject_unknown_parameters("wait", "include", "tenant")
    gate, tenant = gateway(), tenant_filter()
    wait = number("wait", 0.0, low=0.0, high=gate.settings.max_wait_s)
    include = choice("include", INCLUDE, "trajectory")

    def ended() -> bool:
        state = gate.rollouts.state(rollout_id, tenant)
        return state is None or state.terminal

    if wait:
        gate.waiting.wait(ended, wait, Interest(rollout_id=rollout_id), waiter(), holder())
    answer = Answer()
    found = answer.rollouts([rollout_id], trajectory=include == "trajectory", tenant=tenant)
    if not found:
        # Also somebody else's: a 403 would say that it exists.
        raise _absent(rollout_id)
    return answer.send(found[0])


@blueprint.get("/rollouts")
def list_rollouts() -> Response:
    """Summaries, the newest first, by any of the filters."""
    reject_unknown_parameters("state", "handler", "group_id", "tag", "limit", "cursor", "tenant")
    tenant = tenant_filter()
    limit = int(number("limit", 100, low=1, high=MAX_PAGE))
    offset = int(number("cursor", 0, low=0, high=2**53))
    state, handler = http.args.get("state"), http.args.get("handler")
    group_id, tag = http.args.get("group_id"), http.args.get("tag")
    if state is not None and state not in set(State):
        raise invalid("state", f"{state!r} is not one of {', '.join(State)}")
    store = gateway().rollouts
    found: list[Rollout] = []
    more = True
    for _ in range(_SCAN_PAGES):
        ids = store.ids(
            state=State(state) if state else None,
            group_id=group_id,
            tag=tag,
            tenant=tenant,
            offset=offset,
            limit=limit,
        )
        more = len(ids) == limit
        # Looked at one by one: the cursor must not pass what did not fit into this page.
        for item in _or_none(ids, tenant):
            if len(found) == limit:
                break
            offset += 1
            wanted = {"state": state, "handler": handler, "group_id": group_id, "tag": tag}
            if item is not None and _matches(item, **wanted):
                found.append(item)
        if len(found) == limit or not more:
            break
    more = more or len(found) == limit
    return _json(RolloutPage(rollouts=found, cursor=str(offset) if more else None))


def _or_none(ids: list[str], tenant: str | None) -> list[Rollout | None]:
    found = gateway().rollouts.get_many(ids, trajectory=False, tenant=tenant)
    by_id = {item.id: item for item in found}
    return [by_id.get(rollout_id) for rollout_id in ids]


def _matches(
    item: Rollout, *, state: str | None, handler: str | None, group_id: str | None, tag: str | None
) -> bool:
    return (
        state in (None, item.state)
        and group_id in (None, item.group_id)
        and handler in (None, item.handler)
        and (tag is None or tag in item.request.tags)
    )


@blueprint.post("/rollouts/<rollout_id>/cancel")
@needs(Scope.SUBMIT)
def cancel(rollout_id: str) -> Response:
    """Cancel one rollout. Twice, or after the end, is harmless and says so."""
    word, state = gateway().dispatcher.cancel(rollout_id, tenant_filter())
    if word == "gone":
        raise _absent(rollout_id)
    return jsonify(id=rollout_id, state=state, cancelling=word == "cancelling", already_ended=word == "ended")


@blueprint.post("/rollouts/cancel")
@needs(Scope.SUBMIT)
def cancel_many() -> Response:
    """Cancel by ids, group or tag."""
    try:
        wanted = CancelRequest.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None
    if len(wanted.model_fields_set) != 1:
        raise invalid("(body)", "give exactly one of ids, group_id, tag")
    gate = gateway()
    ids, tenant = wanted.ids, tenant_filter(every=wanted.ids is not None)
    if ids is None:
        ids = gate.rollouts.ids(group_id=wanted.group_id, tag=wanted.tag, tenant=tenant, limit=10**9)
    words = [word for word, _ in gate.dispatcher.cancel_many(ids, tenant)]
    return jsonify(
        cancelled=sum(word in ("cancelled", "cancelling") for word in words),
        already_ended=words.count("ended"),
        unknown=words.count("gone"),
    )
