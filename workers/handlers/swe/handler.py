"""`swe`: fix an issue in a repository; scored by the tests that the fix must make pass."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import asdict
from typing import Any

from rollout.image_names import local_name
from rollout.schema import Blame
from rollout.trajectory import FinishReason, Message
from sandbox.client import SandboxClient
from sandbox.errors import ImageError
from sandbox.images import ImageStore
from workers.agent.tools import ExecuteBash, Finish, StrReplaceEditor, Think
from workers.errors import TaskError
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward, RunContext
from workers.handlers.oracle import Hidden
from workers.handlers.packages import require
from workers.handlers.swe.evaluation import Judgement, judge
from workers.handlers.swe.oracle import apply_fix, hidden_of
from workers.handlers.swe.patches import note_base, take_patch
from workers.handlers.swe.placing import check_test_patch
from workers.handlers.swe.repository import hide_future, prepare
from workers.handlers.swe.rows import Instance, SweTask
from workers.handlers.swe.specs import R2E_PARSER, Spec, spec_of
from workers.scoring import score

PATCH_S = 60.0
PATCH_SHARE = 0.1
"""What RUN keeps of `run_timeout_s` to take the patch: so much, but no more than this share."""
MAX_LOG_KEPT = 100_000
"""Characters of the tests' log that are kept with the rollout, from its end."""
MAX_DROPPED_KEPT = 200
SETUP_S = 120.0
PARSER_S = 60.0

_KEPT_VARIABLES = ("PATH", "CONDA", "VIRTUAL_ENV", "PYTHON", "LD_LIBRARY_PATH")

PROMPT = """\
The directory {repo_dir} holds a repository. It has the problem that this report describes:

<issue>
{problem_statement}
</issue>

Change the code of the repository so that the problem is solved. Work on your own; nobody answers questions.

- Look at the code that the report is about, and reproduce the problem with a small script where you can.
- Fix the cause in the code itself, with changes as small as the problem allows, and think of other cases that
  the same cause affects.
- Run your script again, and the tests that exist, to see that the problem is gone and nothing else broke.
- Tests that judge the result are kept elsewhere. Changes of test files, of `conftest.py` and of files that
  configure tests or packaging are not part of the result, so the fix must not depend on any.
- There is no network. What the code needs is installed.

The files as they are when you are done are the result."""


class Swe(AgentHandler[SweTask]):
    """Software engineering: rows of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym, graded by their tests."""

    name = "swe"
    repeatable = EVERY_STAGE
    Task = SweTask
    tools = (ExecuteBash(), StrReplaceEditor(), Think(), Finish())
    uses_sandbox = True

    async def init(self, ctx: InitContext[SweTask]) -> None:
        instance, spec = _read(ctx.task)
        await _check_parser(instance, spec)
        image = local_name(instance.image)
        try:
            await asyncio.to_thread(ImageStore().find, image)
        except ImageError as error:
            raise TaskError(
                f"{instance.instance_id}: {error}; for all rows: rollout images build --dataset ROWS.jsonl"
            ) from error
        box = await ctx.sandboxes.boot(ctx, **self._sandbox(instance))
        await prepare(box, instance, spec)
        await check_test_patch(box, instance, spec)
        await hide_future(box, instance, spec)
        # The agent's shell starts in the repository with its environment; `setup` keeps it for a new shell.
        lines = [f"cd {spec.repo_dir}", *spec.shell_setup]
        await box.bash("\n".join(lines), timeout=SETUP_S)
        await box.setup(await _environment(box))
        await note_base(box, spec)

    def prompt(self, task: SweTask) -> list[Message]:
        instance, spec = _read(task)
        text = PROMPT.format(repo_dir=spec.repo_dir, problem_statement=instance.problem_statement)
        return [Message(role="user", content=text)]

    async def warm(self, ctx: RunContext[SweTask]) -> None:
        await ctx.sandboxes.warm(ctx, **self._sandbox(_read(ctx.task)[0]))

    async def run(self, ctx: RunContext[SweTask]) -> FinishReason:
        instance, spec = _read(ctx.task)
        limit = ctx.limits.run_timeout_s - ctx.spent_s
        try:
            # The turns end before RUN does: what the agent has changed until then is to be scored.
            async with asyncio.timeout(limit - min(PATCH_S, PATCH_SHARE * limit)) as turns:
                reason = await super().run(ctx)
        except TimeoutError:
            if not turns.expired():
                raise
            reason = FinishReason.TIME_LIMIT
        await self._keep_patch(ctx, instance, spec)
        return reason

    async def evaluate(self, ctx: EvalContext[SweTask]) -> Reward:
        instance, spec = _read(ctx.task)
        if "patch" not in ctx.artifacts:
            # RUN was ended before it could take it.
            await self._keep_patch(ctx, instance, spec)
        notes = json.loads(ctx.artifacts.get("patch_notes", "{}"))
        if notes.get("problem"):
            judgement = Judgement("no_patch", detail=notes["problem"])
        else:
            judgement = await judge(ctx, instance, spec, ctx.artifacts["patch"], self._sandbox(instance))
        ctx.artifacts["test_log"] = judgement.log[-MAX_LOG_KEPT:]
        ctx.artifacts["report"] = json.dumps(_report(instance, judgement, notes))
        ctx.metrics["eval_test_s"] = judgement.seconds.get("tests", 0.0)
        ctx.metrics["eval_total_s"] = judgement.seconds.get("total", 0.0)
        return Reward(float(judgement.resolved), _components(instance, judgement))

    async def solve(self, ctx: RunContext[SweTask]) -> FinishReason:
        """Apply the row's own fix. EVAL then takes the patch as it takes an agent's."""
        assert ctx.sandbox is not None
        await apply_fix(ctx.sandbox, ctx.task, *_read(ctx.task))
        return FinishReason.STOP

    def hidden(self, task: SweTask) -> list[Hidden]:
        return hidden_of(task, *_read(task))

    async def _keep_patch(
        self, ctx: RunContext[SweTask] | EvalContext[SweTask], instance: Instance, spec: Spec
    ) -> None:
        began = time.monotonic()
        patch = await take_patch(ctx, instance, spec, self._sandbox(instance))
        ctx.artifacts["patch"] = patch.text
        notes = {
            "problem": patch.problem,
            "dropped": dict(list(patch.dropped.items())[:MAX_DROPPED_KEPT]),
            "dropped_count": len(patch.dropped),
        }
        ctx.artifacts["patch_notes"] = json.dumps(notes)
        ctx.metrics["patch_s"] = time.monotonic() - began

    def _sandbox(self, instance: Instance) -> dict[str, Any]:
        """Options, the same for the agent's sandbox and the fresh ones, so that one warm pool serves all."""
        return {"image": local_name(instance.image), "network": self.network, "limits": self.limits}


def _read(task: SweTask) -> tuple[Instance, Spec]:
    instance = task.instance()
    try:
        return instance, spec_of(instance)
    except ValueError as error:
        raise TaskError(f"{instance.instance_id}: {error}") from error


async def _check_parser(instance: Instance, spec: Spec) -> None:
    """Better now than after the agent has worked. It also has a process ready that grades."""
    if spec.log_parser == R2E_PARSER:
        return
    require("swebench", extra="swe", handler=Swe.name)
    if not await score("workers.scoring.swe_tests:has_parser", spec.log_parser, timeout_s=PARSER_S):
        raise TaskError(f"{instance.instance_id}: log_parser {spec.log_parser!r} is none of swebench's")


async def _environment(box: SandboxClient) -> dict[str, str]:
    """The variables of the shell now, but for those of the shell itself."""
    result = await box.bash("env -0 | base64 -w0", timeout=SETUP_S)
    pairs = base64.b64decode(result.output.strip()).decode("utf-8", "replace").split("\0")
    variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {name: value for name, value in variables.items() if name.startswith(_KEPT_VARIABLES)}


def _report(instance: Instance, judgement: Judgement, notes: dict[str, Any]) -> dict[str, Any]:
    report = asdict(judgement)
    del report["log"]
    if judgement.status in ("no_patch", "tests_not_placed"):
        report["blame"] = Blame.AGENT.value
    return {"instance_id": instance.instance_id, "source": instance.source, **report, "patch": notes}


def _components(instance: Instance, judgement: Judgement) -> dict[str, float]:
    """What was measured; what was not is left out."""
    components = {"resolved": float(judgement.resolved)}
    if judgement.status not in ("empty_patch", "no_patch"):
        components["patch_applied"] = float(judgement.patch_applied)
    if "matching" in judgement.tests_status:
        matching = len(judgement.tests_status["matching"])
        components["expected_status"] = matching / max(1, len(instance.expected or {}))
    for name, kind in (("fail_to_pass", "FAIL_TO_PASS"), ("pass_to_pass", "PASS_TO_PASS")):
        if (share := judgement.share(kind)) is not None:
            components[name] = share
    return components
