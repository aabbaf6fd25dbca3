"""Environments of verifiers before 0.4: the package drives the rollout, and its client asks for the turns.

A reward function that raises is worth 0 to the package, which notes an error. Here it is a failure, but where
the function is content with the task's own answer, so that what the agent said is to blame.
"""

import asyncio
import json
import logging
import time

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import AssistantMessage, Response, ResponseMessage, ToolCall


class Errors(logging.Handler):
    """What the package notes of functions that failed."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.noted = []

    def emit(self, record):
        self.noted.append(record.getMessage())


class Policy(Client):
    """The model: an answer is awaited until the worker brings it."""

    def __init__(self):
        super().__init__(None)
        self.asked = asyncio.Event()

    async def get_response(self, prompt, model, sampling_args, tools=None, **more):
        self.prompt, self.tools = prompt, tools or []
        self.answer = asyncio.get_running_loop().create_future()
        self.asked.set()
        return await self.answer

    async def _unused(self, *_):
        raise NotImplementedError

    setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
    raise_from_native_response = from_native_response = close = _unused


def _rows(env):
    return env.get_dataset() if env.dataset is not None else env.get_eval_dataset()


class Episode:
    def __init__(self, ask):
        """Nothing is asked of the worker."""

    def rows(self, env, args):
        count = len(_rows(vf.load_environment(env, **args)))
        return [{"env": env, "index": place, "args": args, "old": True} for place in range(count)]

    async def reset(self, task, seed):
        self._env = vf.load_environment(task["env"], **task["args"])
        row = {"example_id": task["index"], **_rows(self._env)[task["index"]]}
        self._policy, self._read = Policy(), 0
        self._rollout = asyncio.ensure_future(self._env.rollout(row, self._policy, "policy", {}))
        if not await self._asked():
            raise ValueError(
                f"{task['env']} ends before the model's first turn: {self._state.get('error')!r}"
            )
        tools = [tool.model_dump(exclude={"strict"}) for tool in self._policy.tools]
        return {"messages": self._news(), "tools": [{"type": "function", "function": tool} for tool in tools]}

    async def _asked(self):
        """Whether the environment asks for a turn; else it has come to its end."""
        waiting = asyncio.ensure_future(self._policy.asked.wait())
        await asyncio.wait([waiting, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._policy.asked.clear()
        if self._rollout.done():
            self._state = self._rollout.result()
        return not self._rollout.done()

    def _news(self):
        """What the environment has said since the model did; it may not rewrite what was there."""
        prompt = [message if isinstance(message, dict) else dict(message) for message in self._policy.prompt]
        if self._read > len(prompt) or (self._read and prompt[self._read - 1]["role"] != "assistant"):
            raise ValueError("the environment rewrites what the model has read, which no trajectory can hold")
        new, self._read = prompt[self._read :], len(prompt) + 1
        return [{"role": one["role"], "content": one.get("content") or ""} for one in new]

    async def step(self, text, calls):
        said = [
            ToolCall(id=c["id"], name=c["name"], arguments=json.dumps(c["arguments"])) for c in calls
        ] or None
        reason = "tool_calls" if said else "stop"
        message = ResponseMessage(content=text, tool_calls=said, finish_reason=reason, is_truncated=False)
        answer = Response(id="turn", created=int(time.time()), model="policy", message=message)
        self._policy.answer.set_result(answer)
        return {"messages": self._news()} if await self._asked() else {"done": True}

    async def score(self, messages):
        """What the rubric gives; a rollout that a limit ends is judged as one whose context is full."""
        if not self._rollout.done():
            self._policy.answer.set_exception(vf.OverlongPromptError("a limit ended the rollout"))
            await self._asked()
        state = self._state
        if state.get("error") is not None:
            raise state["error"]
        noted, reward, parts = await self._judged(state), state["reward"], state["metrics"]
        if noted:
            state["completion"] = [AssistantMessage(content=str(state.get("answer", "")))]
            if not state.get("answer") or await self._judged(state):
                raise RuntimeError(noted[0])
        return {"reward": reward, "parts": dict(parts or {})}

    async def _judged(self, state):
        """Let the rubric judge; what it notes of functions that failed."""
        errors, log = Errors(), logging.getLogger("verifiers")
        log.addHandler(errors)
        try:
            await self._env.rubric.score_rollout(state)
        finally:
            log.removeHandler(errors)
        return errors.noted
