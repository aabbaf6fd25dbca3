"""What tests ask of reasoning-gym, in a scorer's process."""

from __future__ import annotations

from typing import Any

from reasoning_gym.factory import DATASETS

from workers.scoring import reasoning_tasks


def datasets(payload: Any) -> list[str]:
    return [name for name in DATASETS if name not in reasoning_tasks._EXECUTING]


def row(task: dict[str, Any]) -> dict[str, Any]:
    """An entry as a file of them holds it."""
    made = reasoning_tasks._made(task)[1]
    return {"question": made["question"], "answer": made["answer"], "metadata": made["metadata"]}


def swapped(payload: dict[str, Any]) -> dict[str, Any]:
    """Whether two entries have different solutions, and the score of the one's for the other."""
    dataset, made = reasoning_tasks._made(payload["task"])
    own = reasoning_tasks.solution(made)
    solution = reasoning_tasks.solution(reasoning_tasks._made(payload["other"])[1])
    return {"differs": own != solution, "score": reasoning_tasks._score(dataset, made, solution)}


def another_question(task: dict[str, Any]) -> dict[str, Any]:
    return {"question": "What is the question?"}
