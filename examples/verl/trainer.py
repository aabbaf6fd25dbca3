"""verl's synchronous trainer, which tells the service of its servers and of their weights: see docs/verl.md.

verl imports this module because `VERL_USE_EXTERNAL_MODULES` names it, and takes the trainer because
`trainer.v1.trainer_mode=rollout_service` does; `train.sh` sets both.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rollout.client import Client
from rollout.integrations.verl import VerlServers

REFILLS = 4
"""Batches of prompts that a step may draw in place of groups of which nothing can be learned."""


@register_trainer("rollout_service")
class ServiceTrainer(PPOTrainerSync):
    """As `sync`; the servers are backends of `$ROLLOUT_URL` while it trains."""

    servers: VerlServers
    refilled = 0
    """Prompts of this step that were drawn in place of others."""

    def __init__(self, config: Any) -> None:
        # The rest of verl has to see the mode that this is.
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:
        settings = self.config.actor_rollout_ref.rollout
        addresses = self.llm_server_manager.get_addresses()
        with (
            Client() as client,
            VerlServers(client, addresses, logprobs_mode=settings.logprobs_mode) as self.servers,
        ):
            # verl brought them when it was initialized.
            self.servers.update(self.global_steps)
            super().fit(agent_loop_manager)

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        # verl would draw prompts for ever where a setting makes every rollout fail.
        self.refilled += num_prompts
        if self.refilled > REFILLS * self.config.data.train_batch_size:
            raise RuntimeError(
                f"{self.refilled} groups of this step have no rollout to learn from; lines with `is left "
                "out` in verl's log say why of each, as does `rollout list`"
            )
        return super()._add_prompts_to_generate(num_prompts)

    def on_sample_end(self) -> None:
        self.refilled = 0
        # A server that sleeps must not be asked, nor answer with other weights under the old label.
        self.servers.drain()
        super().on_sample_end()

    def on_step_end(self) -> None:
        super().on_step_end()
        self.servers.update(self.global_steps)
