"""`harbor`: run a task directory of the Harbor format, and have its own verifier score what was done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollout.suites.harbor.directory import StepDirectory
from rollout.trajectory import FinishReason, Message
from sandbox.errors import SandboxRequestError
from workers.agent.tools import ExecuteBash, Finish, StrReplaceEditor, Think, Tool
from workers.errors import TaskError
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward, RunContext
from workers.handlers.harbor import carry, mcp, solution, steps, verifier
from workers.handlers.harbor.artifacts import keep_artifacts
from workers.handlers.harbor.network import ALLOWLIST, VARIABLES, leads_out, way_out
from workers.handlers.harbor.opening import opening
from workers.handlers.harbor.ready import begin, lay_out, starts_processes
from workers.handlers.harbor.task import HarborTask
from workers.handlers.harbor.trial import Trial, trial_of
from workers.handlers.oracle import Hidden


class Harbor(AgentHandler[HarborTask]):
    """Tasks of the Harbor format: Terminal-Bench, SWE sets and others, scored by their own verifiers."""

    name = "harbor"
    repeatable = EVERY_STAGE
    Task = HarborTask
    tools = (ExecuteBash(), StrReplaceEditor(), Think(), Finish())
    uses_sandbox = True

    async def init(self, ctx: InitContext[HarborTask]) -> None:
        verifier.check_runtime(ctx)
        trial = await trial_of(ctx)
        trial.check()
        step = trial.directory.steps[0]
        if ctx.request.agent is not None:
            _check_program(trial)
        try:
            box = await ctx.sandboxes.boot(ctx, **trial.sandbox)
        except SandboxRequestError as error:
            raise TaskError(f"environment: {error}") from error
        await mcp.install(box, trial)
        # Before a step's own files come: a fresh sandbox that verifies has none of them.
        await carry.note(box)
        await lay_out(box, trial)
        await begin(box, trial, step)
        networks = [trial.network(each.agent) for each in trial.directory.steps]
        if starts_processes(trial) or any(leads_out(*network) for network in networks):
            ctx.survives = "nothing"

    async def opening(self, ctx: RunContext[HarborTask]) -> list[Message]:
        trial = await trial_of(ctx)
        return opening(trial, trial.directory.steps[0], for_program=ctx.request.agent is not None)

    async def warm(self, ctx: RunContext[HarborTask]) -> None:
        trial = await trial_of(ctx)
        ctx.agent.trajectory.warnings += trial.warnings(by_program=ctx.request.agent is not None)
        await ctx.sandboxes.warm(ctx, **trial.sandbox)

    async def turns_s(self, ctx: RunContext[HarborTask]) -> float:
        """Seconds that the agent's turns may take in all; for a program that drives them."""
        trial = await trial_of(ctx)
        return trial.agent_s(trial.directory.steps[0])

    async def run(self, ctx: RunContext[HarborTask]) -> FinishReason:
        trial = await trial_of(ctx)
        if ctx.request.origin is not None:
            _check_fork(trial)
        await self.warm(ctx)
        if len(trial.directory.steps) > 1:
            return await steps.play(ctx, trial, self._turns)
        step = trial.directory.steps[0]
        messages = opening(trial, step)
        try:
            async with (
                self._turns(ctx, trial, step) as tools,
                asyncio.timeout(trial.agent_s(step) - ctx.spent_s) as turns,
            ):
                return await ctx.agent.run(messages, ctx.sandbox, tools=tools)
        except TimeoutError:
            if not turns.expired():
                raise
            return FinishReason.TIME_LIMIT

    @asynccontextmanager
    async def _turns(
        self, ctx: RunContext[HarborTask], trial: Trial, step: StepDirectory
    ) -> AsyncIterator[Sequence[Tool]]:
        """The network of a step's agent, and its tools, for as long as its turns last."""
        assert ctx.sandbox is not None
        async with way_out(ctx.sandbox, *trial.network(step.agent), ctx) as variables:
            if variables or len(trial.directory.steps) > 1:
                # Of a step before there may be some that lead nowhere now.
                none = dict.fromkeys([*VARIABLES, *map(str.lower, VARIABLES)], "")
                await ctx.sandbox.setup(variables or none)
            # Later the agent may have broken what its servers are reached by, and its calls start it again.
            first = step is trial.directory.steps[0]
            yield [*self.tools, *(await mcp.tools_of(ctx.sandbox, trial) if first else ())]

    async def solve(self, ctx: RunContext[HarborTask]) -> FinishReason:
        """Play the task's own solution in the agent's place.

        Raises:
            NoOracle: It brings none.
        """
        trial = await trial_of(ctx)
        ctx.agent.trajectory.warnings += trial.warnings()
        if len(trial.directory.steps) > 1:
            return await steps.solve(ctx, trial)
        await solution.solve(ctx, trial, trial.directory.steps[0])
        return FinishReason.STOP

    async def hidden(self, task: HarborTask) -> Sequence[Hidden]:
        """Tests, solutions and what only the verifier is told."""
        return await solution.hidden(task)

    async def evaluate(self, ctx: EvalContext[HarborTask]) -> Reward:
        trial = await trial_of(ctx)
        if len(trial.directory.steps) > 1:
            return await steps.evaluate(ctx, trial)
        step = trial.directory.steps[0]
        verdict = await verifier.verify(ctx, trial, step)
        await keep_artifacts(ctx, trial, step)
        return Reward(verdict.reward, verdict.rewards)


def _check_fork(trial: Trial) -> None:
    """TaskError for what has more to it than its files and its turns."""
    step = trial.directory.steps[0]
    if len(trial.directory.steps) > 1:
        raise TaskError("a task with [[steps]] cannot be forked: what was verified is of another sandbox")
    mode, hosts = trial.network(step.agent)
    if leads_out(mode, hosts):
        raise TaskError(f"network_mode {mode!r}: its way out leads nowhere in the sandbox of a fork")


def _check_program(trial: Trial) -> None:
    """TaskError for what a program that drives the turns cannot be given."""
    if len(trial.directory.steps) > 1:
        raise TaskError("agent: a program is started once, and cannot play a task with [[steps]]")
    mode, _ = trial.network(trial.directory.steps[0].agent)
    if mode == ALLOWLIST:
        # A sandbox has one way out, which the program's model has.
        raise TaskError(f"agent: network_mode {mode!r}: a program has no network but its model")
