"""What it takes for one engine to serve several policies: one label of its weights, and adapters.

An engine has one label for all that it samples. One that serves several policies, each as an adapter, is
given the versions of all of them as its label: `a=3&b=7`. An empty version says that nothing may be sampled
from what the policy has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

from rollout.schema import Backend, PolicyRequest

MAX_VERSION = 128
"""Characters of a policy version, as in `POST /v1/policy`."""
MAX_LABEL = 64 * (65 + 12 * MAX_VERSION)
"""Characters of the label of an engine with 64 policies, whose versions are written with 12 for each."""


def is_shared(backend: Backend) -> bool:
    """Whether it serves several policies."""
    return len(backend.served) > 1


def joined(versions: Mapping[str, str]) -> str:
    """The label of an engine that serves these policies at these versions."""
    return urlencode(sorted(versions.items()))


def split(label: str) -> dict[str, str]:
    """What `joined` was given; nothing where the label is none of its own."""
    try:
        return dict(parse_qsl(label, keep_blank_values=True, strict_parsing=True, errors="strict"))
    except ValueError:
        return {}


def versions_of(backend: Backend, label: str | None) -> dict[str, str | None]:
    """Each policy's version by the label that the engine tells; None = unknown. Empty: it tells none."""
    if label is None or not is_shared(backend):
        told = label is not None and len(label) <= MAX_VERSION
        return dict.fromkeys(backend.served, label) if told else {}
    versions = split(label)
    return {policy: versions.get(policy) or None for policy in backend.served}


def misfit(backend: Backend, request: PolicyRequest) -> tuple[str, str] | None:
    """What speaks against bringing weights to a backend for its `policy`: a field, and why; None = nothing.

    They would reach other policies, or another model than the policy's rollouts are sampled from.
    """
    policy, model = backend.policy, backend.model
    whole = request.lora is None and (request.path is not None or request.transfer is not None)
    if whole and is_shared(backend):
        message = (
            f"backend {backend.id!r} serves several policies ({', '.join(backend.served)}), and a checkpoint "
            "would replace the weights of all: send an adapter, with `lora`"
        )
        return "lora", message
    if request.lora is not None and request.lora.name not in (None, model):
        message = (
            f"backend {backend.id!r} serves policy {policy!r} as model {model!r}, and {request.lora.name!r} "
            "is another: leave the name out, or register the backend with that model"
        )
        return "lora.name", message
    return None
