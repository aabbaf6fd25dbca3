"""A collector of NeMo Gym that knows agent servers by their contract alone; checks what a trainer would."""

from __future__ import annotations

import json
from typing import Any

import httpx

TIMEOUT_S = 300.0
RESPONSE = {"id", "created_at", "model", "object", "output", "parallel_tool_calls", "tool_choice", "tools"}
USAGE = {"input_tokens", "output_tokens", "total_tokens", "input_tokens_details", "output_tokens_details"}
TOKENS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}


class GymClient:
    """Sends rows to one agent server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=TIMEOUT_S)

    def run(self, text: str, agent: str, task: int = 0, rollout: int = 0, **more: Any) -> dict[str, Any]:
        """The checked answer to a row."""
        row = {
            "responses_create_params": {"input": [{"role": "user", "content": text}] if text else []},
            "agent_ref": {"type": "responses_api_agents", "name": agent},
            "_ng_task_index": task,
            "_ng_rollout_index": rollout,
            **more,
        }
        answer = self.post("/run", row)
        assert answer.status_code == 200, answer.text
        return check_row(row, answer.json())


def check_row(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, if it is a verified response of the row."""
    assert answer["responses_create_params"] == row["responses_create_params"]
    assert isinstance(answer["reward"], float | int)
    if answer.get("mask_sample"):
        assert answer["reward"] == 0 and isinstance(answer["_ng_failure_class"], str)
    check_response(answer["response"])
    return answer


def check_response(response: dict[str, Any]) -> list[int]:
    """Every id that a trainer would see, in order."""
    assert response.keys() >= RESPONSE and response["object"] == "response"
    assert "usage" not in response or response["usage"].keys() >= USAGE
    called, answered = set(), set()
    context: list[int] = []
    for item in response["output"]:
        kind = item["type"]
        if kind == "message":
            assert {"role", "content", "status"} <= item.keys()
            if item["role"] == "assistant":
                assert item["id"]
                assert all(part.keys() >= {"type", "text", "annotations"} for part in item["content"])
        elif kind == "function_call":
            json.loads(item["arguments"])
            called.add(item["call_id"])
        elif kind == "function_call_output":
            assert isinstance(item["output"], str)
            answered.add(item["call_id"])
        else:
            assert kind == "reasoning" and item.keys() >= {"id", "summary"}
        given = TOKENS & item.keys()
        assert given in (set(), TOKENS), "all three or none"
        if given:
            assert kind != "function_call_output"
            prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
            assert len(sampled) == len(item["generation_log_probs"]) > 0
            assert prompt[: len(context)] == context, "a break costs the sample"
            context = prompt + sampled
    assert answered <= called
    return context
