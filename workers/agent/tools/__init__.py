"""Tools that a model may call; the names are those that published agents and their data use."""

from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext, by_name, sandbox_of
from workers.agent.tools.bash import BashArgs, ExecuteBash
from workers.agent.tools.editor import StrReplaceEditor
from workers.agent.tools.finish import Finish, Think
from workers.agent.tools.ipython import ExecuteIPythonCell

__all__ = [
    "Arguments",
    "BashArgs",
    "ExecuteBash",
    "ExecuteIPythonCell",
    "Finish",
    "Observation",
    "StrReplaceEditor",
    "Think",
    "Tool",
    "ToolContext",
    "by_name",
    "sandbox_of",
]
