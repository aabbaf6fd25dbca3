"""Structured logs: one line an event, with whatever it belongs to (rollout, request), and without secrets."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import structlog

from services.settings import ENV_PREFIX, Settings

_QUIET = ("celery.worker.strategy", "celery.app.trace", "kombu", "asyncio", "urllib3", "httpx")
"""Loggers that would write two lines a stage; the rollout's timeline says the same."""
_OWN_HANDLERS = ("gunicorn.error", "gunicorn.access")
"""Loggers that would write past our format."""

MASK = "***"
_SECRET_NAME = re.compile(r"(?i)(^|[_-])(password|passwd|secret|api_?key|authorization|token|credentials?)$")
_SECRET_ENV = re.compile(r"(PASSWORD|SECRET|API_?KEY|TOKEN)$")
SHORTEST_SECRET = 6
"""Shorter values of secret settings are words that lines hold for other reasons."""
MAX_DEPTH = 4
_PATTERNS = (
    (re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@]*:[^\s@/]*@"), rf"\1{MASK}@"),
    (re.compile(r"(?i)((?:password|passwd|secret|api_?key|token)=)[^&\s'\";,)]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(rlt_[0-9a-f]{12})_[0-9A-Za-z]+"), rf"\1_{MASK}"),
    # Of an attempt. With the rollout's id: that may end as a key does.
    (re.compile(r"(rl[mw]-[0-9]{1,9}-)[0-9A-Za-z._:%-]+"), rf"\1{MASK}"),
)

_identity: dict[str, Any] = {}
_hidden: tuple[str, ...] = ()
"""Secrets that this process has read from files, the longest first: one may be the beginning of another."""
T = TypeVar("T", str, bytes, bytearray)


def hide(secret: str) -> None:
    """Keep a secret out of all lines from now on, and out of what `masked` returns."""
    global _hidden
    shapes = {*_hidden, secret, json.dumps(secret)[1:-1], quote(secret, safe="")}
    # Never changed in place: other threads are at it.
    _hidden = tuple(sorted(shapes, key=len, reverse=True))


def masked(text: T) -> T:
    """A text, or the bytes of one, without the secrets that were hidden."""
    for secret in _hidden:
        shape, mask = (secret, MASK) if isinstance(text, str) else (secret.encode(), MASK.encode())
        if shape in text:
            text = text.replace(shape, mask)
    return text


def identify(**fields: Any) -> None:
    """Say who writes the lines of this process from now on: `worker`, `node`."""
    _identity.update({name: value for name, value in fields.items() if value is not None})


@contextmanager
def context(**fields: Any) -> Iterator[None]:
    """Put fields into every line written inside, also by libraries and by coroutines begun there."""
    with structlog.contextvars.bound_contextvars(
        **{name: value for name, value in fields.items() if value is not None}
    ):
        yield


def secret_values(settings: Settings) -> frozenset[str]:
    """Every secret that this process was given, to be kept out of its lines wherever they turn up."""
    parts = urlsplit(settings.redis_url)
    secrets = {value for name, value in parse_qsl(parts.query) if name.endswith("password")}
    login = parts.netloc.rpartition("@")[0]
    if ":" in login:
        raw = login.partition(":")[2]
        secrets |= {raw, unquote(raw)}
    secrets |= {
        value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX) and _SECRET_ENV.search(name)
    }
    return frozenset(value for value in secrets if len(value) >= SHORTEST_SECRET)


class Redactor:
    """A structlog processor that takes secrets out: by the name of a field, by their form, and by value."""

    def __init__(self, values: frozenset[str] = frozenset()) -> None:
        # Longest first: one secret may be the beginning of another.
        self._values = sorted(values, key=len, reverse=True)

    def __call__(self, logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {name: self._field(name, value, MAX_DEPTH) for name, value in event.items()}

    def _field(self, name: object, value: Any, depth: int) -> Any:
        if isinstance(name, str) and value and isinstance(value, str | bytes) and _SECRET_NAME.search(name):
            return MASK
        return self._value(value, depth)

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        elif isinstance(value, BaseException):
            value = str(value)
        if isinstance(value, str):
            return self.text(value)
        if depth <= 0:
            return self.text(repr(value)) if isinstance(value, dict | list | tuple | set) else value
        if isinstance(value, dict):
            return {name: self._field(name, item, depth - 1) for name, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._value(item, depth - 1) for item in value]
        return value

    def text(self, value: str) -> str:
        """A text without the secrets in it."""
        value = masked(value)
        for secret in self._values:
            if secret in value:
                value = value.replace(secret, MASK)
        for pattern, replacement in _PATTERNS:
            value = pattern.sub(replacement, value)
        return value


def _renderer(settings: Settings) -> Callable[..., Any]:
    if settings.log_format == "json":
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )


def configure(settings: Settings) -> None:
    """Send structlog and the standard library's logging to stderr in one format."""
    shared = [
        structlog.contextvars.merge_contextvars,
        lambda logger, method, event: _identity | event,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                # Text before it is looked through: a traceback shows the arguments of an exception.
                structlog.processors.format_exc_info,
                Redactor(secret_values(settings)),
                _renderer(settings),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _OWN_HANDLERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
