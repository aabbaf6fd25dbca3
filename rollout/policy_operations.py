"""What the client can do with the policy, one generator each (see `rollout.calls`)."""

from __future__ import annotations

import time
from urllib.parse import quote

from rollout.calls import Call, Operation, Sleep, fetch
from rollout.policy import PolicyRequest, PolicyStatus, PolicyUpdate

LONG_POLL_S = 30.0
"""Seconds of one long-poll; the gateway allows up to 60 by default."""


def policy(retry_for: float) -> Operation[PolicyStatus]:
    return fetch(Call("GET", "/v1/policy"), PolicyStatus, retry_for)


def policy_update(update_id: str, wait: float, retry_for: float) -> Operation[PolicyUpdate]:
    call = Call("GET", f"/v1/policy/updates/{quote(update_id, safe='')}", {"wait": round(wait, 3)}, wait=wait)
    return fetch(call, PolicyUpdate, retry_for)


def update_policy(request: PolicyRequest, wait: float, retry_for: float) -> Operation[PolicyUpdate]:
    end = time.monotonic() + wait
    first = min(wait, LONG_POLL_S)
    body = request.model_copy(update={"wait": round(first, 3)}).model_dump_json(exclude_none=True).encode()
    update = yield from fetch(Call("POST", "/v1/policy", body=body, wait=first), PolicyUpdate, retry_for)
    while not update.state.ended and time.monotonic() < end:
        asked = time.monotonic()
        update = yield from policy_update(update.id, min(LONG_POLL_S, max(0.0, end - asked)), retry_for)
        if time.monotonic() - asked < 0.05:  # something before the gateway does not hold long-polls
            yield Sleep(0.2)
    return update
