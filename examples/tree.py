"""GRPO over trees of rollouts, beside GRPO over groups, at equal sampled tokens.

    python examples/tree.py --seeds 0 1 2

The task is the quiz of `examples/demo_model/quiz.py`: several sums, one turn each, and a reward for the share
that is right. A group is so many rollouts of a quiz. A tree is half of them, and from a turn of each another
one that shares what came before (`POST /v1/rollouts` with `from`): `rollout.trees` says what each turn is
worth, by what else went on from where it begins. The loss is the same, and so is what both begin with: the
demo model, shown some quizzes. Each learns until it has sampled --tokens ids, those of its steps alone.

It prints a line of JSON a seed, and a last one with the rates of quizzes that are all right at the end.
Without --url it starts a service of its own on this machine, and ends that again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # examples are no installed package

import torch  # noqa: E402

from examples.demo_model.quiz import make_quizzes  # noqa: E402
from examples.training import losses  # noqa: E402
from examples.training.actor import Actor  # noqa: E402
from examples.training.data import Sample, collate  # noqa: E402
from examples.training.service import own_service  # noqa: E402
from rollout.adapters.base import own_samples, usable  # noqa: E402
from rollout.client import Client  # noqa: E402
from rollout.policy import UpdateState  # noqa: E402
from rollout.schema import ForkPoint, ForkRequest, Limits, Rollout, RolloutRequest  # noqa: E402
from rollout.trees import Tree, tokens_ratio  # noqa: E402

DEMO_MODEL = ROOT / "examples" / "demo_model" / "checkpoint"
HANDLER = "examples.demo_model.quiz:Quiz"
ARMS = ("grpo", "tree")
TIMEOUT_S = 600.0
SHOWN_RATE = 1e-3
RIGHT = 0.6
"""How often an operator is right in the quizzes that the demo model is shown; in its own it then is half the
time."""
PASSES = 2
MICRO_BATCH = 16


def requests(tasks: Sequence[dict], n: int, **more) -> list[RolloutRequest]:
    """Each quiz `n` times."""
    limits = Limits(max_turns=len(tasks[0]["questions"]), max_response_tokens=1024)
    return [RolloutRequest(handler="quiz", task=task, n=n, limits=limits, **more) for task in tasks]


def grown(client: Client, arm: str, tasks: Sequence[dict], n: int, turns: Sequence[int]) -> list[Rollout]:
    """The rollouts of a step: `n` leaves a quiz. In a tree each root is left once at each of `turns`."""
    if arm == "grpo":
        return client.run(requests(tasks, n), TIMEOUT_S)
    roots = client.run(requests(tasks, n // (1 + len(turns)), checkpoints="every_turn"), TIMEOUT_S)
    forks = [
        ForkRequest(from_=ForkPoint(rollout=root.id, turn=turn))
        for root in roots
        for turn in turns
        if usable(root) and root.trajectory.turns > turn
    ]
    return roots + client.run(forks, TIMEOUT_S) if forks else roots


def samples_of(rollouts: Sequence[Rollout]) -> list[Sample]:
    """What is to be learned from. Without forks a token's advantage is its reward less its group's mean."""
    tree = Tree(rollouts)
    made = []
    for rollout in filter(usable, rollouts):
        for sample, advantages in zip(own_samples(rollout), tree.advantages(rollout.id), strict=True):
            prompt = len(sample.prompt_ids)
            made.append(
                Sample(
                    token_ids=sample.prompt_ids + sample.response_ids,
                    sampled=[False] * prompt + [bit == 1 for bit in sample.loss_mask],
                    logprobs=[0.0] * prompt + sample.logprobs,
                    versions=[None] * prompt + sample.policy_versions,
                    reward=rollout.reward,
                    advantage=[0.0] * prompt + advantages,
                )
            )
    return made


class Learner:
    """Weights that learn, and the backends that get them."""

    def __init__(self, client: Client, start: Path, place: Path, name: str, rate: float) -> None:
        self.client, self.place, self.name, self.step = client, place, name, 0
        self.actor = Actor(start, "cpu")
        self.optimizer = self.actor.optimizer(rate, rate)
        self._update()

    def learn(self, samples: Sequence[Sample]) -> None:
        """Two steps along the clipped gradient, as those of `train.py`; the backends get the weights."""
        ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
        version = f"{self.name}-{self.step}"
        parts = [collate(ordered[i : i + MICRO_BATCH], version) for i in range(0, len(ordered), MICRO_BATCH)]
        tokens = sum(int(part.mask.sum()) for part in parts)
        with torch.no_grad():
            starts = [self.actor.forward(part)[0] for part in parts]
        for _ in range(PASSES):
            for part, start in zip(parts, starts, strict=True):
                new = self.actor.forward(part)[0]
                how = (part.behaviour, part.advantages, part.mask, tokens, losses.Clip())
                losses.policy_loss(new, start, *how).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.actor.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._update()

    def _update(self) -> None:
        path = self.place / f"{self.name}-{self.step}"
        self.actor.save(path, {})
        update = self.client.update_policy(
            f"{self.name}-{self.step}", str(path), mode="wait", reset_prefix_cache=True, wait=TIMEOUT_S
        )
        shutil.rmtree(self.place / f"{self.name}-{self.step - 1}", ignore_errors=True)
        if update.state is not UpdateState.DONE:
            raise RuntimeError(f"weights {update.version} did not arrive: {update.state.value}")


def all_right(rollouts: Sequence[Rollout]) -> float:
    """The rate of quizzes without a mistake."""
    return statistics.fmean(r.reward_components.get("all_right", 0.0) for r in rollouts)


def trained(client: Client, arm: str, seed: int, args: argparse.Namespace) -> dict:
    """One run: its curve, by sampled ids, and the rate at its end."""
    torch.manual_seed(seed)
    begun, rng = time.monotonic(), random.Random(seed)
    learner = Learner(client, args.start, args.out, f"{arm}-{seed}-{os.getpid()}", args.lr)
    spent, curve, ratios = 0, [], []
    while spent < args.tokens:
        tasks = make_quizzes(args.quizzes, args.questions, rng.randrange(2**31))
        rollouts = grown(client, arm, tasks, args.n, args.turns)
        spent += sum(r.trajectory.sampled_tokens for r in rollouts if r.trajectory)
        roots = [r for r in rollouts if r.request.origin is None and usable(r)]
        curve.append((spent, round(statistics.fmean(r.reward for r in roots), 3)))
        ratios.append(tokens_ratio(rollouts))
        learner.learn(samples_of(rollouts))

    tests = make_quizzes(args.tests, args.questions, seed=10_000 + seed)
    rate = all_right(client.run(requests(tests, 1), TIMEOUT_S))
    return {
        "all_right": round(rate, 3),
        "sampled_tokens": spent,
        "steps": learner.step,
        "tokens_ratio": round(statistics.fmean(ratios), 3),
        "curve": curve,
        "seconds": round(time.monotonic() - begun),
    }


def shown(start: Path, to: Path, args: argparse.Namespace) -> Path:
    """The demo model after some quizzes, whose operators are right in part."""
    from transformers import AutoTokenizer

    from examples.demo_model.conversation import Conversation, ConversationMaker
    from examples.demo_model.task import OPERATORS, bash_command, parse_question
    from examples.demo_model.train_sft import collate as padded

    if to.exists():
        return to
    torch.manual_seed(0)
    rng, actor = random.Random(0), Actor(start, "cpu")
    maker = ConversationMaker(AutoTokenizer.from_pretrained(start))
    optimizer = torch.optim.AdamW(actor.model.parameters(), lr=SHOWN_RATE)

    def drawn(questions: list[str]) -> Conversation:
        ids = maker.prompt_ids(questions[0])
        sampled = [False] * len(ids)
        for at, question in enumerate(questions, start=1):
            a, word, b = parse_question(question)
            others = [other for other in OPERATORS if other != word]
            meant = word if rng.random() < RIGHT else rng.choice(others)
            call = maker.tool_call_ids(bash_command(a, OPERATORS[meant][0], b))
            before, ids = ids, ids + call
            sampled += [True] * len(call)
            if at < len(questions):
                ids = maker.after_tool(before, call, questions[at])
                sampled += [False] * (len(ids) - len(sampled))
        return Conversation(ids, sampled)

    for step in range(args.shown):
        for group in optimizer.param_groups:
            group["lr"] = SHOWN_RATE * (1 - step / args.shown)
        quizzes = make_quizzes(16, args.questions, rng.randrange(2**31))
        ids, labels = padded([drawn(quiz["questions"]) for quiz in quizzes], maker.tokenizer.pad_token_id)
        actor.model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    actor.save(to, {})
    return to


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--url", help="a service that runs, with the handler `quiz`; None = one of its own")
    add("--backend", help="an LLM server for the service of its own; None = the embedded one")
    add("--sandbox-runtime", help="apptainer, bubblewrap or local-unsafe; no sandbox is used")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--tokens", type=int, default=50_000, help="ids that a run samples in its steps")
    add("--questions", type=int, default=3, help="of a quiz: its turns")
    add("--quizzes", type=int, default=8, help="of a step")
    add("--n", type=int, default=8, help="leaves of a quiz")
    add("--turns", type=int, nargs="+", default=[1], help="turns at which each root of a tree is left")
    add("--tests", type=int, default=100, help="quizzes of the rate at the end")
    add("--shown", type=int, default=150, help="steps in which the demo model is shown quizzes")
    add("--lr", type=float, default=2e-4)
    add("--out", type=Path, default=ROOT / ".local" / "train" / "tree", help="where weights are written")
    return parser.parse_args(argv)


def compare(client: Client, args: argparse.Namespace) -> dict:
    """Every seed with each way; a line of JSON for each, and the last one of all."""
    args.out.mkdir(parents=True, exist_ok=True)
    args.start = shown(DEMO_MODEL, args.out / f"start-{args.questions}-{args.shown}", args)
    rows = []
    for seed in args.seeds:
        rows.append({"seed": seed} | {arm: trained(client, arm, seed, args) for arm in args.arms})
        print(json.dumps(rows[-1]), flush=True)
    rates = {arm: [row[arm]["all_right"] for row in rows] for arm in args.arms}
    result = {arm: {"mean": round(statistics.fmean(each), 3), "seeds": each} for arm, each in rates.items()}
    print(json.dumps({"all_right": result}), flush=True)
    return result


def main() -> None:
    args = parse()
    for number in (signal.SIGTERM, signal.SIGINT):  # a service of our own ends in order
        signal.signal(number, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ["ROLLOUT_HANDLERS"] = HANDLER
    say = lambda *words: print(*words, file=sys.stderr)  # noqa: E731
    service = nullcontext(args.url) if args.url else own_service(args.backend, args.sandbox_runtime, say)
    with service as url, Client(url) as client:
        compare(client, args)


if __name__ == "__main__":
    main()
