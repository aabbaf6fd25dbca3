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


@register_trainer("rollout_service")
class ServiceTrainer(PPOTrainerSync):
    """As `sync`; the servers are backends of `$ROLLOUT_URL` while it trains."""

    servers: VerlServers

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

    def on_sample_end(self) -> None:
        # A server that sleeps must not be asked, nor answer with other weights under the old label.
        self.servers.drain()
        super().on_sample_end()

    def on_step_end(self) -> None:
        super().on_step_end()
        self.servers.update(self.global_steps)
