"""Which policies there are, for what names one: kept for a moment, for each submission asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from rollout.schema import DEFAULT_POLICY, FieldError, RolloutRequest
from services.state.backends.store import BackendStore
from services.state.policy.store import PolicyStore

CACHE_S = 1.0
"""Seconds for which they are not read again."""


class PolicyChecker:
    """Refuses policies that do not exist, and those of which nothing could be trained."""

    def __init__(self, policies: PolicyStore, backends: BackendStore) -> None:
        self._policies = policies
        self._backends = backends
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._known: dict[str, bool] = {}
        """Name → whether only servers without token ids serve it."""

    def unfit(self, named: Sequence[tuple[str, RolloutRequest]]) -> Iterator[FieldError]:
        """What is wrong with the policies of requests. `default` may have backends later, as ever."""
        named = [(prefix, request) for prefix, request in named if request.policy != DEFAULT_POLICY]
        if not named:
            return
        known = self._names()
        if any(known.get(request.policy, True) for _, request in named):
            # It may have been registered a moment ago.
            known = self._names(fresh=True)
        for prefix, request in named:
            message = f"unknown policy {request.policy!r}; there are: {', '.join(sorted(known))}"
            if text_only := known.get(request.policy):
                message = f"policy {request.policy!r} is served as text alone: nothing could be trained on it"
            if text_only is not False:
                yield FieldError(field=f"{prefix}policy", message=message)

    def _names(self, *, fresh: bool = False) -> dict[str, bool]:
        with self._lock:
            if fresh or time.monotonic() - self._read_at > CACHE_S:
                names, backends = self._policies.names(), self._backends.list()
                apis = {name: {b.api for b in backends if name in b.served} for name in names}
                self._known = {name: its == {"chat"} for name, its in apis.items()}
                self._read_at = time.monotonic()
            return self._known
