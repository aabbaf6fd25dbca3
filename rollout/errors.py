"""What the client raises. Everything derives from `RolloutError`."""

from __future__ import annotations

from pydantic import ValidationError

from rollout.schema import Problem

MAX_FIELDS_SHOWN = 5
"""Field errors in the text of an `ApiError`; all of them are in its `problem`."""


class RolloutError(Exception):
    """Base of every error that the client raises by itself."""


class ApiError(RolloutError):
    """The gateway refused a call. `status` is the HTTP status, `problem` what it said (RFC 9457)."""

    def __init__(self, status: int, problem: Problem, call: str = "") -> None:
        self.status = status
        self.problem = problem
        self.call = call
        super().__init__(self._text())

    @property
    def reason(self) -> str:
        """The refusal in one line, without its call and the fields at fault."""
        detail = f": {self.problem.detail}" if self.problem.detail else ""
        return f"{self.status} {self.problem.title}{detail}"

    def _text(self) -> str:
        problem = self.problem
        lines = [f"{self.call}: {self.reason}" if self.call else self.reason]
        lines += [f"{error.field}: {error.message}" for error in problem.errors[:MAX_FIELDS_SHOWN]]
        if len(problem.errors) > MAX_FIELDS_SHOWN:
            lines.append(f"… and {len(problem.errors) - MAX_FIELDS_SHOWN} more")
        return "\n  ".join(lines)


class Unavailable(RolloutError):
    """The gateway could not be reached, or kept answering that it is not able to serve."""


class WaitTimeout(RolloutError, TimeoutError):
    """The caller's own time limit passed before what was waited for had ended."""


class ApiKeyError(RolloutError, ValueError):
    """The API key cannot be sent. The message does not repeat it."""


class AddressError(RolloutError, ValueError):
    """The gateway's address is not an http(s) URL."""


def problems_of(error: ValidationError) -> str:
    """Each field at fault, with what is wrong with it."""
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
