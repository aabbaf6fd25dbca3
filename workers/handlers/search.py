"""A search for agents: what a deployment plugs in, and the tool that offers it to the model."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from pydantic import Field

from services.settings import Settings
from workers.agent.tools import Arguments, Observation, Tool, ToolContext
from workers.errors import HandlerError, InfrastructureError, StageError

GROUP = "rollout.search_tools"
MAX_RESULTS = 10
MAX_TEXT = 2000
"""Characters of one result that the model reads."""


@dataclass(frozen=True)
class Hit:
    """One result."""

    title: str
    text: str
    source: str = ""
    """Address or name of where it is from."""


class Search(ABC):
    """What a deployment writes: a subclass without arguments, registered as an entry point of the group
    `rollout.search_tools` or named as `module:Class`, and chosen by `ROLLOUT_SEARCH_TOOL`.

    One instance serves all rollouts of a worker of RUN, on its event loop, outside of the sandboxes.
    """

    @abstractmethod
    async def search(self, query: str, limit: int) -> Sequence[Hit]:
        """The best hits first, at most `limit`.

        Raises:
            ValueError: The query is at fault; the model reads why.
        """


class SearchArgs(Arguments):
    query: str = Field(min_length=1, max_length=500, description="What to look for, in a few words.")
    limit: int = Field(5, ge=1, le=MAX_RESULTS, description="Most results.")


class SearchTool(Tool):
    """The deployment's search."""

    name = "search"
    aliases = ("web_search",)
    description = "Search for documents about something; the best results come first, each with its text."
    Args = SearchArgs

    def __init__(self, search: Search) -> None:
        self._search = search

    async def call(self, args: SearchArgs, ctx: ToolContext) -> Observation:
        try:
            hits = await self._search.search(args.query, args.limit)
        except ValueError as error:
            return Observation(f"Error: search: {error}")
        except StageError:
            raise
        except Exception as error:
            # Without its search the agent is another one: no sample to train on.
            raise InfrastructureError(f"the search failed: {type(error).__name__}: {error}") from error
        if not hits:
            return Observation("[no results]")
        shown = [_shown(number, hit) for number, hit in enumerate(hits[: args.limit], 1)]
        return Observation("\n\n".join(shown))


def _shown(number: int, hit: Hit) -> str:
    text = hit.text if len(hit.text) <= MAX_TEXT else hit.text[:MAX_TEXT] + " [...]"
    return f"[{number}] {hit.title}" + (f" ({hit.source})" if hit.source else "") + f"\n{text}"


def load_search(config: Settings) -> SearchTool | None:
    """The tool of the search that `ROLLOUT_SEARCH_TOOL` names; None: it names none.

    Raises:
        HandlerError: There is no such search, or it is none.
    """
    name = config.search_tool
    if not name:
        return None
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points and ":" not in name:
        known = ", ".join(sorted(points)) or "none"
        raise HandlerError(
            f"ROLLOUT_SEARCH_TOOL={name!r}: no package here has it in {GROUP!r} (there are: {known})"
        )
    try:
        chosen = points[name].load() if name in points else pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise HandlerError(f"ROLLOUT_SEARCH_TOOL={name!r} cannot be imported: {error}") from error
    if not (isinstance(chosen, type) and issubclass(chosen, Search)):
        raise HandlerError(f"ROLLOUT_SEARCH_TOOL={name!r} is no subclass of workers.handlers.search.Search")
    return SearchTool(chosen())
