"""Handlers for the tests on the cluster: with a sandbox, a model and a gate, without the first, and one whose
agent builds a tree of files in its sandbox, turn by turn."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from pydantic import BaseModel

from rollout.trajectory import FinishReason, Message
from tests.helpers.diary import spoken, tokenizer
from tests.slurm import travelling
from workers.agent.tools import ExecuteBash, Finish
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward, RunContext

LOOK_S = 0.1
PROOF = "/workspace/proof"


class BoxedTask(BaseModel):
    gates: str
    """Directory that all nodes see. RUN leaves the environment of the sandbox there as `ROLLOUT.ATTEMPT`, and
    goes on once there is a file `open`."""


class Boxed(AgentHandler[BoxedTask]):
    """A file in the sandbox, a turn of the model, the file again: reward 1 if it was one sandbox."""

    name = "boxed"
    Task = BoxedTask
    uses_sandbox = True

    def prompt(self, task: BoxedTask) -> list[Message]:
        return [Message(role="user", content="Say something.")]

    async def run(self, ctx: RunContext[BoxedTask]) -> FinishReason:
        assert ctx.sandbox is not None
        result = await ctx.sandbox.bash(
            f"mkdir -p /workspace; echo {ctx.rollout_id}.{ctx.attempt} > {PROOF}; env"
        )
        gates = Path(ctx.task.gates)
        await asyncio.to_thread((gates / f"{ctx.rollout_id}.{ctx.attempt}").write_text, result.output)
        while not (gates / "open").exists():
            await asyncio.sleep(LOOK_S)
        return await super().run(ctx)

    async def evaluate(self, ctx: EvalContext[BoxedTask]) -> Reward:
        assert ctx.sandbox is not None
        result = await ctx.sandbox.bash(f"cat {PROOF}")
        return Reward(float(result.output.strip() == f"{ctx.rollout_id}.{ctx.attempt}"))


class SpokenTask(BoxedTask):
    filler: str = ""
    """A rollout reserves as many tokens as its task would have, before anything is known of the handler."""


class Spoken(AgentHandler[SpokenTask]):
    """A gate, then a turn of the model: it has its placement while it stands there."""

    name = "spoken"
    Task = SpokenTask

    def prompt(self, task: SpokenTask) -> list[Message]:
        return [Message(role="user", content="Say something.")]

    async def run(self, ctx: RunContext[SpokenTask]) -> FinishReason:
        gates = Path(ctx.task.gates)
        await asyncio.to_thread((gates / f"{ctx.rollout_id}.{ctx.attempt}").touch)
        while not (gates / "open").exists():
            await asyncio.sleep(LOOK_S)
        return await super().run(ctx)

    async def evaluate(self, ctx: EvalContext[SpokenTask]) -> Reward:
        return Reward(1.0)


BUILDER, TREE = "/workspace/build.py", "/workspace/tree"
_ASKED = re.compile(r"seed (\d+), (\d+) steps, crowd (\d+), pause ([\d.]+)")
_BUILT = re.compile(r"(?m)^built (\d+)$")


class TravellerTask(BaseModel):
    seed: int
    steps: int
    crowd: int = 0
    """Small files in its first directory."""
    pause_s: float = 1.0
    """What each tool call takes, at least."""


class Traveller(AgentHandler[TravellerTask]):
    """Builds a directory a turn; reward 1 if all is there as a second builder makes it at the end, and the
    shell never lost its directory and its variable."""

    name = "traveller"
    Task = TravellerTask
    tools = (ExecuteBash(), Finish())
    advertise_tools = False
    uses_sandbox = True
    repeatable = EVERY_STAGE

    def prompt(self, task: TravellerTask) -> list[Message]:
        asked = f"seed {task.seed}, {task.steps} steps, crowd {task.crowd}, pause {task.pause_s}"
        return [Message(role="user", content=asked)]

    async def init(self, ctx: InitContext[TravellerTask]) -> None:
        await super().init(ctx)
        await ctx.sandbox.write_file(BUILDER, Path(travelling.__file__).read_bytes())

    async def evaluate(self, ctx: EvalContext[TravellerTask]) -> Reward:
        task, again = ctx.task, "/tmp/again"
        await ctx.sandbox.write_file("/tmp/build.py", Path(travelling.__file__).read_bytes())
        steps = " && ".join(
            f"python3 /tmp/build.py {task.seed} {step} {task.crowd if step == 1 else 0} {again}"
            for step in range(1, task.steps + 1)
        )
        result = await ctx.sandbox.bash(
            f"cat ~/lost /dev/shm/{task.seed}; {steps} && python3 /tmp/build.py compare {TREE} {again}", 120
        )
        ctx.artifacts["compared"] = result.output
        words = [line for line in result.output.splitlines() if "No such file" not in line]
        return Reward(float(words == ["in memory", "0 differences"]))


def build(prompt: list[int], number: int) -> list[int]:
    """For `fake_engine --script`: the next step of a traveller, or its end. A step that was interrupted is
    done again."""
    text = tokenizer().decode(prompt, skip_special_tokens=False)
    seed, steps, crowd, pause = _ASKED.search(text).groups()
    built = max(map(int, _BUILT.findall(text)), default=0)
    if built >= int(steps):
        return spoken("finish", {"message": "done"})
    step = built + 1
    before = f"[ $PWD$STEP = {TREE}{built} ] || pwd >> ~/lost"
    if step == 1:
        before = f"mkdir -p {TREE}; cd {TREE}; echo in memory > /dev/shm/{seed}"
    command = (
        f"{before}; python3 {BUILDER} {seed} {step} {crowd if step == 1 else 0} {TREE} && sleep {pause} && "
        f"export STEP={step} && echo built {step}"
    )
    return spoken("execute_bash", {"command": command, "timeout": 100})


all_handlers = [Boxed, Spoken, Traveller]
