"""The engine: who is in the batch, one step after the other, pausing, aborting and exchanging weights.

Invariant: all state belongs to the event loop, and a step only computes, in a thread of its own. What it has
drawn is applied when it is over. An exchange of weights runs in the same thread, and a change of the version
label waits for `_between_steps`; so neither falls into a step.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from services.inference.metrics import Metrics
from services.inference.model import Batch, Model, apply_weights
from services.inference.sampling import Draw, Entry, SamplingParams, draw, score_prompt

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]

INITIAL_VERSION = "default"
"""vLLM's label of the weights a server started with."""

LEAST_USED = 0.75
"""Share of the places in the cache that running rows need below which the others are given back, though
nobody asks for them."""

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass, or one longer prompt: running sequences wait for no more of newcomers
between two of their tokens."""


class EngineError(Exception):
    """The engine failed while it served a request; answered with 500."""


class OvertakenError(Exception):
    """A pause was ended by a resume before the running sequences had ended."""


@dataclass(eq=False)
class Sequence:
    """One choice of one request: its prompt and what was sampled so far."""

    request_id: str
    """The id on the wire, prefix included (`generate-tokens-…`); shared by the choices of a request."""
    index: int
    """Position among the request's choices."""
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Tokens that may be sampled, already clipped to the context."""
    stop_reasons: dict[int, int | None]
    """What ends it; see `SamplingParams.stop_reasons`."""
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each token when `streaming`, and at the end; shared by the choices of a request."""
    streaming: bool = False
    priority: int = 0
    """Lower is served earlier; equal priorities in order of arrival."""

    prompt_logprobs: list[list[Entry]] | None = None
    """Per prompt token but the first, once computed; see `score_prompt`. None = not asked for."""
    draws: list[Draw] = field(default_factory=list)
    """The sampled tokens; log-probs are natural, of the distribution that was sampled from."""
    versions: list[str] = field(default_factory=list)
    """Label of the weights that each token was sampled from."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    """The id that ended it when it came from the caller; None for the model's own end of turn."""
    error: str | None = None
    """Set when the engine failed; then finish_reason is "error"."""
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # Choices of one request must differ, so each gets its own seed; the same rule as vLLM's.
        seed = self.params.seed
        self.rng = random.Random(None if seed is None else seed + self.index)

    @property
    def token_ids(self) -> list[int]:
        return [drawn.sampled[0] for drawn in self.draws]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def reserved_tokens(self) -> int:
        """Places in the key-value cache that this sequence can come to need."""
        return len(self.prompt_ids) + self.max_tokens

    def append(self, drawn: Draw, version: str) -> None:
        """Record a sampled token; ends the sequence at a stop token (which is kept) or at `max_tokens`."""
        self.draws.append(drawn)
        self.versions.append(version)
        token = drawn.sampled[0]
        if token in self.stop_reasons:
            self.finish_reason, self.stop_reason = "stop", self.stop_reasons[token]
        elif len(self.draws) >= self.max_tokens:
            self.finish_reason = "length"

    def weight_versions(self) -> list[dict[str, str | int]]:
        """Spans `{"version", "start", "end"}` over the sampled tokens, end exclusive, without gaps."""
        spans: list[dict[str, str | int]] = []
        for position, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": position})
            spans[-1]["end"] = position + 1
        return spans


class Engine:
    """Serves sequences from one model. Every method is called in the event loop."""

    def __init__(self, model: Model, served_name: str, max_sequences: int, kv_capacity_tokens: int):
        self.model = model
        self.served_name = served_name
        """The name in `/v1/models` and in replies."""
        self.metrics = Metrics(served_name, kv_capacity_tokens)
        self.max_sequences = max_sequences
        self.kv_capacity_tokens = kv_capacity_tokens
        self.weight_version = INITIAL_VERSION
        self.batch = Batch(model.module)
        self._rows: list[Sequence] = []
        """Row i of the batch is that of `_rows[i]`; some may have ended since the last step."""
        self._prefilled = False
        """The last step admitted somebody; those who run come next."""
        self._queue: list[Sequence] = []
        self._paused: PauseMode | None = None
        self._work = asyncio.Event()
        self._between_steps = asyncio.Condition()
        """Held during a step; notified after each, and when there is nothing to do."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Abort what is queued or running, also what came while the last step was computed, and end."""
        self.abort(self.live())
        async with self._between_steps:
            self._task.cancel()
            self.abort(self.live())
        self._thread.shutdown()

    @property
    def alive(self) -> bool:
        """False when the engine has ended; the server is then unhealthy."""
        return self._task is not None and not self._task.done() and not self._task.cancelling()

    @property
    def paused(self) -> bool:
        return self._paused is not None

    @property
    def running(self) -> list[Sequence]:
        """The sequences in the batch that have not ended."""
        return [sequence for sequence in self._rows if not sequence.finished]

    def live(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [*self.running, *self._queue]

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences by priority, then arrival. EngineError when the engine has ended."""
        if not self.alive:
            raise EngineError("the engine has ended; restart the backend")
        for sequence in sequences:
            bisect.insort(self._queue, sequence, key=lambda queued: queued.priority)
        self._changed()

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End these with finish_reason abort; those that ended already are left alone."""
        for sequence in sequences:
            if not sequence.finished:
                self._end(sequence, "abort")
        self._queue = [sequence for sequence in self._queue if not sequence.finished]
        self._changed()

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; returns when nothing more will be sampled.

        abort ends everything queued or running; wait lets the running ones end; keep freezes them until
        `resume`. Requests that arrive meanwhile queue. OvertakenError when `resume` comes before the end.
        """
        self._paused = mode
        if mode == "abort":
            self.abort(self.live())
        async with self._between_steps:
            if mode == "wait":
                await self._between_steps.wait_for(lambda: self._paused != mode or not self.running)
                if self._paused != mode:
                    raise OvertakenError("resumed before the pause was complete")

    def resume(self) -> None:
        """Sample again."""
        self._paused = None
        self._changed()

    async def set_version(self, version: str) -> None:
        """Label the tokens of all later steps with `version`."""
        async with self._between_steps:
            self.weight_version = version

    async def swap_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy checked tensors (from `read_checkpoint`) between two steps."""
        # In the thread of the steps: a caller that goes away does not let a step begin on half of them.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, apply_weights, self.model, tensors)

    def _changed(self) -> None:
        running = self.running
        self.metrics.running.set(len(running))
        self.metrics.waiting.set(len(self._queue))
        stored = sum(len(sequence.prompt_ids) + len(sequence.draws) for sequence in running)
        self.metrics.kv_usage.set(stored / self.kv_capacity_tokens)
        self._work.set()

    def _runnable(self) -> bool:
        if self._paused is None:
            return bool(self._queue or self.running)
        return self._paused == "wait" and bool(self.running)

    async def _run(self) -> None:
        while True:
            async with self._between_steps:
                if self._runnable():
                    try:
                        await self._step()
                    except Exception as error:
                        # One bad step must not end the server: its requests are told, the next start clean.
                        log.exception("engine step failed")
                        self._fail(f"the engine failed: {error!r}")
                self._between_steps.notify_all()
            self._changed()
            if not self._runnable():
                self._work.clear()
                await self._work.wait()

    async def _step(self) -> None:
        """The first token of those who are admitted, or else the next one of all that run.

        While somebody runs, no two steps in a row admit: many newcomers would hold up all the others.
        """
        kept = [row for row, sequence in enumerate(self._rows) if not sequence.finished]
        running = [self._rows[row] for row in kept]
        admitting = self._paused is None and not (running and self._prefilled)
        admitted = self._admitted(running) if admitting else []
        self._prefilled = bool(admitted)
        if admitted:
            self._rows = running + admitted
            compute, sampled = partial(self._prefill, kept, admitted), admitted
        else:
            needed = len(kept) * max(self.batch.lengths[row] for row in kept)
            wasteful = needed < LEAST_USED * self.batch.places
            if wasteful:
                self._rows = running
            tokens = [None if s.finished else s.draws[-1].sampled[0] for s in self._rows]
            compute, sampled = partial(self._decode, kept if wasteful else None, tokens, running), running
        draws = await asyncio.get_running_loop().run_in_executor(self._thread, compute)
        self._apply(sampled, draws)

    def _admitted(self, running: list[Sequence]) -> list[Sequence]:
        """Take from the queue what fits into one prefill pass beside the running sequences.

        The cache is rectangular, each row as wide as the widest. A sequence is admitted only when its whole
        length fits, so nothing is ever preempted; one alone always is.
        """
        admitted: list[Sequence] = []
        rows = len(running)
        width = max((sequence.reserved_tokens for sequence in running), default=0)
        longest = 0
        while self._queue and rows < self.max_sequences:
            candidate = self._queue[0]
            width = max(width, candidate.reserved_tokens)
            longest = max(longest, len(candidate.prompt_ids))
            if rows and (rows + 1) * width > self.kv_capacity_tokens:
                break
            if admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            admitted.append(self._queue.pop(0))
            rows += 1
        return admitted

    @torch.inference_mode()
    def _prefill(self, kept: list[int], admitted: list[Sequence]) -> list[Draw]:
        hidden = self.batch.prefill(kept, [sequence.prompt_ids for sequence in admitted])
        head = self.batch.head
        for sequence, states in zip(admitted, hidden, strict=True):
            most = sequence.params.prompt_logprobs
            if most is not None:
                sequence.prompt_logprobs = score_prompt(head, states, sequence.prompt_ids, most)
        return _draw(admitted, head(torch.stack([states[-1] for states in hidden])))

    @torch.inference_mode()
    def _decode(
        self, kept: list[int] | None, tokens: list[int | None], running: list[Sequence]
    ) -> list[Draw]:
        if kept is not None:
            self.batch.keep(kept)
        return _draw(running, self.batch.decode(tokens))

    def _apply(self, sequences: list[Sequence], draws: list[Draw]) -> None:
        self.metrics.generation_tokens.inc(len(draws))
        for sequence, drawn in zip(sequences, draws, strict=True):
            if not sequence.draws:
                self.metrics.prompt_tokens.inc(len(sequence.prompt_ids))
                self.metrics.prefix_queries.inc(len(sequence.prompt_ids))
                self.metrics.first_token.observe(time.monotonic() - sequence.arrived)
            if sequence.finished:  # aborted during the step
                continue
            sequence.append(drawn, self.weight_version)
            if sequence.finished:
                self._end(sequence, sequence.finish_reason)
            elif sequence.streaming:
                sequence.progress.set()

    def _fail(self, message: str) -> None:
        """End all running sequences: what the cache holds after a failed step is unknown."""
        for sequence in self.running:
            sequence.error = message
            self._end(sequence, "error")
        self._rows = []
        self.batch = Batch(self.model.module)

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self.metrics.ended(reason, time.monotonic() - sequence.arrived)
        sequence.progress.set()


def _draw(sequences: list[Sequence], logits: torch.Tensor) -> list[Draw]:
    """Sample a token for each sequence, row by row of `logits`."""
    return draw(logits, [sequence.params for sequence in sequences], [sequence.rng for sequence in sequences])
