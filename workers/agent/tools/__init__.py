"""Tools that a model may call; the names are those that published agents and their data use."""

from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext, by_name
from workers.agent.tools.bash import BashArgs, ExecuteBash
from workers.agent.tools.finish import Finish, FinishArgs

__all__ = [
    "Arguments",
    "BashArgs",
    "ExecuteBash",
    "Finish",
    "FinishArgs",
    "Observation",
    "Tool",
    "ToolContext",
    "by_name",
]
