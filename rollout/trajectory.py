"""The record of what an engine read and sampled; see `rollout.schema.trajectory`."""

from rollout.schema.trajectory import *  # noqa: F403
