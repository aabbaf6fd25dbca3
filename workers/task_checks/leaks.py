"""Whether what is hidden from an agent can be found in its sandbox: in files, variables, processes, git."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from sandbox.client import TRUSTED_PYTHON, SandboxClient
from workers.errors import InfrastructureError
from workers.handlers.oracle import Hidden, Hides

SCRIPT = Path(__file__).parent / "inside" / "search.py"
LEAST_LINE = 16
"""Characters of a line that tells one text from others."""
LEAST_TEXT = 40
"""Characters of all such lines of a text, and bytes of a value: what is shorter is found anywhere."""
LEAST_SECRET = 8
MOST_LINES = 400
"""Lines of one text that are looked for; of a longer one every second, third … is."""
MOST_BYTES = 4 << 20
"""Of all that is looked for."""
SEARCHED_BYTES = 2 << 30
SEARCH_S = 20.0
MOST_VARIABLES = 1 << 20
VARIABLES = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"


class Leak(BaseModel):
    """Something hidden that the agent can find."""

    what: str
    where: str
    fault: bool = True
    """False: it may have been given to the agent."""

    def __str__(self) -> str:
        return f"{self.what} {self.where}"


class Searched(BaseModel):
    """How the agent's sandbox was looked through."""

    found: list[Leak] = Field(default_factory=list)
    files: int = 0
    bytes: int = 0
    repositories: int = 0
    complete: bool = True
    """False: there was more than could be looked through."""
    too_short: list[str] = Field(default_factory=list)
    """What is hidden and too short to be told from other text, or too much; it was not looked for."""
    notes: list[str] = Field(default_factory=list)


async def search(box: SandboxClient, handler: Any, task: Any, thorough: bool = False) -> Searched | None:
    """Look through a sandbox in which no agent has been; ends all its processes. None = nothing is hidden.

    Args:
        thorough: Whether to look into the directories of the distribution's packages, too.

    Raises:
        InfrastructureError: The search itself failed.
    """
    if not isinstance(handler, Hides):
        return None
    named = handler.hidden(task)
    hidden: Sequence[Hidden] = await named if inspect.isawaitable(named) else named
    if not hidden:
        return None
    asked, too_short = _asked(hidden)
    secrets = [item for item in hidden if item.secret and len(_text(item)) >= LEAST_SECRET]
    shown = await box.bash(VARIABLES, max_output_chars=MOST_VARIABLES) if secrets else None
    question = {
        "hidden": asked,
        "repositories": [item.repository for item in hidden],
        "thorough": thorough,
        "seconds": SEARCH_S,
        "bytes": SEARCHED_BYTES,
    }
    done = await box.exec(
        [TRUSTED_PYTHON, "-c", SCRIPT.read_text()],
        timeout=SEARCH_S * 3,
        stdin=json.dumps(question),
        max_output_chars=MOST_VARIABLES,
    )
    if done.exit_code != 0:
        raise InfrastructureError(f"the sandbox cannot be looked through: {done.stderr[-500:] or done}")
    searched = Searched(**json.loads(done.stdout), too_short=too_short)
    given = {item.what for item in hidden if item.given}
    for leak in searched.found:
        leak.fault = leak.what not in given
    for item in secrets if shown is not None else ():
        if _text(item) in shown.output:
            searched.found.append(Leak(what=item.what, where="is in a variable or an argument of a process"))
    return searched


def _asked(hidden: Sequence[Hidden]) -> tuple[list[dict[str, Any]], list[str]]:
    asked, too_short, room = [], [], MOST_BYTES
    for item in hidden:
        pieces = list(_pieces(item))
        size = sum(map(len, pieces))
        if (not pieces and item.content) or size > room:
            too_short.append(item.what)
        elif pieces:
            room -= size
            asked.append({"what": item.what, "pieces": pieces})
    return asked, too_short


def _text(item: Hidden) -> str:
    content = item.content
    return content if isinstance(content, str) else content.decode("utf-8", "replace")


def _pieces(item: Hidden) -> Iterator[str]:
    """What of it must all be in one file: the longest first, which most files do not have."""
    text = _text(item)
    if item.secret:
        return iter([text] if len(text) >= LEAST_SECRET else [])
    # Of bytes that are no text, the pieces between those that are not are lines, too.
    lines = {line.strip() for line in text.replace("\ufffd", "\n").splitlines()}
    telling = sorted((line for line in lines if len(line) >= LEAST_LINE), key=len, reverse=True)
    if sum(map(len, telling)) < LEAST_TEXT:
        return iter(())
    return iter(telling[:: -(-len(telling) // MOST_LINES)])
