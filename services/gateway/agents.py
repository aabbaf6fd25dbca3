"""Rollouts that programs drive: what those elsewhere need for it, and their turns so far.

Keys are made when they are asked for, and never kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import redis
import structlog

from rollout.schema import EXTERNAL, AgentAccess, Backend, Rollout, RolloutRequest, Submitted
from rollout.trajectory import Trajectory
from services.capture.chains import build, timed
from services.settings import Settings
from services.state.capture.nodes import decode
from services.state.capture.session import MODEL, REWARD, Session, key_of
from services.state.capture.store import CaptureStore

log = structlog.get_logger("gateway")


def is_external(request: RolloutRequest) -> bool:
    """Whether a program elsewhere drives its rollouts."""
    return request.agent is not None and request.agent.harness == EXTERNAL


def so_far(client: redis.Redis, rollout: Rollout) -> Trajectory | None:
    """The turns of a rollout that is in RUN, driven by a program; None before there are any."""
    assert rollout.request.agent is not None
    store = CaptureStore(client)
    summary, stored = store.summary(rollout.id, rollout.attempt), store.nodes(rollout.id, rollout.attempt)
    if summary is None or not stored:
        return None
    try:
        nodes = decode(stored)
        chains, receipt = build(nodes, rollout.request.agent.harness, **summary.unsampled)
        session = msgspec.json.decode(summary.session, type=Session)
        backend = Backend.model_validate_json(session.backend)
        receipt.model = backend.model
    except ValueError as error:
        log.error("the turns of a program cannot be read", rollout_id=rollout.id, error=str(error))
        return None
    return Trajectory(
        chains=chains,
        receipt=receipt,
        calls=timed(nodes),
        model=backend.model,
        logprobs_mode=backend.logprobs_mode,
        tokenizer=nodes[0].tokenizer,
    )


class AgentDoor:
    """Where programs find capture, and the secret of which their keys are made, read once for a call."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._base_url = settings.capture_url.rstrip("/")
        self._secret = CaptureStore(client).secret()

    def access(self, rollout_id: str, attempt: int) -> AgentAccess:
        """Of an attempt; it is worth nothing when that has ended."""
        model, reward = (key_of(self._secret, kind, rollout_id, attempt) for kind in (MODEL, REWARD))
        return AgentAccess(base_url=self._base_url, api_key=model, reward_key=reward, attempt=attempt)

    def tell(self, requests: Iterable[RolloutRequest], submitted: Iterable[Submitted]) -> None:
        """Add it to the answer for each rollout that such a program drives; in the order of the requests."""
        asked = (request for request in requests for _ in range(request.n))
        for request, entry in zip(asked, submitted, strict=True):
            if is_external(request):
                entry.agent = self.access(entry.id, 1)
