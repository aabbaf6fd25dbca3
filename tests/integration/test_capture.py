"""Capture as a service: real Redis, gateway, workers and capture processes, vendors' clients, a scripted engine.

Every prompt that the engine saw is held, id by id, against what the trajectory says of the call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from rollout.schema import Agent, Limits, RolloutRequest, State
from tests.helpers.fake_engine import fake_engine
from tests.helpers.published import TOKENIZERS
from tests.helpers.stack import Stack

QWEN = TOKENIZERS / "qwen3"


def ask(base_url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0)
