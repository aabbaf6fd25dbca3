"""What a capture process counts; `/metrics` shows it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

registry = CollectorRegistry()


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"rollout_capture_{name}", text, labels, registry=registry)


CALLS = _counter("calls", "Model calls of programs that ended, by dialect and outcome.", "dialect", "outcome")
ATTACHED = _counter("attached", "Calls that went on from a stored conversation, id by id.")
BRANCHES = _counter("branches", "Calls whose prompt was rendered from its beginning.")
UNBRIDGED = _counter("unbridged", "Calls that repeated a conversation to which their format cannot append.")
JOINED = _counter("joined", "Repeated calls that got the answer of the first.")
STOPPED = _counter("stopped", "Calls past a limit, answered without the model.", "limit")
REFUSED = _counter("refused", "Calls that never came as far as the model.", "reason")
GONE = _counter("gone", "Programs that went away before they had their answer.")
MISSHOWN = _counter("misshown", "Streamed answers that turned out to say something else than was shown.")
TOKENS = _counter("sampled_tokens", "Ids sampled for programs.")
SECONDS = Histogram(
    "rollout_capture_call_seconds",
    "Seconds from a call's beginning to its written turn.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
    registry=registry,
)
IN_FLIGHT = Gauge("rollout_capture_in_flight", "Calls whose programs wait now.", registry=registry)
