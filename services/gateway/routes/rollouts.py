"""`/v1/rollouts` and `/v1/completions`: submit, get, list, cancel, and what ended since a cursor."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify
from flask import request as http
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.schema import (
    CompletionPage,
    FieldError,
    Rollout,
    RolloutPage,
    RolloutRequest,
    State,
    SubmitRequest,
    SubmitResponse,
)
from services.dispatch import IdConflict
from services.gateway.context import (
    body_json,
    choice,
    gateway,
    number,
    reject_unknown_parameters,
)
from services.gateway.problems import ApiProblem, from_validation, invalid
from services.state.results import CURSOR

blueprint = Blueprint("rollouts", __name__, url_prefix="/v1")

INCLUDE = ("trajectory", "summary")
MAX_PAGE = 1000
_SCAN_PAGES = 20
"""Pages of an index that one listing reads while it looks for matches."""


class CancelRequest(BaseModel):
    """Which rollouts to cancel: exactly one of the fields."""

    model_config = ConfigDict(extra="forbid")
    ids: list[str] | None = Field(default=None, max_length=MAX_PAGE)
    group_id: str | None = None
    tag: str | None = None


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status=status, content_type="application/json")


@blueprint.post("/rollouts")
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
    gate.tasks.check(requests, single=single)
    try:
        submitted = gate.dispatcher.submit(requests)
    except IdConflict as error:
        wrong = set(error.ids)
        fields = [
            FieldError(
                field="id" if single else f"requests.{position}.id",
                message="this id is in use with another body; choose another id",
            )
            for position, item in enumerate(requests)
            if wrong & set(item.rollout_ids()[1])
        ]
        raise ApiProblem(409, "Id in use", f"{error}; nothing was enqueued", fields) from None
    return _json(SubmitResponse(rollouts=submitted), 202)


def _get(rollout_id: str, *, trajectory: bool) -> Rollout:
    found = gateway().rollouts.get(rollout_id, trajectory=trajectory)
    if found is None:
        raise ApiProblem(
            404, "No such rollout", f"there is no rollout {rollout_id!r}; it may be past its retention"
        )
    return found


@blueprint.get("/rollouts/<rollout_id>")
def get(rollout_id: str) -> Response:
    """One rollout; with `wait`, answers when it has ended or when the wait is over."""
    reject_unknown_parameters("wait", "include")
    gate = gateway()
    wait = number("wait", 0.0, low=0.0, high=gate.settings.max_wait_s)
    include = choice("include", INCLUDE, "trajectory")

    def ended() -> bool:
        state = gate.rollouts.state(rollout_id)
        return state is None or state.terminal

    if wait:
        gate.watcher.wait_for(ended, wait)
    return _json(_get(rollout_id, trajectory=include == "trajectory"))


@blueprint.get("/rollouts")
def list_rollouts() -> Response:
    """Summaries, the newest first, by any of the filters."""
    reject_unknown_parameters("state", "handler", "group_id", "tag", "limit", "cursor")
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
            state=State(state) if state else None, group_id=group_id, tag=tag, offset=offset, limit=limit
        )
        more = len(ids) == limit
        # Looked at one by one: the cursor must not pass what did not fit into this page.
        for item in _or_none(ids):
            if len(found) == limit:
                break
            offset += 1
            if item is not None and _matches(item, state=state, handler=handler, tag=tag):
                found.append(item)
        if len(found) == limit or not more:
            break
    more = more or len(found) == limit
    return _json(RolloutPage(rollouts=found, cursor=str(offset) if more else None))


def _or_none(ids: list[str]) -> list[Rollout | None]:
    by_id = {item.id: item for item in gateway().rollouts.get_many(ids, trajectory=False)}
    return [by_id.get(rollout_id) for rollout_id in ids]


def _matches(item: Rollout, *, state: str | None, handler: str | None, tag: str | None) -> bool:
    return (
        state in (None, item.state)
        and handler in (None, item.handler)
        and (tag is None or tag in item.request.tags)
    )


@blueprint.post("/rollouts/<rollout_id>/cancel")
def cancel(rollout_id: str) -> Response:
    """Cancel one rollout. Twice, or after the end, is harmless and says so."""
    word, state = gateway().dispatcher.cancel(rollout_id)
    if word == "gone":
        _get(rollout_id, trajectory=False)
    return jsonify(id=rollout_id, state=state, cancelling=word == "cancelling", already_ended=word == "ended")


@blueprint.post("/rollouts/cancel")
def cancel_many() -> Response:
    """Cancel by ids, group or tag."""
    try:
        wanted = CancelRequest.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None
    if len(wanted.model_fields_set) != 1:
        raise invalid("(body)", "give exactly one of ids, group_id, tag")
    gate = gateway()
    ids = wanted.ids
    if ids is None:
        ids = gate.rollouts.ids(group_id=wanted.group_id, tag=wanted.tag, limit=10**9)
    words = [gate.dispatcher.cancel(rollout_id)[0] for rollout_id in ids]
    return jsonify(
        cancelled=sum(word in ("cancelled", "cancelling") for word in words),
        already_ended=words.count("ended"),
        unknown=words.count("gone"),
    )


@blueprint.get("/completions")
def completions() -> Response:
    """Rollouts in the order in which they ended, since a cursor; with `wait`, at least one."""
    reject_unknown_parameters("cursor", "wait", "limit", "tag", "include")
    gate = gateway()
    wait = number("wait", 0.0, low=0.0, high=gate.settings.max_wait_s)
    limit = int(number("limit", 100, low=1, high=MAX_PAGE))
    include = choice("include", INCLUDE, "trajectory")
    tag = http.args.get("tag")
    cursor = http.args.get("cursor", "0")
    if cursor == "$":
        cursor = gate.completions.tail()
    if not CURSOR.fullmatch(cursor):
        raise invalid("cursor", f"{cursor!r} is no cursor; use one from an earlier answer, '0' or '$'")
    page: tuple[list[str], str] = ([], cursor)

    def look() -> bool:
        nonlocal page
        page = gate.completions.since(page[1], limit=limit, tag=tag)
        return bool(page[0])

    gate.watcher.wait_for(look, wait)
    rollouts = list(gate.rollouts.get_many(page[0], trajectory=include == "trajectory"))
    return _json(CompletionPage(rollouts=rollouts, cursor=page[1]))
