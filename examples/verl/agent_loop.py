"""An agent loop for verl whose rollouts are made by the service: see docs/verl.md.

Written for the trainer of verl 0.9.1 (`trainer.use_v1`, its default).
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
)

from rollout.adapters.base import usable
from rollout.adapters.verl import agent_loop_output
from rollout.client import AsyncClient, RolloutError
from rollout.schema import RolloutRequest, SamplingParams, new_id


class ServiceAgentLoop(AgentLoopBase):
    """One rollout of the service for each row of verl's batch.

    The row's `extra_info` holds `handler`, `task` and perhaps `limits`; verl runs a row `rollout.n` times.
    """

    def __init__(self, *args: Any, url: str | None = None, **kwargs: Any) -> None:
        """
        Args:
            url: The gateway; None = `$ROLLOUT_URL`. Set in agent_loops.yaml.
        """
        super().__init__(*args, **kwargs)
        self._url = url

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Submit, wait, convert.

        Raises:
            ValueError: The row names no handler and task.
            RuntimeError: The rollout must not be learned from. verl then leaves it out of its group, whose
                mean is that of the others; a group without any is replaced (`sync_refill_failed_groups`).
        """
        info = kwargs.get("extra_info") or {}
        if "handler" not in info or "task" not in info:
            raise ValueError(f"extra_info has {sorted(info)}; the service needs `handler` and `task` there")
        task = info["task"]  # `rollout tasks convert --verl` writes it as JSON text
        request = RolloutRequest(
            id=new_id(),
            handler=info["handler"],
            task=json.loads(task) if isinstance(task, str) else task,
            # Parquet gives each row the fields of all.
            limits={name: value for name, value in (info.get("limits") or {}).items() if value is not None},
            # Rollouts of a group share their prompt, and so go to the server that has it in its cache.
            group_id=kwargs.get("uid"),
            sampling=SamplingParams(
                temperature=sampling_params.get("temperature", 1.0),
                top_p=sampling_params.get("top_p", 1.0),
                top_k=sampling_params.get("top_k", -1),
            ),
        )
        # A client for each: verl makes a new loop object for every row.
        async with AsyncClient(self._url) as client:
            try:
                (rollout,) = await client.run([request])
            except BaseException:
                # verl counts the session as failed, so nobody waits for the rollout any more.
                with suppress(RolloutError):
                    await client.cancel(request.id)
                raise
        if not usable(rollout):
            why = rollout.error.message if rollout.error else rollout.finish_reason or "nothing was sampled"
            raise RuntimeError(f"rollout {rollout.id} is left out: {rollout.state.value}, {why}")
        config = self.rollout_config
        lengths = {"prompt_length": config.prompt_length, "response_length": config.response_length}
        return AgentLoopOutput(**agent_loop_output(rollout, **lengths))
