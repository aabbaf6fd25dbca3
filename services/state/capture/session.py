"""What a session is: who may call the model for which attempt of a rollout, how it is sampled, until when."""

from __future__ import annotations

import hashlib
import hmac

from msgspec import Struct

MODEL, REWARD = "model", "reward"
"""What a key is for."""
_MARK = {MODEL: "rlm", REWARD: "rlw"}
_KIND = {mark: kind for kind, mark in _MARK.items()}


class Session(Struct):
    """What RUN says of an attempt when it opens it to calls; kept as JSON."""

    harness: str
    backend: str
    """The one that RUN was placed on (JSON): others are held to its tokenizer and its context."""
    index: int
    """Position within the group, of which each rollout has seeds of its own."""
    policy_version: str | None = None
    sampling: str = "{}"
    """The request's `SamplingParams` (JSON)."""
    backend_wait_s: float = 120.0
    call_timeout_s: float = 300.0
    most_calls: int = 1000
    most_sampled: int | None = None
    """Ids over all calls."""
    ends_in_s: float = 1800.0
    """From the opening: after it calls are answered without the model."""
    rewarded: bool = False
    """Whether the program may post a reward."""


def key_of(secret: str, kind: str, rollout_id: str, attempt: int) -> str:
    """The key of an attempt: nothing of it is stored, and it is worth nothing when the attempt has ended."""
    text = f"{_MARK[kind]}-{attempt}-{rollout_id}"
    return f"{text}-{hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()}"


def read_key(secret: str, key: str) -> tuple[str, str, int] | None:
    """Kind, rollout id and attempt of a key; None: it is not one of ours."""
    text, _, _ = key.rpartition("-")
    mark, _, rest = text.partition("-")
    attempt, _, rollout_id = rest.partition("-")
    kind = _KIND.get(mark)
    # Headers that are no UTF-8 come with half characters in them, which cannot be encoded.
    if kind is None or not (key.isascii() and attempt.isdigit()) or len(attempt) > 9:
        return None
    genuine = key_of(secret, kind, rollout_id, int(attempt))
    return (kind, rollout_id, int(attempt)) if hmac.compare_digest(genuine.encode(), key.encode()) else None
