"""The contract of weight updates; see `rollout.schema.policy`."""

from rollout.schema.policy import *  # noqa: F403
