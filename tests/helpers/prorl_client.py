"""A client of ProRL-Agent-Server, written from the contract of its HTTP routes and from nothing of ours.

Like the trainers' own clients it knows statuses and fields, no problem documents and no ids of rollouts.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

TIMEOUT_S = 300.0
RESULT = {
    "instance_id",
    "trajectory_id",
    "git_patch",
    "success",
    "finish",
    "end_properly",
    "resolved",
    "messages",
    "tools",
    "critical_error",
    "filter",
    "error",
    "traceback",
    "timing",
}
TIMING = {"init_time", "run_time", "eval_time", "others_time", "counted_elapsed", "timeout_triggered"}
CRITICAL = {None, "init", "run", "eval", "timeout", "final_result"}


class ProrlClient:
    """One trainer's connection to the server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(
        self, path: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_S
    ) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def start(self) -> None:
        """400 is fine: it runs."""
        assert self.post("/start").status_code in (200, 400)

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/status", timeout=TIMEOUT_S).raise_for_status().json()

    def cancel(self, job_id: str) -> str:
        return self.post("/cancel", {"job_id": job_id}).raise_for_status().json()["status"]

    def process(
        self, instance: dict[str, Any], sampling: dict[str, Any] | None = None, job_id: str | None = None
    ) -> dict[str, Any]:
        """A checked result; a lost connection or a 503 is tried again with the same job."""
        body: dict[str, Any] = {"instance": instance, "sampling_params": sampling or {}}
        if job_id is not None:
            body["job_id"] = job_id
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                answer = self.post("/process", body)
                if answer.status_code != 503:
                    break
            except httpx.TransportError:
                if job_id is None:
                    raise
            assert time.monotonic() < deadline, "no answer in time"
            time.sleep(0.1)
        assert answer.status_code == 200, answer.text
        return check(answer.json())


class Process(threading.Thread):
    """A `/process` under way, as trainers have hundreds."""

    def __init__(self, client: ProrlClient, *args: Any, **kwargs: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: client.process(*args, **kwargs)
        self._found: dict[str, Any] | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._call()
        except BaseException as error:
            self._found = error

    def result(self) -> dict[str, Any]:
        self.join(TIMEOUT_S)
        assert isinstance(self._found, dict), self._found
        return self._found


def check(result: dict[str, Any]) -> dict[str, Any]:
    """The result, if it is one."""
    assert result.keys() >= RESULT
    assert result["timing"].keys() == TIMING and result["critical_error"] in CRITICAL
    for name in ("success", "finish", "end_properly", "resolved", "filter"):
        assert isinstance(result[name], bool), name
    for message in result["messages"]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str)
        if message["role"] == "assistant":
            # A prompt's own answers were not sampled.
            logprobs = message["logprobs"]
            assert (
                message["token_ids"] == [] if logprobs is None else len(message["token_ids"]) == len(logprobs)
            )
            assert all(call.keys() == {"name", "arguments"} for call in message["tool_calls"])
    return result


def turns(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The assistant's messages."""
    return [message for message in result["messages"] if message["role"] == "assistant"]
