"""Prometheus metrics under vLLM's names, so that one scraper reads both kinds of backend."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BLOCK_SIZE = 16
"""Tokens; the cache has no blocks, but routers compute its capacity as blocks times this."""

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One registry per server; every series carries `model_name`."""

    def __init__(self, model_name: str, kv_capacity_tokens: int):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}

        def series(kind, name: str, text: str, **options):
            family = kind(f"vllm:{name}", text, list(self._labels), registry=self.registry, **options)
            return family.labels(**self._labels)

        self.running = series(Gauge, "num_requests_running", "Sequences in the batch.")
        self.waiting = series(Gauge, "num_requests_waiting", "Sequences that wait for a place in the batch.")
        self.kv_usage = series(Gauge, "kv_cache_usage_perc", "Share of the key-value cache in use, 0 to 1.")
        self.prompt_tokens = series(Counter, "prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = series(Counter, "generation_tokens", "Tokens sampled.")
        series(Counter, "num_preemptions", "Always 0: admission reserves what a sequence can need.")
        self.prefix_queries = series(
            Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        series(Counter, "prefix_cache_hits", "Always 0: this backend has no prefix cache.")
        self.first_token = series(
            Histogram, "time_to_first_token_seconds", "Arrival to first token.", buckets=SECONDS
        )
        self._latency = series(Histogram, "e2e_request_latency_seconds", "Arrival to end.", buckets=SECONDS)
        self._success = Counter(
            "vllm:request_success",
            "Sequences ended, by finish reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        size = {
            "block_size": str(BLOCK_SIZE),
            "num_gpu_blocks": str(kv_capacity_tokens // BLOCK_SIZE),
            "kv_cache_size_tokens": str(kv_capacity_tokens),
            "engine": "0",
        }
        info = "vllm:cache_config_info", "Size of the key-value cache."
        Gauge(*info, list(size), registry=self.registry).labels(**size).set(1)

    def ended(self, reason: str, seconds: float) -> None:
        """Count a sequence that ended (stop, length, abort, error) `seconds` after its arrival."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._latency.observe(seconds)
