"""Tasksets of verifiers from 0.4 on: their hooks run here, their commands in the rollout's sandbox."""

import asyncio
import base64
import itertools
import json
import math

from verifiers.v1 import (
    AgentConfig,
    AssistantMessage,
    ProgramResult,
    Request,
    Response,
    Runtime,
    SandboxError,
    SubprocessConfig,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Trace,
    UserMessage,
)
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
    return taskset_class(env)(taskset_config_type(env).model_validate({"id": env, **args}))


class Box(Runtime):
    """The rollout's sandbox, which the worker holds."""

    config = SubprocessConfig()

    def __init__(self, ask):
        super().__init__()
        self._ask = ask

    async def start(self):
        pass

    async def run(self, argv, env):
        return ProgramResult(**self._ask({"exec": list(argv), "env": self.process_env(env)}))

    async def _read(self, path, max_bytes=None):
        said = self._ask({"read": str(path), "max_bytes": max_bytes})
        if "refused" in said:
            raise SandboxError(f"read {path!r}: {said['refused']}")
        return base64.b64decode(said["content"])

    async def write(self, path, data):
        said = self._ask({"write": str(path), "content": base64.b64encode(data).decode()})
        if "refused" in said:
            raise SandboxError(f"write {path!r}: {said['refused']}")

    async def expose(self, port):
        raise NotImplementedError("no port of a rollout's sandbox is reached from outside")


class Episode:
    def __init__(self, ask):
        self._ask, self._tools = ask, {}
        self._loop = asyncio.new_event_loop()

    def rows(self, env, args):
        """The tasks of a taskset, each with the sandbox that it wants."""
        taskset, found = _taskset(env, args), []
        for place, task in enumerate(taskset.take(MAX_ROWS) if taskset.INFINITE else taskset):
            box = task.NEEDS_CONTAINER or task.data.image is not None
            wants = {"sandbox": box, "image": task.data.image, "workdir": task.data.workdir}
            found.append({"env": env, "index": place, "args": args, **wants})
        return found

    def reset(self, task, seed):
        return self._loop.run_until_complete(self._reset(task))

    def step(self, text, calls):
        return self._loop.run_until_complete(self._step(text, calls))

    def score(self, messages):
        return self._loop.run_until_complete(self._score())

    async def _reset(self, row):
        taskset = _taskset(row["env"], row["args"])
        task = next(itertools.islice(taskset, row["index"], None), None)
        if task is None:
            raise IndexError(f"{row['env']} has no task {row['index']}")
        data, self._task = task.data, task
        if data.prompt is None or ((task.NEEDS_CONTAINER or data.image) and not row["sandbox"]):
            lacks = "no prompt" if data.prompt is None else "no sandbox, which it needs (`sandbox`, `image`)"
            raise ValueError(f"task {row['index']} of {row['env']} has {lacks}")
        recorded = TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=AgentConfig())
        self._trace = Trace(task=recorded, state=state_cls(type(task))(), agent=agent)
        self._runtime = Box(self._ask).with_env(task.runtime_env())
        await invoke(task.setup, {"trace": self._trace, "runtime": self._runtime})
        offered = [shown for toolset in self._toolsets(taskset) for shown in await self._offer(toolset)]
        prompt = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
        if data.system_prompt:
            prompt.insert(0, SystemMessage(content=data.system_prompt))
        for message in prompt:
            self._add(message)
        shown = [message.model_dump(exclude_none=True, exclude={"tool_calls"}) for message in prompt]
        return {"messages": shown, "tools": offered}

    def _toolsets(self, taskset):
        return [*taskset.toolsets(taskset.config), *self._task.toolsets(self._task.config)]

    async def _offer(self, toolset):
        """The tools of a toolset, which is served to nobody but this episode."""
        from mcp.server.mcpserver import MCPServer

        if state_cls(type(toolset)) is not State:
            raise ValueError(f"{type(toolset).__name__} shares a state with its task, which is not done here")
        await toolset.setup()
        await toolset.setup_task(self._task.data)
        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        shown = []
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            self._tools[name] = server, tool.name
            parameters = tool.model_dump()["input_schema"]
            function = {"name": name, "description": tool.description or "", "parameters": parameters}
            shown.append({"type": "function", "function": function})
        return shown

    async def _called(self, call):
        """What a tool says. The worker has answered those of the sandbox, and what no call can be made of."""
        if "result" in call:
            return call["result"]
        if call["name"] not in self._tools:
            return f"Error: no tool {call['name']!r}; there are: {', '.join(self._tools) or 'none'}"
        server, name = self._tools[call["name"]]
        try:
            result = await server.call_tool(name, call["arguments"])
        except Exception as error:
            return f"Error: {error}"
        content = getattr(result, "content", result)
        return "\n".join(part.text for part in content if getattr(part, "text", None) is not None)

    def _add(self, message, sampled=False):
        nodes = self._trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    async def _step(self, text, calls):
        made = [call for call in calls if "malformed" not in call]
        said = [ToolCall(id=c["id"], name=c["name"], arguments=json.dumps(c["arguments"])) for c in made]
        message = AssistantMessage(content=text or None, tool_calls=said or None)
        self._add(message, sampled=True)
        reason = "tool_calls" if calls else "stop"
        self._trace.calls.append(ModelCall(node=len(self._trace.nodes) - 1, finish_reason=reason))
        response = Response(id="", created=0, model="policy", message=message, finish_reason=reason)
        if await self._stopped(Response, response):
            return {"done": True}
        answers = []
        for call in calls:
            if "malformed" in call:
                content = f"Error: malformed tool call ({call['malformed']})"
                answers.append({"role": "tool", "content": content})
                continue
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": await self._called(call)})
            self._add(ToolMessage(tool_call_id=call["id"], content=answers[-1]["content"], name=call["name"]))
        request = Request(messages=self._trace.messages)
        done = not calls or await self._stopped(Request, request)
        return {"messages": answers, "done": done}

    async def _stopped(self, boundary, value):
        """Whether a stop of the task's says so."""
        known = {"trace": self._trace, "task": self._task.data, Trace: self._trace, boundary: value}
        for stop in self._task.hooks("stop"):
            hints = [hint for hint in stop.__annotations__.values() if hint in (Request, Response)]
            if hints and boundary not in hints:
                continue
            said = invoke(stop, known)
            if await said if asyncio.iscoroutine(said) else said:
                self._trace.stop(stop.__name__)
                return True
        return False

    async def _score(self):
        """The weighted sum of the task's rewards, by its own hooks."""
        trace = self._trace
        trace.stop("agent_completed")
        await invoke(self._task.finalize, {"trace": trace, "runtime": self._runtime})
        await self._task.score(trace, self._runtime)
        if not trace.rewards or None in trace.rewards.values():
            raise ValueError(f"{type(self._task).__name__} gives no reward: {list(trace.rewards)}")
        parts = {name: reward.value for name, reward in trace.rewards.items()}
        parts.update({name: value for name, value in trace.metrics.items() if value is not None})
        return {"reward": trace.reward, "parts": {n: v for n, v in parts.items() if math.isfinite(v)}}
