"""Task suites of foreign packages: `verifiers`, `tau2` and `bfcl`. A task is a place in one of their sets."""

from __future__ import annotations

import base64
import shlex
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from rollout.image_names import local_name
from rollout.trajectory import FinishReason, ToolCall
from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from workers.agent.tools import ExecuteBash, StrReplaceEditor, Tool, ToolContext
from workers.handlers.base import EvalContext, InitContext, Reward, RunContext
from workers.handlers.environments.base import REWARD, EnvironmentFault, EnvironmentTask, Opening, TaskT
from workers.handlers.environments.process import INSIDE, Foreign, ProcessEnvironment, ProcessHandler
from workers.handlers.oracle import NoOracle

NO_EXIT_CODE = 124
"""Of a program that did not end by itself, as `timeout` has it."""


class SuiteTask(EnvironmentTask):
    """A place in a set of a package; `rollout environments rows` writes them."""

    env: str = Field(min_length=1, max_length=200)
    """Its set: the id or module of an environment, a domain of tau2, a category of BFCL."""
    index: int = Field(0, ge=0, le=10_000_000)
    """Place in the set, from 0."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to what makes the set."""


class SolvedHandler(ProcessHandler[TaskT]):
    """A kind of environment whose package knows solutions; see `workers/handlers/oracle.py`."""

    def known(self, task: TaskT) -> TaskT:
        """The task as its solution is played."""
        return task

    async def solve(self, ctx: RunContext[TaskT]) -> FinishReason:
        """Play the package's own solution, in the place of the turns of a model."""
        episode = await self.make(ctx)
        try:
            await episode.reset(self.known(ctx.task), self.seed(ctx))
            turns = await episode.solution()
            if turns is None:
                raise NoOracle(f"{self.name} knows no solution of this task")
            for turn in turns:
                await episode.step(turn)
            ctx.metrics |= episode.noted(await episode.score(ctx.agent.trajectory))
        finally:
            await episode.close()
        return FinishReason.STOP


class Tau2Task(SuiteTask):
    """A task of a domain of tau2 (`mock`, `airline`, `retail`)."""

    solo: bool = False
    """Whether the agent works on the task's ticket, without a user; the evaluator is the same."""
    user: Literal["simulator", "obliging"] = "simulator"
    """The deployment's simulator, or, for checks, one that asks for help and takes any answer."""


class Tau2(SolvedHandler[Tau2Task]):
    """Serves a user of tau2, with its policy and tools, judged by its evaluator."""

    name = "tau2"
    Task = Tau2Task
    foreign = Foreign("tau2", INSIDE / "tau2.py")

    def known(self, task: Tau2Task) -> Tau2Task:
        return task.model_copy(update={"user": "obliging"})


class Bfcl(SolvedHandler[SuiteTask]):
    """Calls the APIs of a multi-turn entry of BFCL, over the turns of its user; its checker judges."""

    name = "bfcl"
    Task = SuiteTask
    # Its APIs live in globals of the package, by the name of the entry.
    foreign = Foreign("bfcl", INSIDE / "bfcl.py", reusable=False)


class VerifiersTask(SuiteTask):
    """A task of a taskset of verifiers, or of an environment of its releases before 0.4."""

    old: bool = False
    """Whether it is of a release before 0.4 (`load_environment`)."""
    sandbox: bool = False
    """Whether the agent works in a sandbox, in which the taskset's own commands run, too."""
    image: str | None = Field(None, max_length=500)
    workdir: str | None = Field(None, max_length=1000)


class Verifiers(ProcessHandler[VerifiersTask]):
    """Works on a task of verifiers; its rewards are those of the task's own hooks, or of its rubric."""

    name = "verifiers"
    Task = VerifiersTask
    foreign = Foreign("verifiers", INSIDE / "verifiers.py")
    before = Foreign("verifiers-old", INSIDE / "verifiers_old.py")

    async def init(self, ctx: InitContext[VerifiersTask]) -> None:
        if ctx.task.sandbox:
            image = local_name(ctx.task.image) if ctx.task.image else self.image
            await ctx.sandboxes.boot(ctx, image=image, limits=self.limits)

    async def evaluate(self, ctx: EvalContext[VerifiersTask]) -> Reward:
        if REWARD not in ctx.metrics and ctx.finish_reason is FinishReason.SANDBOX_LIMIT:
            return Reward(0.0)  # the agent's doing, by which it must not drop its sample
        return await super().evaluate(ctx)

    async def make(self, ctx: RunContext[VerifiersTask]) -> ProcessEnvironment:
        return ProcessEnvironment(self.before, ctx) if ctx.task.old else Taskset(self.foreign, ctx)


class Taskset(ProcessEnvironment):
    """A task of a taskset. Its hooks reach the rollout's sandbox, by `exec` alone, and the agent by tools."""

    tools: tuple[Tool, ...] = (ExecuteBash(), StrReplaceEditor())

    def __init__(self, kind: Foreign, ctx: RunContext[VerifiersTask]) -> None:
        super().__init__(kind, ctx)
        self._box, self._workdir, self._limits = ctx.sandbox, ctx.task.workdir, ctx.limits

    async def reset(self, task: Any, seed: int) -> Opening:
        opening = await super().reset(task, seed)
        if self._box is not None:
            opening.tools += [tool.spec() for tool in self.tools]
            if self._workdir is not None:
                await self._box.bash(f"cd {shlex.quote(self._workdir)}")
        return opening

    async def told(self, call: ToolCall) -> dict[str, Any]:
        """A call with what the tool of the sandbox says to it, where it is one of those."""
        told = await super().told(call)
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is not None and self._box is not None:
            context = ToolContext(self._box, self._limits.tool_timeout_s, call.id)
            told["result"] = (await tool(call.arguments, context)).text
        return told

    async def answer(self, payload: dict[str, Any]) -> Any:
        """What a hook wants of the sandbox: a program's end, a file's content, a file written."""
        if self._box is None:
            raise EnvironmentFault("the task's hooks ask for a sandbox: `sandbox: true`")
        try:
            return await self._done(self._box, payload)
        except SandboxRequestError as error:
            return {"refused": str(error)}
        except (LookupError, TypeError, ValueError) as error:
            raise EnvironmentFault(f"the task's hooks ask for {payload!r:.200}: {error}") from error

    async def _done(self, box: SandboxClient, payload: dict[str, Any]) -> Any:
        if "exec" in payload:
            limit_s = self._limits.eval_timeout_s
            result = await box.exec(payload["exec"], limit_s, cwd=self._workdir, env=payload["env"])
            code = NO_EXIT_CODE if result.exit_code is None else result.exit_code
            stderr = result.stderr + (result.not_started or "")
            return {"exit_code": code, "stdout": result.stdout, "stderr": stderr}
        path = payload["write"] if "write" in payload else payload["read"]
        path = str(PurePosixPath(self._workdir or "", path))
        if "write" in payload:
            await box.write_file(path, base64.b64decode(payload["content"]))
            return {}
        return {"content": base64.b64encode(await box.read_file(path, payload["max_bytes"])).decode()}
