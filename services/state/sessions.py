"""Sessions of the web page: what a browser has in place of an API key, for some hours.

A session has two random texts: the token in a cookie, and the proof that the page keeps. Cookies know no
ports, and whoever listens on another port of the host may be sent one: neither counts alone. Redis holds the
SHA-256 of both and never the texts, as of keys.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time

import redis
from pydantic import BaseModel, ConfigDict

from services.state import keys
from services.state.api_keys import ApiKey

LIFETIME_S = 12 * 3600
MOST = 1000
"""Sessions of a key; the oldest gives way to one more."""


class Session(BaseModel):
    """What is kept of a session. What it may do is what its key may."""

    model_config = ConfigDict(frozen=True)

    digest: str
    """SHA-256 of its token, in hex."""
    proof: str
    """SHA-256 of its proof, in hex."""
    key_id: str
    expires_at: float
    """Seconds since the epoch."""


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


class SessionStore:
    """The sessions, in Redis, which forgets each when it is over."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def create(self, key: ApiKey) -> tuple[Session, str, str]:
        """Begin a session for a key. Returns it with its token and its proof, which are nowhere kept."""
        token, proof = secrets.token_hex(32), secrets.token_hex(32)
        ends = min(time.time() + LIFETIME_S, key.expires_at or float("inf"))
        session = Session(digest=digest_of(token), proof=digest_of(proof), key_id=key.id, expires_at=ends)
        name, own = keys.session(session.digest), keys.sessions_of(key.id)
        with self._redis.pipeline() as pipe:
            pipe.set(name, session.model_dump_json(), ex=max(1, int(ends - time.time())))
            pipe.lpush(own, session.digest)
            pipe.expire(own, LIFETIME_S)
            pipe.lrange(own, MOST, -1)
            pipe.ltrim(own, 0, MOST - 1)
            oldest = pipe.execute()[3]
        if oldest:
            self._redis.delete(*map(keys.session, oldest))
        return session, token, proof

    def find(self, token: str, proof: str) -> Session | None:
        """The session of these two; None = there is none, or it is over."""
        raw = self._redis.get(keys.session(digest_of(token)))
        session = Session.model_validate_json(raw) if raw else None
        return session if session and hmac.compare_digest(digest_of(proof), session.proof) else None

    def lasts(self, session: Session) -> bool:
        """Whether it is not over."""
        return self._redis.exists(keys.session(session.digest)) == 1

    def end(self, session: Session) -> None:
        """End it. Twice is harmless."""
        self._redis.delete(keys.session(session.digest))
        self._redis.lrem(keys.sessions_of(session.key_id), 1, session.digest)
