"""What every handler needs, under one typed key of the application."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from services.inference.engine import Engine
from services.inference.metrics import Metrics
from services.inference.model import Model


@dataclass(frozen=True)
class Context:
    """The served model and its engine."""

    model: Model
    engine: Engine
    metrics: Metrics
    served_name: str
    """The name in `/v1/models` and in replies."""
    model_path: str
    """Directory of the model, where a worker on the same file system finds the tokenizer."""
    max_sequences: int
    kv_capacity_tokens: int


CONTEXT: web.AppKey[Context] = web.AppKey("context", Context)
