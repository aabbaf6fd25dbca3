"""LLM servers as the service knows them: what they are told, what they answer, what they say of themselves.

Nothing here does I/O for a model call: an `Engine` builds the request and reads the answer, so that workers
(asynchronous) and services (synchronous) share it.
"""

from __future__ import annotations

from rollout.schema import Backend, EngineApi
from services.engines.chat import Chat
from services.engines.sglang import SGLang
from services.engines.vllm import VllmCompletions, VllmGenerate
from services.engines.wire import Engine

ENGINES: dict[EngineApi, type[Engine]] = {
    "generate": VllmGenerate,
    "completions": VllmCompletions,
    "sglang": SGLang,
    "chat": Chat,
}


def engine_of(backend: Backend) -> Engine:
    """The engine for all calls to a backend. The embedded backend speaks vLLM's formats."""
    return ENGINES[backend.api](backend)
