"""The policy as the trainer sees it: a Hugging Face causal model, and for PPO a critic on top of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.training.data import Rows

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.index.json", "*.tmp")
"""Not copied from the first checkpoint to the next ones: everything else (tokenizer, template) is."""
STATE_FILE = "trainer.pt"

disable_progress_bar()  # of loading and saving: the trainer has one of its own


class Actor:
    """Weights that learn, in float32."""

    def __init__(self, path: Path, device: str, critic: bool = False, base: Path | None = None) -> None:
        """
        Args:
            path: A checkpoint: the first one, or one that `save` wrote.
            base: Where tokenizer and template are copied from; None = `path`.
        """
        self.base = base or path
        self.device = torch.device(device)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(self.device)
        # Dropout would make the trainer's log-probs differ from the engine's.
        self.model.eval()
        width = self.model.config.hidden_size
        # It reads the policy's features and leaves them alone: its errors must not change what is sampled.
        self.critic = (
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)).to(self.device)
            if critic
            else None
        )

    def optimizer(self, learning_rate: float, critic_learning_rate: float) -> torch.optim.AdamW:
        """AdamW without decay; the short memory of (0.9, 0.95) suits a reward that moves."""
        groups = [{"params": list(self.model.parameters()), "lr": learning_rate}]
        if self.critic is not None:
            groups.append({"params": list(self.critic.parameters()), "lr": critic_learning_rate})
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def forward(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Log-probs of the ids, entropies, and the critic's values or None; each (rows, positions)."""
        out = self.model(
            input_ids=rows.ids[:, :-1], output_hidden_states=self.critic is not None, use_cache=False
        )
        table = torch.log_softmax(out.logits.float(), dim=-1)
        logprobs = table.gather(-1, rows.ids[:, 1:, None]).squeeze(-1)
        entropy = -(table.detach().exp() * table.detach()).sum(-1)
        values = None
        if self.critic is not None:
            values = self.critic(out.hidden_states[-1].detach()).squeeze(-1)
        return logprobs, entropy, values

    @torch.no_grad()
    def logprobs_of(self, token_ids: list[int]) -> list[float]:
        """Natural log-prob of each id but the first, given those before it: what a canary needs."""
        ids = torch.tensor([token_ids], device=self.device)
        table = torch.log_softmax(self.model(input_ids=ids[:, :-1]).logits.float(), dim=-1)
        return table.gather(-1, ids[:, 1:, None]).flatten().tolist()

    def save(self, directory: Path, state: dict) -> None:
        """A checkpoint that an engine can load, with the trainer's own state beside the weights.

        It appears under its name only when it is whole.
        """
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.base, partial, ignore=shutil.ignore_patterns(*WEIGHTS))
        self.model.save_pretrained(partial)
        critic = None if self.critic is None else self.critic.state_dict()
        torch.save({**state, "critic": critic}, partial / STATE_FILE)
        for file in partial.iterdir():
            file.chmod(0o644)  # an engine under another account reads it
        partial.rename(directory)

    def load_state(self, directory: Path) -> dict:
        """The trainer's state that `save` wrote; the critic takes its part."""
        state = torch.load(directory / STATE_FILE, map_location=self.device, weights_only=True)
        if self.critic is not None and state["critic"] is not None:
            self.critic.load_state_dict(state["critic"])
        return state
