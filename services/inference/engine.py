"""The engine thread: scheduling step by step, pausing, aborting, and swapping weights between steps.

Invariant: model, batch, queue and pause state belong to the engine thread. Other threads only leave
commands, which run between two steps; so a swap of weights or a change of the version label never falls
into a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Literal

import torch

from services.inference.errors import EngineError
from services.inference.metrics import Metrics
from services.inference.model import Model, apply_weights
from services.inference.sampling import draw
from services.inference.scheduler import Scheduler
from services.inference.scoring import score_prompt
from services.inference.sequence import Sequence, TokenEvent

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]

INITIAL_VERSION = "default"
"""vLLM's label of the weights a server started with."""


class Engine:
    """Serves sequences from one model in one thread. Public methods may be called from any thread."""

    def __init__(self, model: Model, scheduler: Scheduler, metrics: Metrics, loop: asyncio.AbstractEventLoop):
        self._model = model
        self._scheduler = scheduler
        self._metrics = metrics
        self._loop = loop
        self._version = INITIAL_VERSION
        self._paused: PauseMode | None = None
        self._drained: list[Future[None]] = []
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Abort what runs, end the thread, wait up to `timeout` seconds."""
        self._command(self._stop)
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """False when the thread has ended; the server is then unhealthy."""
        return self._thread.is_alive()

    @property
    def weight_version(self) -> str:
        return self._version

    @property
    def paused(self) -> bool:
        return self._paused is not None

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences; their listeners are called in the event loop. EngineError when it has ended."""
        if not self.alive:
            raise EngineError("the engine thread has ended; restart the backend")
        self._command(lambda: self._scheduler.add(sequences))

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End these sequences with finish_reason abort; those that ended already are left alone."""
        wanted = list(sequences)
        self._command(lambda: self._abort(wanted))

    def abort_ids(self, request_ids: Iterable[str]) -> None:
        """The same for all sequences of the given wire ids; unknown ids are ignored, as in vLLM."""
        wanted = set(request_ids)
        self._command(lambda: self._abort([s for s in self._scheduler.live() if s.request_id in wanted]))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling; resolved when nothing more will be sampled.

        abort ends everything queued or running; wait lets the running ones end; keep freezes them until
        `resume`. Requests that arrive meanwhile queue.
        """
        done: Future[None] = Future()
        self._command(lambda: self._pause(mode, done))
        return done

    def resume(self) -> Future[None]:
        """Sample again."""
        return self._call(self._resume)

    def set_version(self, version: str) -> Future[None]:
        """Label the tokens of all later steps with `version`."""
        return self._call(lambda: setattr(self, "_version", version))

    def swap_weights(self, tensors: dict[str, torch.Tensor]) -> Future[None]:
        """Copy checked tensors (from `read_checkpoint`) between two steps."""
        return self._call(lambda: apply_weights(self._model, tensors))

    # Everything below runs in the engine thread, but for _command and _call.

    def _command(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(action)
            self._wake.notify()

    def _call(self, action: Callable[[], Any]) -> Future[None]:
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._command(run)
        return done

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                with self._wake:
                    while not self._commands and not self._runnable():
                        self._wake.wait()
                    commands, self._commands = self._commands, []
                for command in commands:
                    command()
                if self._runnable():
                    self._step()
                self._report_load()

    def _runnable(self) -> bool:
        if self._paused is None:
            return self._scheduler.has_work
        return self._paused == "wait" and bool(self._scheduler.running)

    def _step(self) -> None:
        """Admit and prefill what fits, then one token for every running sequence."""
        try:
            if self._paused is None:
                admitted = self._scheduler.admit()
                if admitted:
                    self._prefill(admitted)
            if self._scheduler.running:
                self._decode()
        except Exception as error:
            # One bad step must not end the server: those it was for are told, the next ones start clean.
            log.exception("engine step failed")
            self._fail_running(f"the engine failed: {error!r}")
        if self._paused == "wait":
            self._settle_drained()

    def _prefill(self, admitted: list[Sequence]) -> None:
        batch = self._scheduler.batch
        hidden = batch.prefill([s.prompt_ids for s in admitted], self._scheduler.reserved_columns)
        for row, sequence in enumerate(admitted):
            most = sequence.params.prompt_logprobs
            if most is not None:
                sequence.prompt_logprobs = score_prompt(batch.head, hidden[row], sequence.prompt_ids, most)
        last = torch.tensor([len(s.prompt_ids) - 1 for s in admitted])
        logits = batch.head(hidden[torch.arange(len(admitted)), last])
        tokens = sum(len(s.prompt_ids) for s in admitted)
        self._metrics.prompt_tokens.inc(tokens)
        self._metrics.prefix_queries.inc(tokens)
        self._extend(admitted, logits)

    def _decode(self) -> None:
        running = list(self._scheduler.running)
        logits = self._scheduler.batch.decode([s.token_ids[-1] for s in running])
        self._extend(running, logits)

    def _extend(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Sample one token for each sequence, row by row of `logits`, and tell the listeners."""
        sampled = draw(logits, [s.params for s in sequences], [s.rng for s in sequences])
        now = time.monotonic()
        for i, sequence in enumerate(sequences):
            if sequence.first_token_at is None:
                self._metrics.first_token.observe(now - sequence.arrived)
            sequence.append(
                sampled.token_ids[i], sampled.logprobs[i], sampled.ranks[i], sampled.tops[i], self._version
            )
        self._metrics.generation_tokens.inc(len(sequences))
        ended = [s for s in sequences if s.finished]
        self._scheduler.drop(ended)
        self._count_ended(ended)
        self._tell([s for s in sequences if s.finished or s.streaming])

    def _tell(self, sequences: list[Sequence]) -> None:
        """One wake-up of the event loop for all listeners of a step."""
        if not sequences:
            return
        events = [(s.listener, TokenEvent(s, len(s.token_ids), s.finished)) for s in sequences]

        def deliver() -> None:
            for listener, event in events:
                listener(event)

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop has closed: nobody waits any more
            self._stopping = True

    def _count_ended(self, ended: list[Sequence]) -> None:
        now = time.monotonic()
        for sequence in ended:
            self._metrics.ended(sequence.finish_reason or "")
            self._metrics.latency.observe(now - sequence.arrived)

    def _abort(self, sequences: Iterable[Sequence]) -> None:
        live = [s for s in sequences if not s.finished]
        for sequence in live:
            sequence.finish("abort")
        self._scheduler.drop(live)
        self._count_ended(live)
        self._tell(live)
        if self._paused == "wait":
            self._settle_drained()

    def _fail_running(self, message: str) -> None:
        failed = list(self._scheduler.running)
        for sequence in failed:
            sequence.error = message
            sequence.finish("error")
        self._scheduler.reset_running()
        self._count_ended(failed)
        self._tell(failed)

    def _pause(self, mode: PauseMode, done: Future[None]) -> None:
        self._paused = mode
        if mode == "abort":
            self._abort(self._scheduler.live())
        if mode == "wait" and self._scheduler.running:
            self._drained.append(done)
        else:
            done.set_result(None)

    def _settle_drained(self) -> None:
        if not self._scheduler.running:
            while self._drained:
                self._drained.pop().set_result(None)

    def _resume(self) -> None:
        self._paused = None
        # Whoever still waits for a drain that a resume has overtaken is told that it will not come.
        while self._drained:
            self._drained.pop().set_exception(EngineError("resumed before the pause was complete"))

    def _stop(self) -> None:
        self._stopping = True
        self._abort(self._scheduler.live())

    def _report_load(self) -> None:
        self._metrics.running.set(len(self._scheduler.running))
        self._metrics.waiting.set(self._scheduler.waiting)
        self._metrics.kv_usage.set(self._scheduler.kv_usage)
