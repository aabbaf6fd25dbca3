"""The form in which requests are stored. What is written is read first: no record may be unreadable."""

from __future__ import annotations

from pydantic import ValidationError

from rollout.schema import RolloutRequest


class Unstorable(ValueError):
    """A request that would not be read as it was written; nothing was."""


def stored_form(request: RolloutRequest) -> str:
    """A request as JSON that reads as the same one.

    Raises:
        Unstorable: There is none: it holds a number that JSON does not know, or half of a character.
    """
    try:
        text = request.model_dump_json()
        same = RolloutRequest.model_validate_json(text) == request
    except (ValueError, RecursionError) as error:
        raise Unstorable(f"it cannot be stored: {first_line(error)}") from None
    if not same:
        raise Unstorable("it cannot be stored: it holds a value that JSON has no form for")
    return text


def first_line(error: Exception) -> str:
    """What went wrong, in a line that holds no large value."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"[:300]
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
