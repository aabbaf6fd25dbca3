"""What trainers do with the answers of ProRL's server in token mode: verl's integration and NeMo RL's.

Written from what their code does, as particular as that is: what it raises is raised here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx

from tests.helpers.prorl_client import ProrlClient

Answer = dict[str, Any]
Group = list[Answer]
TOKENS = {"token_level_generation": True, "max_output_tokens": 2000, "max_iterations": 5, "top_k": -1}
NOTHING = {"error": "Empty response", "success": False, "messages": [], "resolved": False, "finish": False}


@dataclass
class Row:
    """What is learned from, as verl's tensors have it."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    """1 = of a turn."""
    logprobs: list[float]
    resolved: bool
    error: bool
    """Not learned from."""
    padded: bool
    """A copy of another one."""
    score: float = 0.0
    """What a fork of NeMo RL learns from: it takes an absent one for 0, and fails on null."""


def ask(
    client: ProrlClient, groups: Sequence[Sequence[Answer]], sampling: Answer, attempts: int = 1
) -> list[Group]:
    """The answers to instances, a group each; what gives no messages is asked for again."""

    def one(instance: Answer) -> Answer:
        for _ in range(attempts):
            try:
                answer = client.post("/process", {"instance": instance, "sampling_params": sampling})
            except httpx.HTTPError:
                continue
            if answer.status_code == 200 and answer.json()["messages"]:
                return answer.json()
        return deepcopy(NOTHING)

    numbered = [
        [instance | {"trajectory_id": number} for number, instance in enumerate(group)] for group in groups
    ]
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(one, list(chain.from_iterable(numbered)))
        return [[next(answers) for _ in group] for group in numbered]


def _fill(group: Group, spare: Answer | None) -> Answer | None:
    """Answers without messages become copies of one with some, or of the spare."""
    source = next((answer for answer in group if answer["messages"]), spare)
    for answer in group:
        if not answer["messages"] and source is not None:
            answer |= {name: source[name] for name in ("messages", "resolved", "error", "finish")}
            answer["score"] = source.get("score", 0.0)
            answer["is_padded"] = True
    return source


def verl_rows(groups: list[Group]) -> list[Row]:
    """The rows of a step of verl."""
    spare = None
    for group in groups:
        spare = _fill(group, spare)
    return [_verl_row(answer) for group in groups for answer in group]


def _verl_row(answer: Answer) -> Row:
    messages = answer["messages"]
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    assert messages[-1]["role"] == "assistant", f"the last message should be an assistant's: {roles}"
    ids = [message["token_ids"] for message in messages]
    logprobs = [message["logprobs"] or [0.0] * len(message["token_ids"]) for message in messages]
    masks = [
        [int(role == "assistant")] * len(own) for role, own in zip(roles[first:], ids[first:], strict=True)
    ]
    return Row(
        prompt=list(chain(*ids[:first])),
        response=list(chain(*ids[first:])),
        mask=list(chain(*masks)),
        logprobs=list(chain(*logprobs[first:])),
        resolved=answer["resolved"],
        error=answer["error"] not in (None, ""),
        padded=answer.get("is_padded", False),
    )


def nemo_rl_rows(groups: list[Group]) -> list[Row]:
    """The message logs of a step of NeMo RL, as rows."""
    rows = []
    for group in groups:
        _fill(group, None)
        for answer in group:
            for message in answer["messages"] if not answer.get("is_padded") else ():
                if (logprobs := message.pop("logprobs")) is not None:
                    message["generation_logprobs"] = logprobs
                if message["input_ids"] is not None:
                    cut = len(message["input_ids"])
                    message["token_ids"] = message["token_ids"][cut:]
                    message["generation_logprobs"] = message["generation_logprobs"][cut:]
            said = [message for message in answer["messages"] if message["role"] == "assistant"]
            rows.append(
                Row(
                    prompt=[token for message in answer["messages"][:1] for token in message["token_ids"]],
                    response=[token for message in said for token in message["token_ids"]],
                    mask=[1 for message in said for _ in message["token_ids"]],
                    logprobs=[
                        value
                        for message in said
                        for value in message.get("generation_logprobs") or [0.0] * len(message["token_ids"])
                    ],
                    resolved=answer["resolved"],
                    error=False,
                    padded=answer.get("is_padded", False),
                    score=float(answer.get("score", 0.0)),
                )
            )
    return rows
