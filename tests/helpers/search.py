"""A search over a directory of text files, as a deployment might write one."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path

from workers.handlers.search import Hit, Search


class FileSearch(Search):
    """Files with most of the query's words; the first line of each is its title."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or Path(os.environ["SEARCH_DIRECTORY"])

    async def search(self, query: str, limit: int) -> Sequence[Hit]:
        return await asyncio.to_thread(self._look, query, limit)

    def _look(self, query: str, limit: int) -> list[Hit]:
        words = set(re.findall(r"\w+", query.lower()))
        hits = []
        for path in sorted(self.directory.glob("*.txt")):
            text = path.read_text(encoding="utf-8")
            if common := len(words & set(re.findall(r"\w+", text.lower()))):
                title, _, rest = text.partition("\n")
                hits.append((common, Hit(title, rest, path.name)))
        hits.sort(key=lambda scored: scored[0], reverse=True)
        return [hit for _, hit in hits[:limit]]
