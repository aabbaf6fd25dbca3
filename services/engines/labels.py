"""The one label of an engine's weights, where it serves several policies.

An engine has one label for all that it samples. One that serves several policies, each as an adapter, is
given the versions of all of them as its label: `a=3&b=7`. An empty version says that nothing may be sampled
from what the policy has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode

from rollout.schema import Backend

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
