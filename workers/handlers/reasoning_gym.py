"""Every task of the package reasoning-gym, scored by the package's own scorer."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator

from rollout.trajectory import Message
from workers.agent.tools import Finish
from workers.errors import InfrastructureError, TaskError
from workers.handlers.answers import finish_message, last_words
from workers.handlers.base import (
    EVERY_STAGE,
    AgentHandler,
    Context,
    EvalContext,
    InitContext,
    Reward,
    RunContext,
)
from workers.handlers.fields import JsonObject, Problem, RowTask, object_of, with_problem_and_answer
from workers.handlers.oracle import NoOracle
from workers.handlers.packages import require
from workers.scoring import score, score_or_blame

ENTRY = "workers.scoring.reasoning_tasks:entry"
ANSWER = "workers.scoring.reasoning_tasks:answer"
JUDGE = "workers.scoring.reasoning_tasks:judge"
MAKE_S = 60.0
"""Seconds that making an entry may take; some puzzles are searched for."""
SCORE_S = 30.0
QUESTION = "question"
"""Artifact: what was asked in RUN."""
CORRECT = 0.99
"""Score from which an answer counts as correct."""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORM = (
    "Think step by step. Then give the final answer, and nothing else, between <answer> and </answer>. "
    "Follow the format of the question's example, if it has one."
)


class ReasoningGymTask(RowTask):
    """A place in a dataset (`dataset`, `seed`, `index`), or an entry of one (`question`, `metadata`)."""

    dataset: str = Field("", max_length=200)
    """Name in reasoning-gym; of an entry: `metadata.source_dataset`, if left out."""
    seed: int | None = None
    index: int = Field(0, ge=0)
    size: int | None = Field(None, ge=1, le=10_000_000)
    """Entries of the dataset; None = the package's default, or as many as `index` asks for."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further options of the dataset, such as its difficulty."""
    question: Problem | None = None
    answer: str | None = None
    metadata: JsonObject | None = None
    partial_credit: bool = True
    """False: the reward is 1 for a correct answer and else 0, whatever the scorer gives for a part."""

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> dict[str, Any]:
        """A `seed` names a place, unless there is `metadata` of an entry. Both may be in `extra_info`."""
        extra = object_of(row, "extra_info")
        row = {name: extra[name] for name in cls.model_fields if extra.get(name) is not None} | row
        if "seed" in row and "metadata" not in row:
            return {name: value for name, value in row.items() if name != "question"}
        entry = with_problem_and_answer(row)
        entry["question"] = entry.get("problem")
        return entry | ({"metadata": extra} if extra and "metadata" not in row else {})

    @model_validator(mode="after")
    def _either(self) -> ReasoningGymTask:
        if self.question is not None:
            if self.metadata is None:
                raise ValueError("an entry (`question`) needs its `metadata`: the scorers read it")
            self.dataset = self.dataset or str(self.metadata.get("source_dataset") or "")
        elif self.seed is None:
            raise ValueError("either `dataset`, `seed` and `index`, or a whole entry with its `question`")
        if not self.dataset:
            raise ValueError("`dataset` is missing")
        if {"seed", "size"} & self.config.keys():
            raise ValueError("`seed` and `size` are fields of the task, not of `config`")
        return self

    def source(self) -> dict[str, Any]:
        """What the scorer's process makes the entry from."""
        if self.question is None:
            return self.model_dump(include={"dataset", "seed", "index", "size", "config"})
        entry = self.model_dump(include={"question", "answer", "metadata"})
        entry["metadata"] = {"source_dataset": self.dataset, **(self.metadata or {})}
        return {"dataset": self.dataset, "config": self.config, "entry": entry}


class ReasoningGym(AgentHandler[ReasoningGymTask]):
    """A puzzle of reasoning-gym: the reward is the score of the package's own scorer."""

    name = "reasoning_gym"
    repeatable = EVERY_STAGE
    Task = ReasoningGymTask
    tools = (Finish(),)
    advertise_tools = False

    async def init(self, ctx: InitContext[ReasoningGymTask]) -> None:
        """Raises:
        TaskError: There is no such dataset, configuration or entry.
        HandlerError: reasoning-gym is not installed.
        """
        require("reasoning_gym", extra="reasoning-gym", handler=self.name)
        await self._question(ctx)
        await super().init(ctx)

    async def opening(self, ctx: RunContext[ReasoningGymTask]) -> list[Message]:
        """The question: made again, because stages share no memory."""
        question = ctx.artifacts[QUESTION] = await self._question(ctx)
        return [Message(role="user", content=f"{question}\n\n{_FORM}")]

    async def _question(self, ctx: Context[ReasoningGymTask]) -> str:
        made = await score(ENTRY, ctx.task.source(), timeout_s=MAKE_S)
        if "refused" in made:
            raise TaskError(f"task: {made['refused']}")
        return made["question"]

    async def solution(self, task: ReasoningGymTask) -> str:
        """The package's own answer.

        Raises:
            NoOracle: The package has none.
        """
        made = await score(ANSWER, task.source(), timeout_s=MAKE_S)
        if not made.get("answer"):
            raise NoOracle(made.get("refused", "reasoning-gym knows no answer"))
        return f"<answer>{made['answer']}</answer>"

    async def evaluate(self, ctx: EvalContext[ReasoningGymTask]) -> Reward:
        message = finish_message(ctx.trajectory)
        tagged = _TAGGED.findall(message or last_words(ctx.trajectory))
        answer = (tagged[-1] if tagged else message or "").strip()
        if not answer:
            return Reward(0.0, {"correct": 0.0, "score": 0.0, "answered": 0.0})
        source = ctx.task.source()
        # Not from the prompt, which is a program's where one drives the turns. Of what is told to a program
        # elsewhere nothing is known here.
        asked = ctx.artifacts.get(QUESTION)
        verdict = await score_or_blame(
            JUDGE,
            {"task": source, "answer": answer, "asked": asked},
            known={"task": source, "answer": None, "asked": None},
            timeout_s=SCORE_S,
        )
        if verdict is not None and "other" in verdict:
            raise InfrastructureError(
                f"reasoning-gym makes another entry {ctx.task.index} of {ctx.task.dataset!r} here than in "
                "RUN: have all workers the same release of it?"
            )
        if verdict is None:
            ctx.log.info("an answer that its scorer cannot finish is wrong", answer=repr(answer[:200]))
        value = 0.0 if verdict is None else verdict["score"]
        correct = float(value >= CORRECT)
        reward = value if ctx.task.partial_credit else correct
        return Reward(reward, {"correct": correct, "score": value, "answered": 1.0})
