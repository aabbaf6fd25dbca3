"""The key that `rollout up` makes, and the file by which clients of the same account find it."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from redis import RedisError

from rollout import account
from rollout.errors import ApiKeyError
from services.local.errors import StackError
from services.state.api_keys import KeyProblem, KeyStore, Scope, new_text
from services.state.redis import connect
from services.state.tenants import DEFAULT_TENANT

FILE = "api.key"
"""In the run directory; the same from life to life, so that what a trainer holds goes on working."""


def accepted(redis_url: str, state_dir: Path) -> str:
    """The key of the stack's operator, which its gateway accepts; made when there is none that is accepted.

    Raises:
        StackError: Its file is not ours alone, or Redis does not take the key.
    """
    file = state_dir / FILE
    try:
        text = (account.read_private(file) or "").strip()
        with connect(redis_url, max_connections=2) as client:
            store = KeyStore(client)
            try:
                store.create(DEFAULT_TENANT, [Scope.ADMIN], text=text)
            except KeyProblem:  # none yet, or rotated or revoked since
                text = new_text()
                account.write_private(file, text + "\n")
                store.create(DEFAULT_TENANT, [Scope.ADMIN], text=text)
    except (ApiKeyError, KeyProblem, RedisError, OSError) as error:
        raise StackError(f"the API key of {state_dir} cannot be made: {error}") from error
    return text


def announce(state_dir: Path, url: str, key: str, *, private: bool) -> None:
    """Have clients of this account find the stack.

    Raises:
        StackError: The account has no place for the file.
    """
    service = account.Service(url, key, account.boot(), time.time(), private)
    try:
        account.announce(_name(state_dir), service)
    except OSError as error:
        raise StackError(
            f"{account.directory()} cannot be written: {error}; XDG_STATE_HOME names another place"
        ) from error


def withdraw(state_dir: Path) -> None:
    """Have nobody find it any more."""
    account.withdraw(_name(state_dir))


def _name(state_dir: Path) -> str:
    return hashlib.sha256(str(state_dir).encode()).hexdigest()[:16]
