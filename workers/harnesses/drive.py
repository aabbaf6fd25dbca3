"""A handler whose turns a program drives: what the task is, and how it is scored, stays the handler's own."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from rollout.schema import EXTERNAL, RolloutRequest, Stage
from rollout.trajectory import FinishReason
from sandbox.client import ExecResult
from sandbox.spec import BindSpec
from services.capture.chains import build, timed
from services.settings import Settings
from services.state.capture.nodes import decode
from services.state.capture.session import MODEL, Session, key_of
from services.state.capture.store import CaptureStore, Summary
from services.state.redis import connect
from workers.errors import HandlerError, InfrastructureError, TaskError
from workers.handlers.base import AgentHandler, EvalContext, InitContext, Reward, RunContext
from workers.harnesses import pack
from workers.harnesses.base import PACK, Harness, Job, Launch
from workers.harnesses.catalogue import UnknownHarness, find
from workers.patience import ask

LOOK_S = 1.0
"""Between two looks at an external program's session."""
KEEP_OPEN_S = 5.0
"""Between two looks whether there is a session still."""
MOST_MARGIN_S = 15.0
"""Before RUN's own limit the program is ended, so that there is time to look at what it left."""
WRAP_UP_S = 30.0
"""Before that its calls are answered without the model, so that it may end by itself."""
OURS = ("unavailable", "internal")
"""Kinds of refused calls that are no fault of the program."""
MISSED_S = 7.0
"""For a process of capture to be missed."""
TAIL = 2000
"""Characters of a program's output in an error."""
MAX_TRANSCRIPTS = 1 << 20
"""Bytes of transcript files that are kept; the rest of them is left."""
OUTPUT, TRANSCRIPT, POSTED = "agent.output", "agent.transcript", "agent.reward"
"""Names of artifacts."""


@lru_cache(maxsize=4)
def _store(redis_url: str) -> CaptureStore:
    """Of a worker process, whose handlers are shared by its rollouts."""
    return CaptureStore(connect(redis_url))


@runtime_checkable
class Timed(Protocol):
    """A handler whose tasks have a time limit of their own for the turns."""

    async def turns_s(self, ctx: RunContext[Any]) -> float:
        """Seconds that the turns of a task may take."""


class Driven(AgentHandler[Any]):
    """A handler of one request whose `agent` drives the turns."""

    uses_model = True

    def __init__(self, inner: AgentHandler[Any], request: RolloutRequest, settings: Settings) -> None:
        assert request.agent is not None
        self.name = inner.name  # type: ignore[misc]
        self.tools, self.advertise_tools = inner.tools, inner.advertise_tools  # type: ignore[misc]
        self.uses_sandbox = inner.uses_sandbox or request.agent.harness != EXTERNAL  # type: ignore[misc]
        # The program goes on in the sandbox, and its turns are in Redis, whoever holds RUN.
        self.repeatable = {*inner.repeats, Stage.RUN}  # type: ignore[misc]
        self._inner, self._agent, self._settings = inner, request.agent, settings
        self.check_task, self.metrics = inner.check_task, inner.metrics  # type: ignore[method-assign]
        self.on_init_error, self.on_run_error = inner.on_init_error, inner.on_run_error  # type: ignore
        self.on_eval_error = inner.on_eval_error  # type: ignore[method-assign]

    def _harness(self) -> Harness:
        try:
            return find(self._agent.harness)
        except UnknownHarness as error:
            raise TaskError(f"agent.harness: {error}") from error

    async def init(self, ctx: InitContext[Any]) -> None:
        """INIT: as the handler has it; where a program is started a sandbox in any case, with its pack."""
        if self._agent.harness == EXTERNAL:
            await self._inner.init(ctx)
            return
        if not self._settings.capture_url:
            raise InfrastructureError(
                "no capture service is set up, which programs call the model by: ROLLOUT_CAPTURE_URL"
            )
        its = type(self._inner)
        if its.prompt is AgentHandler.prompt and its.opening is AgentHandler.opening:
            missing = "has neither `prompt` nor `opening`, so there is nothing to tell a program"
            raise TaskError(f"agent: handler {self.name!r} {missing}")
        harness = self._harness()
        if harness.packages:
            try:
                await asyncio.to_thread(pack.require, harness)
            except pack.PackError as error:
                raise InfrastructureError(str(error)) from error
            ctx.sandboxes.shown = (BindSpec(str(pack.directory()), PACK),)
        await self._inner.init(ctx)
        if not ctx.sandboxes.booted:
            await ctx.sandboxes.boot(ctx)

    async def run(self, ctx: RunContext[Any]) -> FinishReason:
        """RUN: until the program has ended, or a limit has ended it."""
        await self._inner.warm(ctx)
        backend = await ctx.agent.place()
        left_s = ctx.limits.run_timeout_s - ctx.spent_s
        if isinstance(self._inner, Timed):
            left_s = min(left_s, await self._inner.turns_s(ctx) - ctx.spent_s)
        ends_in_s = left_s - min(MOST_MARGIN_S, left_s / 10)
        store = _store(self._settings.redis_url)
        session = Session(
            harness=self._agent.harness,
            backend=backend.model_dump_json(exclude_defaults=True),
            index=ctx.index,
            policy_version=ctx.request.policy_version,
            sampling=ctx.request.sampling.model_dump_json(),
            backend_wait_s=self._settings.backend_wait_s,
            call_timeout_s=ctx.limits.call_timeout_s,
            most_calls=ctx.limits.max_turns,
            most_sampled=ctx.limits.max_response_tokens,
            ends_in_s=ends_in_s - min(WRAP_UP_S, ends_in_s / 10),
            rewarded=self._agent.harness == EXTERNAL,
        )
        open_it = partial(ask, store.open, ctx.rollout_id, ctx.attempt, ctx.fence, session)
        if (await open_it())["word"] != "ok":
            raise InfrastructureError("the rollout is not this worker's any more")
        watching = asyncio.create_task(self._keep_open(ctx, store, open_it))
        ends = True
        try:
            if self._agent.harness == EXTERNAL:
                return await self._wait(ctx, store, ends_in_s)
            return await self._drive(ctx, store, backend.max_model_len, ends_in_s)
        except asyncio.CancelledError:
            # The stage's own limit, and what was sampled is kept; or this worker stops, and another goes on
            # while the program does: its calls must be answered meanwhile.
            ends = False
            raise
        finally:
            watching.cancel()
            await asyncio.shield(asyncio.ensure_future(self._collect(ctx, store, ends)))

    async def _keep_open(
        self, ctx: RunContext[Any], store: CaptureStore, open_it: Callable[[], Awaitable[Any]]
    ) -> None:
        """Open the session again where Redis was killed and has lost it."""
        while True:
            await asyncio.sleep(KEEP_OPEN_S)
            if await ask(store.summary, ctx.rollout_id, ctx.attempt) is None:
                await open_it()

    async def _wait(self, ctx: RunContext[Any], store: CaptureStore, ends_in_s: float) -> FinishReason:
        """Until a program somewhere says that it is done.

        Raises:
            InfrastructureError: It leaves the score to the handler where the model failed it.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + ends_in_s
        while loop.time() < ends:
            summary = await ask(store.summary, ctx.rollout_id, ctx.attempt)
            if summary is not None and summary.finished:
                if summary.reward is None and summary.fault in OURS:
                    raise InfrastructureError("the program ended where the model could not be asked")
                return _reason(summary)
            await asyncio.sleep(LOOK_S)
        return FinishReason.TIME_LIMIT

    async def _drive(
        self, ctx: RunContext[Any], store: CaptureStore, context_tokens: int, ends_in_s: float
    ) -> FinishReason:
        """Run the program in the rollout's sandbox, the loopback port that it calls led to capture."""
        assert ctx.sandbox is not None
        address = urlsplit(self._settings.capture_url)
        secret = await ask(store.secret)
        async with ctx.sandbox.tunnel(address.hostname or "127.0.0.1", address.port or 80) as tunnel:
            # As INIT has left it: in the task's directory, and with what `setup` has put into every process.
            shell = await ctx.sandbox.bash('echo "${TMPDIR:-/tmp}"; echo "$PATH"')
            *_, tmp, search_path = shell.output.splitlines()
            job = Job(
                instruction="\n\n".join(message.text for message in await self._inner.opening(ctx)),
                base_url=f"http://127.0.0.1:{tunnel.port}",
                key=key_of(secret, MODEL, ctx.rollout_id, ctx.attempt),
                model="policy",
                # The same in each: programs tell it the model, and a group's prompts are to be one prefix.
                home=f"{tmp}/rollout-agent",
                workspace=shell.cwd,
                context_tokens=context_tokens,
                timeout_s=ends_in_s,
                command=self._agent.command,
                env=self._agent.env,
            )
            try:
                launch = self._harness().launch(job)
            except ValueError as error:
                raise TaskError(f"agent: {self._agent.harness}: {error}") from error
            # A login shell of the program's has its PATH of the image's profile else.
            profile = {f"{job.home}/.profile": f"export PATH={shlex.quote(search_path)}\n"}
            for path, text in {**profile, **launch.files}.items():
                await ctx.sandbox.write_file(path, text)
            result = await ctx.sandbox.exec(
                list(launch.argv),
                ends_in_s,
                cwd=job.workspace,
                env={"HOME": job.home, **launch.env},
                merge_output=True,
            )
            unanswered, cut_off = await tunnel.led()
        ctx.artifacts[OUTPUT] = result.stdout
        await self._keep_transcripts(ctx, launch, job.home)
        if result.exit_code is not None:
            ctx.metrics["agent_exit_code"] = result.exit_code
        summary = await _summary(ctx, store)
        if summary.in_flight and _failed(result):
            # A process that was killed is missed after some seconds.
            await asyncio.sleep(MISSED_S)
            summary = await _summary(ctx, store)
        return self._ended(ctx, result, summary, unanswered, cut_off)

    def _ended(
        self, ctx: RunContext[Any], result: ExecResult, summary: Summary, unanswered: int, cut_off: bool
    ) -> FinishReason:
        """Why the program's turns have ended.

        Args:
            unanswered, cut_off: See `Tunnel.led`.

        Raises:
            TaskError: The model's context has no room for its first call.
            HandlerError: It could not be started, or never called the model.
            InfrastructureError: It could not reach the model, or that failed it.
        """
        name = self._agent.harness
        if result.not_started is not None:
            raise HandlerError(f"{name} cannot be started: {result.not_started}")
        if result.limit_exceeded is not None and summary.calls:
            ctx.agent.trajectory.warnings.append(f"ended by the agent's own doing: {result.limit_exceeded}")
            return FinishReason.SANDBOX_LIMIT
        if cut_off or summary.fault in OURS:
            # However it took that: some programs say so and end well.
            raise InfrastructureError(f"{name} ended where the model could not be asked")
        if _failed(result) and (unanswered or summary.lost or any(map(summary.refused.get, OURS))):
            raise InfrastructureError(
                f"{name} ended ({result.exit_code}) after a call of the model that failed for no fault of its"
            )
        if not summary.calls and summary.fault == "context":
            room = "start the LLM server with a longer one (max_model_len)"
            raise TaskError(f"the first call of {name} has no room in the model's context; {room}")
        if not summary.calls:
            how = "a time limit or signal" if result.exit_code is None else f"exit code {result.exit_code}"
            raise HandlerError(f"{name} ended with {how} and without a model call: …{result.stdout[-TAIL:]}")
        if not summary.nodes and not summary.stopped and summary.fault is None:
            raise InfrastructureError(f"{name} ended before one of its {summary.calls} calls was answered")
        return FinishReason.TIME_LIMIT if result.timed_out else _reason(summary)

    async def _keep_transcripts(self, ctx: RunContext[Any], launch: Launch, home: str) -> None:
        """Keep what the program wrote about itself, the newest files first, as one artifact."""
        if not launch.transcripts:
            return
        script = _GATHER.format(roots=json.dumps([f"{home}/{place}" for place in launch.transcripts]))
        text = await ctx.sandbox.exec(
            ["@python", "-c", script], 30.0, max_output_chars=MAX_TRANSCRIPTS, env={"LC_ALL": "C.UTF-8"}
        )
        if text.stdout:
            ctx.artifacts[TRANSCRIPT] = text.stdout

    async def _collect(self, ctx: RunContext[Any], store: CaptureStore, ends: bool) -> None:
        """Make the trajectory of the turns that were written; where RUN ends no call is answered any more."""
        if ends:
            await ask(store.close, ctx.rollout_id, ctx.attempt, ctx.fence)
        stored = await ask(store.nodes, ctx.rollout_id, ctx.attempt)
        summary = await _summary(ctx, store)
        nodes, trajectory = decode(stored), ctx.agent.trajectory
        trajectory.chains, trajectory.receipt = await asyncio.to_thread(
            build, nodes, self._agent.harness, **summary.unsampled
        )
        trajectory.calls = timed(nodes)
        trajectory.tokenizer = next((node.tokenizer for node in nodes if node.tokenizer), None)
        if summary.reward is not None:
            ctx.artifacts[POSTED] = json.dumps({"reward": summary.reward, "components": summary.components})
        receipt = trajectory.receipt
        receipt.model = trajectory.model
        receipt.reward_source = "handler" if summary.reward is None else "program"
        ctx.metrics |= {
            "model_calls": receipt.calls,
            "sampled_tokens": receipt.sampled_tokens,
            "call_retries": receipt.retries,
            "branches": receipt.branches,
            "share_delivered": receipt.share_delivered,
        }

    async def evaluate(self, ctx: EvalContext[Any]) -> Reward:
        """EVAL: the reward that an external program posted, else the handler's."""
        posted = ctx.artifacts.get(POSTED) if self._agent.harness == EXTERNAL else None
        if posted is None:
            return await self._inner.evaluate(ctx)
        reward = json.loads(posted)
        return Reward(reward["reward"], reward["components"])


async def _summary(ctx: RunContext[Any], store: CaptureStore) -> Summary:
    """How far the session has come; InfrastructureError where Redis has lost it."""
    summary = await ask(store.summary, ctx.rollout_id, ctx.attempt)
    if summary is None:
        raise InfrastructureError("what was captured of this attempt is not there any more")
    return summary


def _failed(result: ExecResult) -> bool:
    """Whether a program ended by itself and not well."""
    return result.exit_code != 0 and not result.timed_out


def _reason(summary: Summary) -> FinishReason:
    """Why a program that ended by itself did so, as far as its calls tell."""
    if summary.stopped:
        return FinishReason(summary.stopped)
    return FinishReason.CONTEXT_LENGTH if summary.fault == "context" else FinishReason.STOP


_GATHER = """
import os
files = []
for root in {roots}:
    for place, _, names in os.walk(root):
        files += [os.path.join(place, name) for name in names if name.endswith((".json", ".jsonl"))]
for path in sorted(files, key=os.path.getmtime, reverse=True)[:100]:
    with open(path, errors="replace") as file:
        print("==>", path, "<==")
        print(file.read(1 << 19))
"""
