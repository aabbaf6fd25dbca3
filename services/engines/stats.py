"""What an LLM server says of its load, of its health and of the weights it serves."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from rollout.schema import Backend, BackendStats
from services.engines.address import Answer, ask, json_object, root, text_of
from services.engines.checks import as_version
from services.engines.credentials import refusal
from services.engines.labels import is_shared, versions_of

HEALTH_TIMEOUT_S = 5.0
"""An idle server answers in milliseconds; one that samples on all its cores has taken a second."""

MOST = 2.0**53
"""The most of a count; beyond it numbers have gaps."""

_NAMES = {
    "vllm": {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "kv_usage": "vllm:kv_cache_usage_perc",
        "prompt_tokens": "vllm:prefix_cache_queries_total",
        "cached_tokens": "vllm:prefix_cache_hits_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "requests": "vllm:e2e_request_latency_seconds_count",
        "request_seconds": "vllm:e2e_request_latency_seconds_sum",
    },
    "sglang": {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "kv_usage": "sglang:token_usage",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "cached_tokens": "sglang:cached_tokens_total",
        "generation_tokens": "sglang:generation_tokens_total",
        "requests": "sglang:e2e_request_latency_seconds_count",
        "request_seconds": "sglang:e2e_request_latency_seconds_sum",
    },
}
WEIGHT_ROUTES = {
    "vllm": ("/weight_info",),
    "embedded": ("/weight_info",),
    "sglang": ("/model_info", "/get_model_info"),
}
"""Where each engine names its weights; the second is of older servers."""


class ProbeError(Exception):
    """A server is not fit for calls; the text says why."""


def probe(backend: Backend, timeout_s: float = HEALTH_TIMEOUT_S) -> BackendStats:
    """Ask a server whether it is well, and how loaded it is.

    Args:
        timeout_s: For each of the two answers.

    Raises:
        ProbeError: It cannot be reached, is too slow, or says that it is not well.
    """
    if backend.api == "chat":
        # A provider has neither /health nor numbers for us, and may not list its models: it answers at all.
        answer = _ask(backend, "/v1/models", timeout_s)
        if answer.status < 500:
            return BackendStats(at=time.time())
    else:
        answer = _ask(backend, "/health", timeout_s)
    if answer.status != 200:
        raise ProbeError(_refused(backend, answer))
    return read_stats(backend, timeout_s)


def read_stats(backend: Backend, timeout_s: float = HEALTH_TIMEOUT_S) -> BackendStats:
    """The server's own metrics. What it does not tell, or not in time, is None."""
    try:
        answer = _ask(backend, "/metrics", timeout_s)
    except ProbeError:
        return BackendStats(at=time.time())
    return parse_stats(backend, answer.text if answer.status == 200 else "")


def parse_stats(backend: Backend, text: str) -> BackendStats:
    """Prometheus' text format; several engines of one server are added up, their cache usage is averaged."""
    fields = {name: field for field, name in _NAMES.get(backend.engine, _NAMES["vllm"]).items()}
    series: dict[str, list[float]] = defaultdict(list)
    for name, labels, value in samples(text):
        # With priorities SGLang repeats a number once for each of them.
        # What no count can be is as if it had not been told.
        if name in fields and not labels.get("priority") and 0 <= value <= MOST:
            series[fields[name]].append(value)
    usage = series.pop("kv_usage", None)
    values: dict[str, float] = {field: sum(numbers) for field, numbers in series.items()}
    seconds = values.pop("request_seconds", None)
    whole = {field: round(value) for field, value in values.items()}
    kv_usage = min(1.0, sum(usage) / len(usage)) if usage else None
    return BackendStats(at=time.time(), kv_usage=kv_usage, request_seconds=seconds, **whole)


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample; what comes after a broken line is left out."""
    # Whatever the parser makes of it: a probe must not end on what a server sends.
    with suppress(Exception):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value


def current_version(backend: Backend, timeout_s: float = HEALTH_TIMEOUT_S) -> str | None:
    """The version of the policy's weights that a server serves now; None when it is not told."""
    return current_versions(backend, timeout_s).get(backend.policy)


def current_versions(backend: Backend, timeout_s: float = HEALTH_TIMEOUT_S) -> dict[str, str | None]:
    """Each policy's version by `current_label`; None = not known. Empty when the server does not say.

    Raises:
        ProbeError: It cannot be reached.
    """
    return versions_of(backend, current_label(backend, timeout_s))


def current_label(backend: Backend, timeout_s: float = HEALTH_TIMEOUT_S) -> str | None:
    """The label of the weights a server has now: another than noted when it was started anew.

    None when it does not say (vLLM tells only with `VLLM_SERVER_DEV_MODE=1`).

    Raises:
        ProbeError: It cannot be reached, does not accept its key, or fails to say it for several policies.
    """
    for route in () if backend.api == "chat" else WEIGHT_ROUTES[backend.engine]:
        answer = _ask(backend, route, timeout_s)
        if answer.status == 200:
            return version_in(json_object(answer))
        if (answer.status == 401 and backend.key) or (answer.status >= 500 and is_shared(backend)):
            # /health is open to all, calls are not. And to say nothing of one policy would unname all.
            raise ProbeError(_refused(backend, answer))
    return None


def _ask(backend: Backend, path: str, timeout_s: float) -> Answer:
    url = root(backend.url) + path
    try:
        return ask("GET", url, timeout_s, backend.key)
    except requests.RequestException as error:
        raise ProbeError(f"{url}: {text_of(error)}") from error


def _refused(backend: Backend, answer: Answer) -> str:
    return f"{answer.url}: HTTP {answer.status}: {answer.text[:200]}{refusal(answer.status, backend.key)}"


def version_in(info: dict[str, Any]) -> str | None:
    """`weight_version`, the engine's label; None where it is not told, or is no version."""
    try:
        return as_version(info.get("weight_version"))
    except TypeError:
        return None
