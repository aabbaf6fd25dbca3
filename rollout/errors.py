"""What the client raises. Everything derives from `RolloutError`."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from rollout.schema import Problem

MAX_FIELDS_SHOWN = 5
"""Field errors, or ids, in the text of an error, which holds all of them."""


class RolloutError(Exception):
    """Base of every error that the client raises by itself."""


class ApiError(RolloutError):
    """The gateway refused a call. `status` is the HTTP status, `problem` what it said (RFC 9457)."""

    def __init__(self, status: int, problem: Problem, call: str = "") -> None:
        self.status, self.problem, self.call = status, problem, call
        lines = [f"{call}: {self.reason}" if call else self.reason]
        fields = [f"{error.field}: {error.message}" for error in problem.errors[:MAX_FIELDS_SHOWN]]
        lines += [text for text in fields if text != problem.detail]
        if len(problem.errors) > MAX_FIELDS_SHOWN:
            lines.append(f"… and {len(problem.errors) - MAX_FIELDS_SHOWN} more")
        super().__init__("\n  ".join(lines))

    @property
    def reason(self) -> str:
        """The refusal in one line, without its call and the fields at fault."""
        return ": ".join(filter(None, (f"{self.status} {self.problem.title}", self.problem.detail)))


class Unavailable(RolloutError):
    """The gateway could not be reached, or kept answering that it is not able to serve.

    `pending` holds the ids of rollouts that were submitted, are waited for, and go on without us.
    """

    def __init__(self, message: str, pending: Iterable[str] = ()) -> None:
        self.reason, self.pending = message, [*pending]
        if self.pending:
            some = ", ".join(self.pending[:MAX_FIELDS_SHOWN])
            message += (
                f" {len(self.pending)} rollouts go on, among them {some}: the error's `pending` has all, "
                "`stream(ids=…)` waits for them"
            )
        super().__init__(message)


class WaitTimeout(RolloutError, TimeoutError):
    """The caller's own time limit passed before what was waited for had ended."""


class ApiKeyError(RolloutError, ValueError):
    """The API key cannot be sent. The message does not repeat it."""


class AddressError(RolloutError, ValueError):
    """The gateway's address is not an http(s) URL."""


def problems_of(error: ValidationError) -> str:
    """Each field at fault, with what is wrong with it."""
    faults = ((".".join(map(str, item["loc"])), item["msg"]) for item in error.errors())
    return "; ".join(f"{field}: {text.removeprefix('Value error, ')}" for field, text in faults)
