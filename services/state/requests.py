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
        problem = _first(error) if isinstance(error, ValidationError) else str(error)[:200]
        raise Unstorable(f"it cannot be stored: {problem}") from None
    if not same:
        raise Unstorable("it cannot be stored: it holds a value that JSON has no form for")
    return text


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
