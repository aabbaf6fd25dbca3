"""What an engine is told when its weights change: pause, load, label, resume, and a canary's question.

The routes are an operator's (vLLM: `VLLM_SERVER_DEV_MODE=1`): with a key, or on private networks only.
Every step but `receive` may be repeated, because another worker may have to begin again where one was killed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import requests

from rollout.policy import PauseMode, WeightTransfer
from rollout.schema import Backend
from services.engines import engine_of
from services.engines.address import Answer, ask, json_object, root, text_of
from services.engines.base import BrokenAnswer
from services.engines.credentials import refusal

GIVE_UP_S = 10.0
"""Time limit of the calls that leave an engine safe after the update's own limit has passed."""
_SHOWN = 300
"""Characters of an engine's answer in an error message."""
_GO_ON = {"flush_cache": False, "abort_all_requests": False}
"""What SGLang is told with new weights; its defaults are others."""


class ControlError(Exception):
    """A step failed; the message names the backend, the step and what the engine said.

    `harmless`: the engine vouches that its weights are as they were.
    """

    def __init__(self, message: str, status: int | None = None, *, harmless: bool = False) -> None:
        super().__init__(message)
        self.status, self.harmless = status, harmless
        """HTTP status, or None if there was no answer."""


def control_of(backend: Backend, timeout_s: float) -> Control:
    """The steps for one backend, which together may take so many seconds."""
    if backend.engine == "sglang":
        return SGLangControl(backend, timeout_s)
    return VllmControl(backend, timeout_s)


class Control(ABC):
    """The steps of one engine, under a common deadline. Each raises `ControlError`."""

    missing = ""
    """What to do when a route is not there."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self.backend = backend
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._root = root(backend.url)

    @abstractmethod
    def pause(self, mode: PauseMode, *, reset: bool) -> None:
        """Stop sampling; returns when calls under way are frozen, have ended or were ended.

        `reset` says that `reset_cache` will follow.
        """

    @abstractmethod
    def load(self, path: str, version: str) -> None:
        """Load the checkpoint in a directory."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget what the old weights computed, for calls under way too."""

    @abstractmethod
    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter in place of the one of that name."""

    @abstractmethod
    def connect(self, transfer: WeightTransfer) -> None:
        """Join the trainer's group, which waits for all its members. The weights stay as they are."""

    @abstractmethod
    def receive(self, transfer: WeightTransfer) -> None:
        """Take the weights that the trainer sends at this time. May not be repeated: they come once."""

    @abstractmethod
    def label(self, version: str) -> None:
        """Give later tokens this version."""

    @abstractmethod
    def resume(self) -> None:
        """Sample again."""

    @abstractmethod
    def give_up(self) -> None:
        """End the calls under way and sample nothing more, so that no token comes from unknown weights."""

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each id but the first, given those before it."""
        engine = engine_of(self.backend)
        call = engine.score(token_ids)
        try:
            return engine.read_score(self._post(call.path, call.body), token_ids)
        except BrokenAnswer as error:
            raise ControlError(f"the canary was not answered: {error}") from error

    def _post(
        self, path: str, body: Any = None, *, limit_s: float | None = None, **query: str
    ) -> dict[str, Any]:
        rest_s = limit_s if limit_s is not None else self._deadline - time.monotonic()
        where = f"backend {self.backend.id}: POST {path}"
        if rest_s <= 0:
            raise ControlError(f"{where}: not begun, the update's {self._timeout_s:g} s are over")
        try:
            answer = ask("POST", self._root + path, rest_s, self.backend.key, json=body, params=query)
        except requests.Timeout as error:
            raise ControlError(f"{where}: no answer within {rest_s:.3g} s ({type(error).__name__})") from None
        except requests.RequestException as error:
            raise ControlError(f"{where}: {text_of(error)}") from None
        if 200 <= answer.status < 300:
            # Engines answer some routes with nothing, or with a word.
            return json_object(answer)
        message = (
            f"{where}: HTTP {answer.status}: {_reason(answer)}{refusal(answer.status, self.backend.key)}"
        )
        if answer.status in (404, 405):
            message += self.missing
        raise ControlError(message, answer.status)


class VllmControl(Control):
    """vLLM from 0.20 on, checked against 0.32; the embedded backend has the same routes.

    A paused vLLM queues every request, so the canary can only be asked after `resume`.
    """

    missing = (
        "; start vLLM with VLLM_SERVER_DEV_MODE=1, and for adapters and transfers as docs/policy.md says"
    )

    def pause(self, mode: PauseMode, *, reset: bool) -> None:
        # `clear_cache` would throw away, in two modes of three, what `reset` alone decides on.
        self._post("/pause", mode=mode, clear_cache="false")

    def load(self, path: str, version: str) -> None:
        self._end_broken()
        try:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        except ControlError as error:
            # vLLM reports a missing directory as a bad name on a model hub.
            message = f"{error}. Is {path} a checkpoint that this server sees?"
            # The embedded backend checks everything before it changes anything; vLLM does not say, and dies
            # at its next step if it is resumed after a reload that failed.
            harmless = self.backend.engine == "embedded" and error.status == 400
            raise ControlError(message, error.status, harmless=harmless) from error

    def _end_broken(self) -> None:
        """vLLM 0.32 would take what has come of a sending that broke off for a part of the next weights."""
        if not self.backend.healthy:
            for step in ("/start_weight_update", "/finish_weight_update"):
                with suppress(ControlError):
                    self._post(step, {})

    def reset_cache(self) -> None:
        # Frozen calls hold blocks; only preempted ones let go of what the old weights computed.
        answer = self._post("/reset_prefix_cache", reset_running_requests="true")
        if answer.get("success") is False:
            raise ControlError(f"backend {self.backend.id}: the prefix cache could not be reset")

    def load_adapter(self, name: str, path: str) -> None:
        try:
            self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": True})
        except ControlError as error:
            # It has found none there (or has no such route), and goes on with the one that it has.
            error.harmless = error.status == 404
            raise

    def connect(self, transfer: WeightTransfer) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": transfer.init_info_of(self.backend.id)})

    def receive(self, transfer: WeightTransfer) -> None:
        self._end_broken()
        try:
            # With a body: some versions read one, and those that do not ignore it.
            self._post("/start_weight_update", {})
        except ControlError as error:
            error.harmless = error.status in (404, 405)
            raise
        self._post("/update_weights", {"update_info": transfer.update_info})
        self._post("/finish_weight_update", {})

    def label(self, version: str) -> None:
        self._post("/update_weight_version", {"new_version": version})

    def resume(self) -> None:
        self._post("/resume")

    def give_up(self) -> None:
        self._post("/pause", limit_s=GIVE_UP_S, mode="abort", clear_cache="false")


class SGLangControl(Control):
    """SGLang, by its source (`http_server.py`, `io_struct.py`, `tokenizer_manager.py`); never run here.

    It has no `wait`: an update without a pause takes the writer's lock, which waits for the calls under way
    and keeps new ones out.
    """

    def pause(self, mode: PauseMode, *, reset: bool) -> None:
        if mode == "wait":
            return
        # `in_place` freezes calls with their cache, which then cannot be flushed; `retract` lets go of it.
        frozen = "retract" if reset else "in_place"
        self._post("/pause_generation", {"mode": "abort" if mode == "abort" else frozen})

    def load(self, path: str, version: str) -> None:
        body = {"model_path": path, "weight_version": version, **_GO_ON}
        self._post("/update_weights_from_disk", body)

    def reset_cache(self) -> None:
        self._post("/flush_cache")

    def load_adapter(self, name: str, path: str) -> None:
        why = f"SGLang cannot exchange adapter {name!r} in place; send whole weights"
        raise ControlError(f"backend {self.backend.id}: {why}", harmless=True)

    def connect(self, transfer: WeightTransfer) -> None:
        self._post("/init_weights_update_group", transfer.init_info_of(self.backend.id))

    def receive(self, transfer: WeightTransfer) -> None:
        if transfer.backend != "nccl":
            raise ControlError(f"backend {self.backend.id}: SGLang takes weights by nccl only", harmless=True)
        body = {**(transfer.update_info or {}), **_GO_ON}
        self._post("/update_weights_from_distributed", body)

    def label(self, version: str) -> None:
        # Its default is to abort every call.
        self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def resume(self) -> None:
        self._post("/continue_generation", {})

    def give_up(self) -> None:
        self._post("/pause_generation", {"mode": "abort"}, limit_s=GIVE_UP_S)


def _reason(answer: Answer) -> str:
    """An engine's own words for an error."""
    fields = json_object(answer)
    text = fields.get("error", fields.get("detail", fields.get("message")))
    if isinstance(text, dict):
        text = text.get("message")
    return str(text or answer.text or answer.reason)[:_SHOWN]
