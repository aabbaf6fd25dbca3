"""What the models of requests share: nothing unknown, nothing infinite, and few errors of large values."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

T = TypeVar("T")


class _First(FailFast):
    """As pydantic has it, and hashable, as a part of a union must be."""

    __hash__ = object.__hash__


Items = Annotated[list[T], _First()]
"""A list that is refused at its first wrong item: of a million of them one says enough."""
MAX_INT53 = 2**53
"""Beyond it a reader that keeps numbers as floats has another one."""
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
