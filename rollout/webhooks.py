"""Webhooks: what the service sends when a rollout has ended, signed so that a receiver can check it.

The form is that of Standard Webhooks (standardwebhooks.com): the headers `webhook-id`, `webhook-timestamp`
and `webhook-signature`; the signature is HMAC-SHA256 over `<id>.<timestamp>.<body>`.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256

from pydantic import ValidationError

from rollout.errors import RolloutError
from rollout.schema import Rollout

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
EVENT = "rollout.ended"
VERSION = "v1"
TOLERANCE_S = 300.0
"""Seconds that the sender's and the receiver's clocks may differ: an older message may be a repeated one."""
_ENCODED = "whsec_"
"""Before a secret in base64."""


class WebhookError(RolloutError):
    """A message is not from the service, too old, or not of the known form."""


def _key(secret: str) -> bytes:
    if not secret.startswith(_ENCODED):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_ENCODED), validate=True)
    except binascii.Error as error:
        raise WebhookError(f"the secret begins with {_ENCODED} but is not base64 after it") from error


def tenant_secret(secret: str, tenant: str) -> str:
    """The secret that the webhooks of a tenant's own requests are signed with, made from the service's.

    A receiver has to know its secret; knowing it must not be enough to speak for other tenants.
    """
    derived = hmac.digest(_key(secret), f"rollout webhooks of tenant {tenant}".encode(), sha256)
    return _ENCODED + base64.b64encode(derived).decode()


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature, as it stands in the header."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return f"{VERSION},{base64.b64encode(hmac.digest(_key(secret), signed, sha256)).decode()}"


def signed_headers(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a message, signed with each secret: the first is the newest."""
    return {
        ID: message_id,
        TIMESTAMP: str(timestamp),
        SIGNATURE: " ".join(signature(secret, message_id, timestamp, body) for secret in secrets),
    }


def verify_webhook(
    body: bytes,
    headers: Mapping[str, str],
    secret: str,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> Rollout:
    """The rollout of a message that is genuine and recent.

    A message may come more than once: `Rollout.id` tells.

    Args:
        body: The bytes as received; parsed and written again they would have another signature.
        headers: Of the HTTP request; names in any case.
        secret: What the service has as ROLLOUT_WEBHOOK_SECRET; of a tenant other than `default`, what
            `rollout tenants webhook-secret TENANT` prints.
        tolerance_s: Seconds that the message may be old, or from the future.
        now: Seconds since the epoch; None = the present.

    Raises:
        WebhookError: It is not.
    """
    values = {name.lower(): value for name, value in headers.items()}
    missing = [name for name in (ID, TIMESTAMP, SIGNATURE) if not values.get(name)]
    if missing:
        raise WebhookError(f"headers are missing: {', '.join(missing)}")
    try:
        timestamp = int(values[TIMESTAMP])
    except ValueError:
        raise WebhookError(f"{TIMESTAMP} is not a number of seconds") from None
    age = (time.time() if now is None else now) - timestamp
    if abs(age) > tolerance_s:
        raise WebhookError(
            f"the message is {age:.0f} s old and {tolerance_s:g} s are allowed: repeated, or a clock is wrong"
        )
    expected = signature(secret, values[ID], timestamp, body).encode()
    if not any(hmac.compare_digest(expected, each.encode()) for each in values[SIGNATURE].split()):
        raise WebhookError("no signature fits: another secret, or the body was changed on its way")
    try:
        message = json.loads(body)
        if not isinstance(message, dict) or message.get("type") != EVENT:
            raise WebhookError(f"the message is no {EVENT!r}: upgrade rollout-service")
        return Rollout.model_validate(message.get("data"))
    except (ValueError, ValidationError) as error:
        raise WebhookError(f"the body cannot be read: {error}") from error
