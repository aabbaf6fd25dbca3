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
        self.prompt, self.answer, self.asked = None, None, asyncio.Event()

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
        self._loop = asyncio.new_event_loop()

    def rows(self, env, args):
        """The tasks of an environment."""
        count = len(_rows(vf.load_environment(env, **args)))
        return [{"env": env, "index": place, "args": args, "old": True} for place in range(count)]

    def reset(self, task, seed):
        return self._loop.run_until_complete(self._reset(task))

    def step(self, text, calls):
        return self._loop.run_until_complete(self._step(text, calls))

    def score(self, messages):
        return self._loop.run_until_complete(self._score())

    async def _reset(self, task):
        self._env = vf.load_environment(task["env"], **task["args"])
        row = _rows(self._env)[task["index"]]
        row.setdefault("example_id", task["index"])
        self._policy, self._read = Policy(), 0
        self._rollout = asyncio.ensure_future(self._env.rollout(row, self._policy, "policy", {}))
        if not await self._asked():
            raise ValueError(
                f"{task['env']} ends before the model has said anything: {self._state.get('error')!r}"
            )
        shown = [
            {"type": "function", "function": tool.model_dump(exclude={"strict"})}
            for tool in self._policy.tools
        ]
        return {"messages": self._news(), "tools": shown}

    async def _asked(self):
        """Whether the environment asks for a turn; else it has come to its end."""
        waiting = asyncio.ensure_future(self._policy.asked.wait())
        await asyncio.wait([waiting, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._rollout.done():
            self._state = self._rollout.result()
            return False
        self._policy.asked.clear()
        return True

    def _news(self):
        """What the environment has said since the model did; it may not rewrite what was there."""
        prompt = [message if isinstance(message, dict) else dict(message) for message in self._policy.prompt]
        if self._read > len(prompt) or (self._read and prompt[self._read - 1]["role"] != "assistant"):
            raise ValueError("the environment rewrites what the model has read, which no trajectory can hold")
        new, self._read = prompt[self._read :], len(prompt) + 1
        names = ("role", "content", "tool_call_id")
        return [{name: one[name] for name in names if one.get(name) is not None} for one in new]

    async def _step(self, text, calls):
        made = [call for call in calls if "malformed" not in call]
        if calls and not made:
            return {"messages": [_wrong(call) for call in calls]}
        said = [
            ToolCall(id=c["id"], name=c["name"], arguments=json.dumps(c["arguments"])) for c in made
        ] or None
        reason = "tool_calls" if said else "stop"
        message = ResponseMessage(content=text, tool_calls=said, finish_reason=reason, is_truncated=False)
        answer = Response(id="turn", created=int(time.time()), model="policy", message=message)
        self._policy.answer.set_result(answer)
        if not await self._asked():
            return {"done": True}
        news = self._news()
        return {"messages": [_wrong(call) for call in calls if "malformed" in call] + news}

    async def _score(self):
        """What the rubric gives; a rollout that a limit ends is judged as one whose context is full."""
        if not self._rollout.done():
            self._policy.answer.set_exception(vf.OverlongPromptError("a limit ended the rollout"))
            await self._asked()
        state = self._state
        if state.get("error") is not None:
            raise state["error"]
        noted = await self._judged(state)
        reward, metrics = state["reward"], dict(state["metrics"] or {})
        if noted:
            known = [AssistantMessage(content=str(state.get("answer", "")))]
            state["completion"] = known
            if not state.get("answer") or await self._judged(state):
                raise RuntimeError(noted[0])
        return {"reward": reward, "parts": metrics}

    async def _judged(self, state):
        """Let the rubric judge; what it notes of functions that failed."""
        errors = Errors()
        logging.getLogger("verifiers").addHandler(errors)
        try:
            await self._env.rubric.score_rollout(state)
        finally:
            logging.getLogger("verifiers").removeHandler(errors)
        return errors.noted


def _wrong(call):
    return {"role": "tool", "content": f"Error: malformed tool call ({call['malformed']})"}
