"""Environments with `reset` and `step`: what they are, and the handlers that play in them."""

from workers.handlers.environments.base import (
    Environment,
    EnvironmentFault,
    EnvironmentHandler,
    EnvironmentLost,
    EnvironmentTask,
    Opening,
    Step,
    ToolEnvironment,
)

__all__ = [
    "Environment",
    "EnvironmentFault",
    "EnvironmentHandler",
    "EnvironmentLost",
    "EnvironmentTask",
    "Opening",
    "Step",
    "ToolEnvironment",
]
