"""The one settings object of a deployment, read from `ROLLOUT_*` environment variables."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

ENV_PREFIX = "ROLLOUT_"


class SettingsError(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


class Settings(BaseModel):
    """Each field is set by `ROLLOUT_<FIELD IN CAPITALS>`; the table in docs/settings.md is made from here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Broker and home of all state.")
    gateway_host: str = Field("127.0.0.1", description="Address the gateway listens on.")
    gateway_port: int = Field(8080, ge=0, le=65535, description="Port of the gateway; 0 picks a free one.")
    gateway_threads: int = Field(64, ge=2, description="Threads of the gateway: as many long-polls at once.")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="Largest request body, in bytes.")
    max_wait_s: float = Field(60.0, gt=0, description="Longest `?wait=` a long-poll may ask for, in seconds.")
    node: str = Field(
        default_factory=lambda: socket.gethostname().split(".")[0],
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="Name of this node in queue names; the default is the host name.",
    )
    worker_slots: int = Field(64, ge=1, description="Rollouts a worker process carries at once without `-c`.")
    lease_s: float = Field(30.0, gt=0, description="A worker silent for so many seconds loses its rollouts.")
    reaper_interval_s: float = Field(1.0, gt=0, description="Seconds between two looks for overdue rollouts.")
    requeue_s: float = Field(
        30.0,
        gt=0,
        description="Seconds a rollout waits in a queue before its message is sent again (doubling).",
    )
    retry_delay_s: float = Field(
        1.0, ge=0, description="Seconds before the second attempt after an infrastructure failure (doubling)."
    )
    shutdown_grace_s: float = Field(
        10.0, ge=0, description="Seconds that a stopping worker gives its rollouts before it hands them back."
    )
    retention_s: float = Field(7 * 86400.0, gt=0, description="Seconds a finished rollout is kept in Redis.")
    completions_kept: int = Field(
        1_000_000, ge=1000, description="Entries kept in the stream of completions (approximate)."
    )
    handlers: str = Field(
        "", description="Further handlers as `module:Class` (or a list of classes), separated by commas."
    )
    sandbox_runtime: str = Field(
        "auto", description="`auto`, `apptainer`, `bubblewrap` or `local-unsafe` (no isolation at all)."
    )
    sandbox_image: str = Field("base", description="Image of sandboxes whose handler names none.")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR.")
    log_format: str = Field("console", pattern="^(console|json)$", description="`console` or `json`.")

    @classmethod
    def from_env(cls, environ: dict[str, str] | None = None) -> Settings:
        """Read the environment; unknown `ROLLOUT_*` names are left alone (other programs use some).

        Raises:
            SettingsError: A value does not fit; the message names the variable.
        """
        environ = dict(os.environ) if environ is None else environ
        values: dict[str, Any] = {
            name: environ[ENV_PREFIX + name.upper()]
            for name in cls.model_fields
            if environ.get(ENV_PREFIX + name.upper(), "") != ""
        }
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ENV_PREFIX + str(first["loc"][0]).upper()
            raise SettingsError(f"{name}={first['input']!r}: {first['msg']}") from None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once."""
    return Settings.from_env()
