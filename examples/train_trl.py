"""TRL's `GRPOTrainer` with its rollouts from the service: multi-turn, with tools in sandboxes.

    pip install -e '.[trl]'
    python examples/train_trl.py --steps 20

TRL asks a `rollout_func` for completions. This one brings the trainer's weights to the backends, submits the
prompts, and gives back the ids, log-probs and mask of the trajectories: TRL tokenizes nothing.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # examples are no installed package

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from examples.demo_model.task import make_tasks  # noqa: E402
from examples.training.service import own_service  # noqa: E402
from rollout.adapters import trl as adapter  # noqa: E402
from rollout.client import Client  # noqa: E402
from rollout.policy import UpdateState  # noqa: E402
from rollout.schema import Limits, RolloutRequest  # noqa: E402

DEMO_MODEL = ROOT / "examples" / "demo_model" / "checkpoint"


class ServiceRollouts:
    """A `rollout_func` for TRL; the reward goes with the rest and comes back through `adapter.reward`."""

    def __init__(self, client: Client, tasks: dict[str, dict], directory: Path, handler: str) -> None:
        """
        Args:
            tasks: The handler's task for each prompt of the data set.
            directory: Where checkpoints go, as the backends see it.
        """
        self.client, self.tasks, self.handler = client, tasks, handler
        self.directory = directory.absolute()
        self.run = f"trl-{secrets.token_hex(4)}"
        self._synced: int | None = None

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        self._sync(trainer)
        # TRL repeats a prompt as often as its group has members: each run of equal ones is one group here.
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        requests = [
            RolloutRequest(handler=self.handler, task=self.tasks[prompt], n=n, limits=Limits(max_turns=4))
            for prompt, n in groups
        ]
        # In the order of submission, so the i-th is the i-th prompt's.
        return adapter.rollout_func_result(self.client.run(requests, progress=False))

    def _sync(self, trainer: GRPOTrainer) -> None:
        """Bring the weights to the backends, once for each optimizer step.

        Raises:
            RuntimeError: A backend did not take them.
        """
        step = trainer.state.global_step
        if step == self._synced:
            return
        path = self.directory / f"step-{step:06d}"
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(path)
        trainer.processing_class.save_pretrained(path)
        update = self.client.update_policy(
            f"{self.run}-{step}", str(path), mode="wait", reset_prefix_cache=True, wait=600.0
        )
        if update.state is not UpdateState.DONE:
            raise RuntimeError(f"weights {update.version} did not arrive: {update.state.value}")
        if self._synced is not None:
            shutil.rmtree(self.directory / f"step-{self._synced:06d}", ignore_errors=True)
        self._synced = step


def make_trainer(
    client: Client, out: Path, steps: int, prompts: int, n: int, learning_rate: float, seed: int = 0
) -> GRPOTrainer:
    """TRL's trainer on the demo model, `prompts` groups of `n` rollouts a step."""
    torch.set_num_threads(1)  # the processors belong to the rollouts
    tasks = {task["question"]: task for task in make_tasks(max(64, prompts * steps), seed)}
    config = GRPOConfig(
        output_dir=str(out / "trl"),
        max_steps=steps,
        per_device_train_batch_size=prompts * n,
        num_generations=n,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        max_completion_length=512,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(DEMO_MODEL),
        reward_funcs=adapter.reward,
        train_dataset=Dataset.from_list([{"prompt": question} for question in tasks]),
        args=config,
        rollout_func=ServiceRollouts(client, tasks, out / "weights", "calculator"),
    )


def main() -> int:
    """Train, and print what TRL logged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=6, help="groups of a step")
    parser.add_argument("--n", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="gateway of a service that runs [a service of its own]")
    parser.add_argument("--out", type=Path, default=ROOT / ".local" / "train" / "trl")
    args = parser.parse_args()
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)  # noqa: E731
    service: AbstractContextManager[str] = nullcontext(args.url) if args.url else own_service(None, None, say)
    with service as url, Client(url) as client:
        trainer = make_trainer(client, args.out, args.steps, args.prompts, args.n, args.lr, args.seed)
        trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    print(f"mean reward of each step: {' '.join(f'{reward:.2f}' for reward in rewards)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
