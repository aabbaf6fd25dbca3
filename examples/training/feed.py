"""Groups for one step after the other, from `/v1/batches`, such that a killed trainer loses none.

Invariant: what a step asks for and every page of groups it reads is in the journal before it is used, and the
journal goes only when the step's checkpoint is there. So a trainer that was killed reads what it had from the
journal and goes on from its cursor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollout.batch import Batch, BatchRequest, FilterSpec, Group, Verdict
from rollout.client import ApiError, Client
from rollout.schema import RolloutRequest

POLL_S = 20.0
PAGE = 16
NOT_FOUND = 404


@dataclass(frozen=True)
class Plan:
    """What every step asks for."""

    groups: int
    n: int
    filters: tuple[str, ...]
    oversample: float
    max_staleness: int | None
    supply: float
    """Prompts at hand for a step, as a multiple of `groups`: filters use some of them up."""


@dataclass
class Collected:
    """The decided groups of one step."""

    batch: Batch
    groups: list[Group] = field(default_factory=list)

    def of(self, verdict: Verdict) -> list[Group]:
        return [group for group in self.groups if group.verdict is verdict]


class Feed:
    """Batches named `<run>-b<step>`, each of which takes over what the one before left under way."""

    def __init__(
        self,
        client: Client,
        run: str,
        journal: Path,
        plan: Plan,
        prompts: Callable[[int], Iterator[RolloutRequest]],
    ) -> None:
        """
        Args:
            prompts: An endless source for each step.
        """
        self.client, self.run, self.journal, self.plan, self.prompts = client, run, journal, plan, prompts

    def batch_id(self, step: int) -> str:
        return f"{self.run}-b{step}"

    def collect(self, step: int, progress: Callable[[Batch], None] = lambda _: None) -> Collected:
        """All groups of `step`, those of its journal included.

        Raises:
            RolloutError: The gateway refused, or cannot be reached.
        """
        request, cursor, groups = self._resume(step)
        if request is None:
            request = self._request(step)
            self.journal.unlink(missing_ok=True)
            self._note({"step": step, "request": request.model_dump(mode="json", exclude_defaults=True)})
        self.client.batches.create(request)
        while True:
            page = self.client.batches.groups(request.id, cursor, wait=POLL_S, limit=PAGE, every=True)
            cursor = page.cursor
            if page.groups:
                self._note(page.model_dump(mode="json", include={"cursor", "groups"}))
                groups += page.groups
            progress(page.batch)
            if not page.groups and page.batch.state.ended:
                return Collected(page.batch, groups)

    def forget(self) -> None:
        """The step is done: its checkpoint holds what was learned."""
        self.journal.unlink(missing_ok=True)

    def close(self, step: int) -> None:
        """Cancel what the last batch left to be carried over."""
        if self._batch(step) is not None:
            self.client.batches.cancel(self.batch_id(step))

    def _request(self, step: int) -> BatchRequest:
        plan, before = self.plan, self._batch(step - 1) if step > 1 else None
        at_hand = before.waiting_prompts + before.open if before else 0
        source = self.prompts(step)
        count = max(1, round(plan.groups * plan.supply) - at_hand)
        return BatchRequest(
            id=self.batch_id(step),
            prompts=[next(source) for _ in range(count)],
            n=plan.n,
            groups=plan.groups,
            filters=[FilterSpec(name=name) for name in plan.filters],
            oversample=plan.oversample,
            max_staleness=plan.max_staleness,
            carry_from=before.id if before else None,
        )

    def _batch(self, step: int) -> Batch | None:
        try:
            return self.client.batches.get(self.batch_id(step))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    def _note(self, line: dict) -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _resume(self, step: int) -> tuple[BatchRequest | None, str, list[Group]]:
        """Request, cursor and groups of the step that was under way; None where there is none."""
        lines = list(read_lines(self.journal))
        if not lines or lines[0].get("step") != step:
            return None, "0", []
        # A stack of the trainer's own ends with it, and its batches too: then the step begins anew.
        if self._batch(step) is None and (len(lines) > 1 or self._source_is_gone(lines[0]["request"])):
            return None, "0", []
        rest = lines[1:]
        # Without the line that a kill cut off: others are to follow.
        rewrite(self.journal, lines)
        groups = [Group.model_validate(group) for line in rest for group in line["groups"]]
        return BatchRequest.model_validate(lines[0]["request"]), rest[-1]["cursor"] if rest else "0", groups

    def _source_is_gone(self, request: dict) -> bool:
        return "carry_from" in request and self._batch(request_step(request["carry_from"])) is None


def request_step(batch_id: str) -> int:
    """The step of `<run>-b<step>`."""
    return int(batch_id.rpartition("-b")[2])


def rewrite(path: Path, lines: Iterable[dict]) -> None:
    """Put `lines` in the place of the whole file, at once."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    partial.replace(path)


def read_lines(path: Path) -> Iterator[dict]:
    """The JSON objects of a file, up to a line that a kill cut off."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
