"""Prometheus metrics under vLLM's names, so that one scraper reads both kinds of backend."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BLOCK_SIZE = 16
"""Tokens; the cache has no blocks, but routers compute its capacity as blocks times this."""

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One registry per server; every series carries `model_name`."""

    def __init__(self, model_name: str, kv_capacity_tokens: int):
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}
        names = list(labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, names, registry=self.registry).labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, names, registry=self.registry).labels(**labels)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}", text, names, buckets=_SECONDS, registry=self.registry).labels(
                **labels
            )

        self.running = gauge("num_requests_running", "Sequences in the batch.")
        self.waiting = gauge("num_requests_waiting", "Sequences that wait for a place in the batch.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the key-value cache in use, 0 to 1.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = counter("generation_tokens", "Tokens sampled.")
        self.preemptions = counter(
            "num_preemptions", "Always 0: admission reserves what a sequence can need."
        )
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Always 0: this backend has no prefix cache.")
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.latency = histogram("e2e_request_latency_seconds", "Arrival to end.")
        self._success = Counter(
            "vllm:request_success",
            "Sequences ended, by finish reason.",
            [*names, "finished_reason"],
            registry=self.registry,
        )
        self._labels = labels
        info = Gauge(
            "vllm:cache_config_info",
            "Size of the key-value cache.",
            ["block_size", "num_gpu_blocks", "kv_cache_size_tokens", "engine"],
            registry=self.registry,
        )
        blocks = str(kv_capacity_tokens // BLOCK_SIZE)
        info.labels(str(BLOCK_SIZE), blocks, str(kv_capacity_tokens), "0").set(1)

    def ended(self, reason: str) -> None:
        """Count one sequence that ended with `reason` (stop, length, abort, error)."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
