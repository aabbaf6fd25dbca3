"""The contract of the HTTP API (pydantic models), shared by gateway, workers and client; a noun a file."""

from rollout.schema.agents import *  # noqa: F403
from rollout.schema.backends import *  # noqa: F403
from rollout.schema.base import *  # noqa: F403
from rollout.schema.batches import *  # noqa: F403
from rollout.schema.branches import *  # noqa: F403
from rollout.schema.fleet import *  # noqa: F403
from rollout.schema.forks import *  # noqa: F403
from rollout.schema.policy import *  # noqa: F403
from rollout.schema.reports import *  # noqa: F403
from rollout.schema.results import *  # noqa: F403
from rollout.schema.rollouts import *  # noqa: F403
from rollout.schema.trajectory import *  # noqa: F403
