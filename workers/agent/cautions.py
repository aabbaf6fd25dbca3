"""What a trainer is told before it trusts the log-probs of a trajectory."""

from __future__ import annotations

from rollout.schema import Backend, SamplingParams


def logprob_warnings(sampling: SamplingParams, mode: str | None) -> list[str]:
    """One line for each reason why a trainer's log-probs cannot match, or need care to.

    Measured in vLLM 0.32: raw log-probs are of the logits, processed ones of `logits / T` after
    top-k and top-p. A trainer computes them of the logits over the whole vocabulary.
    """
    lines = []
    temperature = sampling.temperature
    if mode is None:
        lines.append(
            "the backend does not say what its log-probs mean: register it with `logprobs_mode` "
            "(processed_logprobs is what a trainer can match)"
        )
    if temperature == 0:
        lines.append("temperature 0 samples greedily: its log-probs belong to no distribution sampled from")
    elif temperature != 1 and mode == "raw_logprobs":
        lines.append(
            f"raw log-probs ignore the temperature ({temperature:g}): start the engine with "
            "--logprobs-mode processed_logprobs"
        )
    elif temperature != 1:
        lines.append(
            f"sampled at temperature {temperature:g}: a trainer matches the log-probs only if it divides "
            "its logits by it"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        lines.append("top_p or top_k renormalise log-probs; a full-vocabulary trainer cannot match them")
    return lines


def takeover_warning(before: Backend, after: Backend, call: int) -> str | None:
    """A line where a backend took over whose log-probs mean something else; `call` counts from 1."""
    if before.logprobs_mode == after.logprobs_mode:
        return None
    return (
        f"from call {call} on the log-probs are {after.logprobs_mode or 'of unknown kind'} "
        f"(backend {after.id}), before {before.logprobs_mode or 'of unknown kind'} (backend {before.id})"
    )
