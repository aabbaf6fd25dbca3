"""The contract of batches; see `rollout.schema.batches`."""

from rollout.schema.batches import *  # noqa: F403
