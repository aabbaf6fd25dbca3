"""Tasksets of verifiers from 0.4 on: their hooks run here, their commands in the rollout's sandbox."""

import base64
import inspect
import itertools
import json
import math
import sys
from importlib.util import find_spec
from types import ModuleType

from pydantic import BaseModel

if find_spec("anthropic") is None:
    # It would be half of what importing verifiers takes, for the answers of a client that nobody calls here.
    sys.modules["anthropic"], sys.modules["anthropic.types"] = ModuleType("anthropic"), ModuleType("types")
    vars(sys.modules["anthropic.types"]).update(Message=BaseModel, Usage=BaseModel)

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.graph import MessageNode
from verifiers.v1.state import State, state_cls
from verifiers.v1.trace import AgentInfo, ModelCall, TraceTask
from verifiers.v1.utils.decorators import invoke
from verifiers.v1.utils.loaders import environment_class, taskset_class, taskset_config_type

MAX_ROWS = 1000
"""Of a taskset without an end."""


def _taskset(env, args):
    if environment_class(env) is not SingleAgentEnv:
        raise ValueError(
            f"{env} has an Env of its own, which plays several agents: no rollout does that here"
        )
    config = taskset_config_type(env).model_validate({"id": env, **args})
    plugged = [*config.task.stops.values(), *config.task.metrics.values(), *config.task.rewards.values()]
    if config.system_prompt or any(one.fn for one in plugged):
        raise ValueError("`args` of a task name no functions and no files of the worker's node")
    return taskset_class(env)(config)


class Box(vf.Runtime):
    """The rollout's sandbox, which the worker holds."""

    config = vf.SubprocessConfig()

    def __init__(self, ask):
        super().__init__()
        self._ask = ask

    async def start(self):
        pass

    async def run(self, argv, env):
        return vf.ProgramResult(**self._asked({"exec": list(argv), "env": self.process_env(env)}))

    async def _read(self, path, max_bytes=None):
        return base64.b64decode(self._asked({"read": str(path), "max_bytes": max_bytes})["content"])

    async def write(self, path, data):
        self._asked({"write": str(path), "content": base64.b64encode(data).decode()})

    def _asked(self, payload):
        said = self._ask(payload)
        if "refused" in said:
            raise vf.SandboxError(said["refused"])
        return said

    async def expose(self, port):
        raise NotImplementedError("no port of a rollout's sandbox is reached from outside")


class Episode:
    def __init__(self, ask):
        self._ask, self._tools = ask, {}

    def rows(self, env, args):
        """The tasks of a taskset, each with the sandbox that it wants."""
        taskset, found = _taskset(env, args), []
        for place, task in enumerate(taskset.take(MAX_ROWS) if taskset.INFINITE else taskset):
            box = task.NEEDS_CONTAINER or task.data.image is not None
            wants = {"sandbox": box, "image": task.data.image, "workdir": task.data.workdir}
            found.append({"env": env, "index": place, "args": args, **wants})
        return found

    async def reset(self, task, seed):
        """What the task's own setup leaves, and its prompt."""
        row, taskset = task, _taskset(task["env"], task["args"])
        self._task = task = next(itertools.islice(taskset, row["index"], None))
        data = task.data
        if data.prompt is None or ((task.NEEDS_CONTAINER or data.image) and not row["sandbox"]):
            lacks = "no prompt" if data.prompt is None else "no sandbox, which it needs (`sandbox`, `image`)"
            raise ValueError(f"task {row['index']} of {row['env']} has {lacks}")
        recorded = TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=vf.AgentConfig())
        self._trace = vf.Trace(task=recorded, state=state_cls(type(task))(), agent=agent)
        self._runtime = Box(self._ask).with_env(task.runtime_env())
        await invoke(task.setup, {"trace": self._trace, "runtime": self._runtime})
        toolsets = [*taskset.toolsets(taskset.config), *task.toolsets(task.config)]
        offered = [shown for toolset in toolsets for shown in await self._offer(toolset)]
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
        if data.system_prompt:
            prompt.insert(0, vf.SystemMessage(content=data.system_prompt))
        for message in prompt:
            self._add(message)
        shown = [message.model_dump(exclude_none=True, include={"role", "content"}) for message in prompt]
        return {"messages": shown, "tools": offered}

    async def _offer(self, toolset):
        """The tools of a toolset, which serves this episode alone."""
        from mcp.server.mcpserver import MCPServer

        if state_cls(type(toolset)) is not State:
            raise ValueError(f"{type(toolset).__name__} shares a state with its task, which is not done here")
        await toolset.setup()
        await toolset.setup_task(self._task.data)
        server, shown = MCPServer(toolset.server_name or type(toolset).__name__), []
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            self._tools[name] = server, tool.name
            parameters = tool.model_dump()["input_schema"]
            function = {"name": name, "description": tool.description or "", "parameters": parameters}
            shown.append({"type": "function", "function": function})
        return shown

    async def _called(self, call):
        """What a tool says; the worker has answered those of the sandbox."""
        if "result" in call:
            return call["result"]
        if call["name"] not in self._tools:
            return f"Error: no tool {call['name']!r}; there are: {', '.join(self._tools) or 'none'}"
        server, name = self._tools[call["name"]]
        try:
            result = await server.call_tool(name, call["arguments"])
        except Exception as error:
            return f"Error: {error}"
        return "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)

    def _add(self, message, sampled=False):
        nodes = self._trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    async def step(self, text, calls):
        trace, answers = self._trace, []
        said = [vf.ToolCall(id=c["id"], name=c["name"], arguments=json.dumps(c["arguments"])) for c in calls]
        message = vf.AssistantMessage(content=text or None, tool_calls=said or None)
        self._add(message, sampled=True)
        reason = "tool_calls" if calls else "stop"
        trace.calls.append(ModelCall(node=len(trace.nodes) - 1, finish_reason=reason))
        for call in calls:
            answers.append({"role": "tool", "content": await self._called(call)})
            answer = answers[-1]["content"]
            self._add(vf.ToolMessage(tool_call_id=call["id"], content=answer, name=call["name"]))
        response = vf.Response(id="", created=0, model="policy", message=message, finish_reason=reason)
        request = vf.Request(messages=trace.messages)
        known = {"trace": trace, "task": self._task.data}
        known |= {vf.Trace: trace, vf.Response: response, vf.Request: request}
        for stop in self._task.hooks("stop"):
            said = invoke(stop, known)
            if await said if inspect.isawaitable(said) else said:
                trace.stop(stop.__name__)
        return {"messages": answers, "done": not calls or trace.stop_condition is not None}

    async def score(self, messages):
        """The weighted sum of the task's rewards, by its own hooks."""
        trace = self._trace
        trace.stop("agent_completed")
        await invoke(self._task.finalize, {"trace": trace, "runtime": self._runtime})
        await self._task.score(trace, self._runtime)
        if not trace.rewards or None in trace.rewards.values():
            raise ValueError(f"{type(self._task).__name__} gives no reward: {list(trace.rewards)}")
        parts = {name: reward.value for name, reward in trace.rewards.items()} | trace.metrics
        shown = {name: value for name, value in parts.items() if value is not None and math.isfinite(value)}
        return {"reward": trace.reward, "parts": shown}
