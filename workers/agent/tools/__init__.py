"""Tools that a model may call; the names are those that published agents and their data use."""

from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext, by_name, sandbox_of
from workers.agent.tools.bash import BashArgs, ExecuteBash
from workers.agent.tools.editor import EditorArgs, StrReplaceEditor
from workers.agent.tools.finish import Finish, FinishArgs, Think, ThinkArgs
from workers.agent.tools.ipython import ExecuteIPythonCell, IPythonArgs

__all__ = [
    "Arguments",
    "BashArgs",
    "EditorArgs",
    "ExecuteBash",
    "ExecuteIPythonCell",
    "Finish",
    "FinishArgs",
    "IPythonArgs",
    "Observation",
    "StrReplaceEditor",
    "Think",
    "ThinkArgs",
    "Tool",
    "ToolContext",
    "by_name",
    "sandbox_of",
]
