"""What the models of the contract share: strictness of requests, ids, and how errors are told."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, model_validator

T = TypeVar("T")


class _First(FailFast):
    """As pydantic has it, and hashable, as a part of a union must be."""

    __hash__ = object.__hash__


Items = Annotated[list[T], _First()]
"""A list that is refused at its first wrong item: of a million of them one says enough."""
MAX_INT53 = 2**53
"""Beyond it a reader that keeps numbers as floats has another one."""
MAX_INT32 = 2**31 - 1
"""Engines keep token ids and counts of tokens in 32 bits."""
MAX_UNKNOWN = 20
"""Unknown keys that are named one by one."""
Name = Annotated[str, Field(min_length=1, max_length=512)]


class Strict(BaseModel):
    """Unknown keys are errors: a misspelt limit must not be ignored in silence. So are NaN and infinities."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > len(cls.model_fields) + MAX_UNKNOWN:
            raise ValueError(f"{len(data)} keys, where there are {len(cls.model_fields)} at most")
        return data


TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")


def _check_id(most: int, problem: str) -> AfterValidator:
    def check(value: str) -> str:
        if len(value) > most or not _ID.fullmatch(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


Identifier = Annotated[
    str,
    _check_id(
        128, "an id is 1 to 128 characters of letters, digits and . _ : - and starts with a letter or digit"
    ),
]
RolloutId = Annotated[
    str, _check_id(160, "not the id of a rollout: those have 1 to 160 letters, digits and . _ : -")
]
"""A rollout's id is its group's with a number, so it may be longer than what a caller may choose."""
DEFAULT_POLICY = "default"
"""The policy of whoever names none."""
PolicyName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:/=-]+$")]


def new_id() -> str:
    """A UUIDv7 (RFC 9562): globally unique, and sorted by time of creation."""
    millis = time.time_ns() // 1_000_000
    value = (millis & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


class FieldError(BaseModel):
    field: str
    """JSON path of the value at fault."""
    message: str


class Problem(BaseModel):
    """An error answer (RFC 9457, `application/problem+json`)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    errors: list[FieldError] = Field(default_factory=list)
