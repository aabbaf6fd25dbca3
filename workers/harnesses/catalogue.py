"""Harnesses by name: our own, and those of the entry points `rollout.harnesses`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from workers.harnesses.base import Harness

GROUP = "rollout.harnesses"
OWN = (
    *("claude_code", "codex", "command", "gemini_cli", "mini_swe_agent"),
    *("opencode", "openhands", "pi", "qwen_code"),
)
"""Each in the module of its name, as the class of its name: `claude_code.ClaudeCode`."""


class UnknownHarness(ValueError):
    """None of that name is installed, or it cannot be loaded."""


def names() -> list[str]:
    """Of all that are installed, those that cannot be loaded too."""
    return sorted({*OWN, *(point.name for point in entry_points(group=GROUP))})


def find(name: str) -> Harness:
    """The harness of that name; nothing of the others is imported. One that a package adds replaces ours.

    Raises:
        UnknownHarness: There is none, and the message lists those that are; or it cannot be loaded.
    """
    points = list(entry_points(group=GROUP, name=name))
    if not points and name not in OWN:
        raise UnknownHarness(f"there is no harness {name!r} (there are: {', '.join(names())})")
    try:
        own = f"workers.harnesses.{name}:{name.title().replace('_', '')}"
        found = (points or [EntryPoint(name, own, GROUP)])[0].load()()
        if not isinstance(found, Harness):
            raise TypeError("it is no Harness of workers.harnesses.base")
    except Exception as error:
        raise UnknownHarness(f"the harness {name!r} cannot be loaded: {error!r}") from error
    return found
