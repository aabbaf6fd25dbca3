"""Which wire format a backend is called in."""

from __future__ import annotations

from rollout.schema import Backend, EngineApi
from services.engines.base import Engine
from services.engines.sglang import SGLang
from services.engines.vllm import VllmCompletions, VllmGenerate

ENGINES: dict[EngineApi, type[VllmGenerate] | type[VllmCompletions] | type[SGLang]] = {
    "generate": VllmGenerate,
    "completions": VllmCompletions,
    "sglang": SGLang,
}


def engine_of(backend: Backend) -> Engine:
    """The engine for all calls to a backend. The embedded backend speaks vLLM's formats."""
    return ENGINES[backend.api](backend)
