"""What a trainer installs: the wire contract, the client and the command line.

Nothing in this package imports Flask, Celery, Redis or torch.
"""

from rollout.schema import (
    Blame,
    Chain,
    ForkPoint,
    ForkRequest,
    Limits,
    Rollout,
    RolloutRequest,
    SamplingParams,
    Segment,
    Stage,
    State,
    Trajectory,
    Webhook,
)

__all__ = [
    "AsyncClient",
    "Blame",
    "Chain",
    "Client",
    "ForkPoint",
    "ForkRequest",
    "Limits",
    "Rollout",
    "RolloutRequest",
    "SamplingParams",
    "Segment",
    "Stage",
    "State",
    "Trajectory",
    "Webhook",
    "WebhookError",
    "__version__",
    "verify_webhook",
]
__version__ = "0.2.0"


def __getattr__(name: str):
    # The clients pull in httpx (50 ms); workers and gateway import this package without it.
    if name in ("Client", "AsyncClient"):
        from rollout import client

        return getattr(client, name)
    if name in ("verify_webhook", "WebhookError"):
        from rollout import webhooks

        return getattr(webhooks, name)
    raise AttributeError(f"module 'rollout' has no attribute {name!r}")
