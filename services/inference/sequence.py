"""One running generation: its prompt, what was sampled, and who waits for it.

Invariant: `token_ids`, `logprobs`, `ranks`, `tops` and `versions` have one entry per sampled token and
change only through `append`. Only the engine thread calls `append` and `finish`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.inference.sampling import SamplingParams
from services.inference.scoring import Entry

_order = itertools.count()


@dataclass(frozen=True)
class TokenEvent:
    """What a listener is told after a step: how far the sequence is, and whether it ended."""

    sequence: Sequence
    length: int
    """Sampled tokens so far."""
    finished: bool


@dataclass(eq=False)
class Sequence:
    """State of one choice of one request."""

    request_id: str
    """The id on the wire, prefix included (`generate-tokens-…`); shared by the choices of a request."""
    index: int
    """Position among the request's choices."""
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Tokens that may be sampled, already clipped to the context."""
    listener: Callable[[TokenEvent], None]
    """Called in the event loop: after each token when `streaming`, else once at the end."""
    streaming: bool = False
    priority: int = 0
    """Lower is served earlier; equal priorities in order of arrival."""

    prompt_logprobs: list[list[Entry]] | None = None
    """Per prompt token but the first, once computed; see `score_prompt`. None = not asked for."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log, of the distribution that was sampled from."""
    ranks: list[int] = field(default_factory=list)
    """1 for the most likely token."""
    tops: list[list[tuple[int, float, int]]] = field(default_factory=list)
    """Per token the asked number of most likely `(token id, logprob, rank)`."""
    versions: list[str] = field(default_factory=list)
    """Label of the weights that each token was sampled from."""

    finish_reason: str | None = None
    stop_reason: int | None = None
    """The id that ended it when it came from `stop_token_ids`; None for the model's own end of turn."""
    error: str | None = None
    """Set when the engine failed; then finish_reason is "error"."""
    arrived: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    order: int = field(default_factory=lambda: next(_order))
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        # Choices of one request must differ, so each gets its own seed; the same rule as vLLM's.
        seed = self.params.seed
        self.rng = random.Random(None if seed is None else seed + self.index)

    def __lt__(self, other: Sequence) -> bool:
        return (self.priority, self.order) < (other.priority, other.order)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def reserved_tokens(self) -> int:
        """Places in the key-value cache that this sequence can come to need."""
        return len(self.prompt_ids) + self.max_tokens

    def append(
        self, token_id: int, logprob: float, rank: int, top: list[tuple[int, float, int]], version: str
    ) -> None:
        """Record a sampled token; ends the sequence at a stop token (which is kept) or at `max_tokens`."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.ranks.append(rank)
        self.tops.append(top)
        self.versions.append(version)
        if token_id == self.params.end_of_turn_id:
            self.finish("stop")
        elif token_id in self.params.stop_token_ids:
            self.finish("stop", stop_reason=token_id)
        elif len(self.token_ids) >= self.max_tokens:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | None = None) -> None:
        """End the sequence; `reason` is stop, length, abort or error."""
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def weight_versions(self) -> list[dict[str, str | int]]:
        """Spans `{"version", "start", "end"}` over the sampled tokens, end exclusive, without gaps."""
        spans: list[dict[str, str | int]] = []
        for position, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": version, "start": position, "end": position + 1})
        return spans
