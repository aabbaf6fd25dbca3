"""What programs elsewhere need to drive rollouts. Keys are made when they are asked for, and never kept."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from rollout.schema import EXTERNAL, AgentAccess, RolloutRequest, Submitted
from services.settings import Settings
from services.state.capture.session import MODEL, REWARD, key_of
from services.state.capture.store import CaptureStore


def is_external(request: RolloutRequest) -> bool:
    """Whether a program elsewhere drives its rollouts."""
    return request.agent is not None and request.agent.harness == EXTERNAL


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
