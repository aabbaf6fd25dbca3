"""How long an LLM engine takes: continuous batching, chunked prefill, a prefix cache that can be full.

A model of vLLM's scheduler, in steps. In each step every running sequence gets one more token, and what is
left of the step's budget of tokens goes to prefill, the oldest first. A sequence is admitted when its whole
prompt has room in the cache; when a running one finds no block for its next token, the youngest is preempted
and computed again later. It waits for timers alone, so `tests.helpers.virtual_time` drives it as well as a
server does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ids
from contextlib import suppress
from dataclasses import dataclass, field

from tests.helpers.engine_cache import BLOCK, BlockCache, block_hashes, blocks_for
from tests.helpers.fake_language import Answer, FakeLanguage

LEAP = 64
"""Steps that are waited for at once while the batch does not change."""


class PromptTooLong(ValueError):
    """The prompt and one token do not fit into an empty cache."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a step = base + per_sequence x sequences + per_cached_token x their tokens + prefill."""

    base_s: float = 0.0005
    per_sequence_s: float = 0.0
    per_cached_token_s: float = 0.0
    prefill_tokens_per_s: float = 1_000_000.0


@dataclass(eq=False)
class Sequence:
    """One call in the engine."""

    prompt: list[int]
    answer: Answer
    hashes: list[int]
    """Of prompt and answer."""
    done: asyncio.Future[None]
    streaming: bool = False
    """Its ids are told while it is sampled."""
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something was sampled, and at the end."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    sampled: int = 0
    shared: int = 0
    """Leading blocks that are in the cache under their hash."""
    private: int = 0
    cached_tokens: int | None = None
    """Prompt ids found in the prefix cache at the first admission; None = never admitted."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    shift: Callable[[], float] | None = None
    """What is taken off a log-prob by the weights that it is sampled from; None = nothing, by any."""
    shifts: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    """None until it has ended; `abort` when it was ended before its time."""

    @property
    def uncomputed(self) -> int:
        return len(self.prompt) + self.sampled - self.computed

    @property
    def token_ids(self) -> list[int]:
        return self.answer.token_ids[: self.sampled]

    @property
    def logprobs(self) -> list[float]:
        told = self.answer.logprobs[: self.sampled]
        return [value - by for value, by in zip(told, self.shifts, strict=True)] if self.shift else told


class EngineModel:
    """One engine. Use it from one event loop."""

    def __init__(
        self,
        *,
        capacity_tokens: int = 200_000,
        timing: Timing | None = None,
        language: FakeLanguage | None = None,
        max_sequences: int = 256,
        max_batched_tokens: int = 2048,
        version: str = "default",
        stream_interval: int = 1,
    ) -> None:
        """
        Args:
            capacity_tokens: Rounded down to whole blocks.
            stream_interval: As many ids of a stream, at most, are told at once.
        """
        self.stream_interval = stream_interval
        self.timing = timing or Timing()
        self.language = language or FakeLanguage()
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.version = version
        self.slowdown = 1.0
        self.paused = False
        self.cache = BlockCache(capacity_tokens // BLOCK)
        self.calls = 0
        self.prompt_tokens = 0
        """Looked up in the prefix cache."""
        self.cached_tokens = 0
        """Found there."""
        self.generated_tokens = 0
        self.preemptions = 0
        self.busy_s = 0.0
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._draining = False
        self._resting = False
        self._wake = asyncio.Event()
        self._at_rest = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        return self.cache.in_use / self.cache.blocks

    def submit(
        self,
        prompt: Ids[int],
        *,
        max_tokens: int,
        seed: int | None = None,
        stop_token_ids: Ids[int] = (),
        cache_salt: str | None = None,
        streaming: bool = False,
        shift: Callable[[], float] | None = None,
    ) -> Sequence:
        """Queue a call; `wait` for it.

        Raises:
            PromptTooLong: It could never be admitted.
        """
        if blocks_for(len(prompt) + max_tokens) > self.cache.blocks:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens and {max_tokens} more do not fit into "
                f"{self.cache.blocks * BLOCK} tokens of cache"
            )
        answer = self.language.answer(
            prompt, max_tokens=max_tokens, seed=seed, stop_token_ids=stop_token_ids, call_number=self.calls
        )
        self.calls += 1
        prompt = list(prompt)
        loop = asyncio.get_running_loop()
        hashes = block_hashes(prompt + answer.token_ids, cache_salt)
        sequence = Sequence(prompt, answer, hashes, loop.create_future(), streaming, shift=shift)
        self._waiting.append(sequence)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        self._wake.set()
        return sequence

    async def wait(self, sequence: Sequence) -> Sequence:
        """The sequence at its end. Cancelled, it takes the call out of the engine.

        Raises:
            RuntimeError: The engine itself failed.
        """
        try:
            await asyncio.shield(sequence.done)
        except asyncio.CancelledError:
            self.abort(sequence)
            raise
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """End a call before its time; what it has sampled stays readable."""
        if sequence.finish_reason is None:
            self._end(sequence, "abort")
            self._wake.set()

    async def pause(self, mode: str) -> None:
        """`abort` ends all calls, `wait` lets the running ones end, `keep` freezes them."""
        self.paused = True
        self._draining = mode == "wait"
        self._wake.set()
        if mode == "abort":
            for sequence in [*self._running, *self._waiting]:
                self._end(sequence, "abort")
        while self._task is not None and not self._task.done() and not self._resting:
            self._at_rest.clear()
            await self._at_rest.wait()

    def resume(self) -> None:
        """Go on."""
        self.paused = self._draining = False
        self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                frozen = self.paused and not self._draining
                if frozen or not (self._running or (self._waiting and not self.paused)):
                    await self._rest()
                    continue
                prefill, decode = self._plan()
                if not prefill and not decode:
                    await self._rest()
                    continue
                await self._step(prefill, decode)
        except Exception as error:
            for sequence in [*self._running, *self._waiting]:
                if not sequence.done.done():
                    sequence.done.set_exception(RuntimeError(f"the engine model failed: {error!r}"))
            raise

    async def _rest(self) -> None:
        self._resting = True
        self._at_rest.set()
        await self._wake.wait()
        self._resting = False

    def _plan(self) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Who computes how much in the next step; their blocks are allocated."""
        budget = self.max_batched_tokens
        decode: list[Sequence] = []
        for sequence in list(self._running):
            if sequence.uncomputed == 1 and sequence in self._running and self._has_room(sequence):
                decode.append(sequence)
                budget -= 1
        decode = [sequence for sequence in decode if sequence in self._running]
        prefill: list[tuple[Sequence, int]] = []
        for sequence in self._running:
            if sequence.uncomputed > 1 and budget > 0:
                prefill.append((sequence, min(budget, sequence.uncomputed)))
                budget -= prefill[-1][1]
        while self._waiting and budget > 0 and not self.paused and len(self._running) < self.max_sequences:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                break
            prefill.append((sequence, min(budget, sequence.uncomputed)))
            budget -= prefill[-1][1]
        return prefill, decode

    def _has_room(self, sequence: Sequence) -> bool:
        """A block for the next token; the youngest sequences give theirs up until there is one."""
        missing = blocks_for(sequence.computed + 1) - sequence.shared - sequence.private
        while missing > 0 and not self.cache.allocate(missing):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.private += max(missing, 0)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._running.remove(sequence)
        self._free(sequence)
        self._waiting.appendleft(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        target = len(sequence.prompt) + sequence.sampled
        # The last token is always computed: without it nothing can be sampled.
        hits = self.cache.hits(sequence.hashes[: (target - 1) // BLOCK])
        cached = sequence.hashes[:hits]
        missing = blocks_for(target) - hits
        if missing > self.cache.available - self.cache.idle(cached):
            return False
        self.cache.take(cached)
        self.cache.allocate(missing)
        sequence.shared, sequence.private, sequence.computed = hits, missing, hits * BLOCK
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hits * BLOCK
            self.prompt_tokens += len(sequence.prompt)
            self.cached_tokens += hits * BLOCK
        self._waiting.popleft()
        self._running.append(sequence)
        return True

    async def _step(self, prefill: list[tuple[Sequence, int]], decode: list[Sequence]) -> None:
        """One step, or many while only decoding goes on and nobody arrives."""
        timing = self.timing
        seconds = self.slowdown * (
            timing.base_s
            + timing.per_sequence_s * (len(decode) + len(prefill))
            + timing.per_cached_token_s * sum(sequence.computed for sequence in decode)
            + sum(count for _, count in prefill) / timing.prefill_tokens_per_s
        )
        steps = await self._elapse(seconds, 1 if prefill else self._leap(decode))
        self.busy_s += steps * seconds
        for sequence, count in prefill:
            self._compute(sequence, count, int(count == sequence.uncomputed))
        for sequence in decode:
            self._compute(sequence, steps, steps)

    def _leap(self, decode: list[Sequence]) -> int:
        """Steps until the first sequence ends or blocks run out; their blocks are allocated."""
        leap = self.stream_interval if any(sequence.streaming for sequence in decode) else LEAP
        steps = min([leap, *(len(s.answer.token_ids) - s.sampled for s in decode)])
        while steps > 1:
            missing = [blocks_for(s.computed + steps) - s.shared - s.private for s in decode]
            if self.cache.allocate(sum(count for count in missing if count > 0)):
                for sequence, count in zip(decode, missing, strict=True):
                    sequence.private += max(count, 0)
                break
            steps //= 2
        return max(steps, 1)

    async def _elapse(self, seconds: float, steps: int) -> int:
        """Wait for `steps` steps, or until something happens and the step under way ends; steps done."""
        if steps == 1:
            await asyncio.sleep(seconds)
            return 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(began + steps * seconds):
                await self._wake.wait()
            passed = loop.time() - began
            done = min(steps, int(passed / seconds) + 1)
            await asyncio.sleep(max(0.0, done * seconds - passed))
            return done
        return steps

    def _compute(self, sequence: Sequence, count: int, sampled: int) -> None:
        if sequence.finish_reason is not None:
            return  # cancelled meanwhile
        sequence.computed += count
        while (sequence.shared + 1) * BLOCK <= sequence.computed:
            self.cache.publish(sequence.hashes[sequence.shared])
            sequence.shared += 1
            sequence.private -= 1
        if sampled:
            start, sequence.sampled = sequence.sampled, sequence.sampled + sampled
            self.generated_tokens += sampled
            if sequence.shift:
                sequence.shifts += [sequence.shift()] * sampled
            if sequence.spans and sequence.spans[-1][0] == self.version:
                start = sequence.spans.pop()[1]
            sequence.spans.append((self.version, start, sequence.sampled))
            sequence.progress.set()
        if sequence.sampled == len(sequence.answer.token_ids):
            self._end(sequence, sequence.answer.finish_reason)

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        sequence.progress.set()
        if sequence in self._running:
            self._running.remove(sequence)
            self._free(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if not sequence.done.done():
            sequence.done.set_result(None)

    def _free(self, sequence: Sequence) -> None:
        self.cache.release(sequence.hashes[: sequence.shared], sequence.private)
        sequence.shared = sequence.private = sequence.computed = 0
