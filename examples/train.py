"""Train a policy by reinforcement learning, with the rollouts from the service.

    python examples/train.py --algorithm grpo --steps 150 --report

GRPO, DAPO or PPO in plain PyTorch. Without --url it starts a service of its own on this machine, with the
demo model behind it. A run lives in a directory (--out): `log.jsonl`, `progress.png`, the last checkpoints.
The same command again goes on where a run was, however it ended.

A step: read a batch of groups, learn from it, save the weights in a new directory, bring them to the backends
through /v1/policy. Groups still under way then go on, and come with the next batch if they are not too stale.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # examples are no installed package

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

from examples.demo_model.task import make_tasks  # noqa: E402
from examples.training import agents, losses  # noqa: E402
from examples.training.actor import Actor  # noqa: E402
from examples.training.data import Rows, Sample, collate, is_informative, samples_of, scored  # noqa: E402
from examples.training.feed import Collected, Feed, Plan, read_lines  # noqa: E402
from examples.training.record import Log, mean, plot, report  # noqa: E402
from examples.training.service import own_service  # noqa: E402
from rollout.batch import Verdict  # noqa: E402
from rollout.client import ApiError, Client  # noqa: E402
from rollout.policy import Canary, UpdateState  # noqa: E402
from rollout.schema import EXTERNAL, Agent, Limits, RolloutRequest  # noqa: E402

DEMO_MODEL = ROOT / "examples" / "demo_model" / "checkpoint"
CANARY_TEXT = "37 times 85 is 3145; 3145 over 37 is 85; 85 plus 37 minus 3145"
TOLERANCE = 1e-3
"""Nats by which a backend may differ on the canary; float32 against float32 differs by 1e-5."""
TASK_DRAW = 256
PROGRAM_S = 300.0
"""Seconds of RUN for a rollout that a program drives, its wait for a place among --at-once included."""
PLOT_EVERY = 10
REPORTED = (
    *("reward", "logprob_gap", "staleness", "staleness_max", "informative", "loss", "entropy", "grad_norm"),
    *("clipped", "truncated", "tokens", "scored", "dropped", "carried"),
)
"""Numbers of a step's line of the log that the service is told."""
DEFAULTS = {
    # groups, n, filters, prompts at hand, gradient steps a batch, learning rate
    "grpo": {"groups": 6, "n": 8, "filters": (), "supply": 1.5, "passes": 2, "lr": 4e-5},
    "dapo": {"groups": 6, "n": 8, "filters": ("uniform_reward",), "supply": 4.0, "passes": 2, "lr": 4e-5},
    "ppo": {"groups": 48, "n": 1, "filters": (), "supply": 1.5, "passes": 2, "lr": 4e-5},
}


class Trainer:
    """One run: its weights, its optimizer, its place in the sequence of steps."""

    def __init__(self, args: argparse.Namespace, client: Client) -> None:
        self.args, self.client, self.out = args, client, args.out
        self.checkpoints = self.out / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.run = self._identity()
        self.log = Log(self.out / "log.jsonl")
        plan = Plan(args.groups, args.n, args.filters, args.oversample, args.max_staleness, args.supply)
        self.feed = Feed(client, self.run, self.out / "journal.jsonl", plan, self._prompts)

        saved = self._saved()
        self.step = max(saved, default=0)
        """Steps done: the weights are those after so many."""
        torch.manual_seed(args.seed)
        start, critic = saved.get(self.step, args.model), args.algorithm == "ppo"
        self.actor = Actor(start, args.device, critic, base=args.model)
        self.optimizer = self.actor.optimizer(args.lr, args.critic_lr)
        self.reference = Actor(args.model, args.device) if args.kl else None
        self.canary_ids = self._canary_ids()
        if saved:
            state = self.actor.load_state(saved[self.step])
            self.optimizer.load_state_dict(state["optimizer"])
            self.log.keep_until(self.step)
            if state["row"]:  # killed between checkpoint and log
                self.log.add(state["row"])
        else:
            self.log.keep_until(0)
            self._save(None)
        self._update_backends()

    # -- one step ----------------------------------------------------------------------------

    def advance(self, watch=lambda _: None) -> dict:
        """Do the next step; gives its line of the log.

        Raises:
            RuntimeError: The backends refused the new weights.
        """
        step, seconds = self.step + 1, {}
        begun = time.monotonic()
        collected = self.feed.collect(step, watch)
        seconds["rollouts"] = time.monotonic() - begun

        begun = time.monotonic()
        advantages = partial(losses.group_advantages, kind=self.args.advantage)
        samples = [sample for group in collected.of(Verdict.KEPT) for sample in samples_of(group, advantages)]
        learned = self._learn(samples) if samples else dict.fromkeys(("loss", "logprob_gap", "entropy"))
        seconds["train"] = time.monotonic() - begun

        row = {"step": step, "version": self.version(step), **self._facts(collected, samples), **learned}
        row["seconds"] = seconds
        self.step = step
        begun = time.monotonic()
        self._save(row)
        self.feed.forget()
        seconds["save"] = time.monotonic() - begun
        begun = time.monotonic()
        self._update_backends()
        seconds["update"] = time.monotonic() - begun
        self.log.add(row)
        self._report(row)
        return row

    def _report(self, row: dict) -> None:
        """Show the step on the service's page; without that the run goes on all the same."""
        with suppress(ApiError):
            numbers = {name: row.get(name) for name in REPORTED} | {
                f"seconds.{name}": seconds for name, seconds in row["seconds"].items()
            }
            self.client.report(row["step"], numbers, run=self.run, policy_version=row["version"])

    def _learn(self, samples: list[Sample]) -> dict:
        """Gradient steps on one batch, in parts that fit into memory."""
        args, actor = self.args, self.actor
        # Neighbours of about the same length: padding costs as much as ids do.
        samples = sorted(samples, key=lambda sample: len(sample.token_ids))
        version = self.version(self.step)
        parts = [
            collate(samples[i : i + args.micro_batch], version, actor.device)
            for i in range(0, len(samples), args.micro_batch)
        ]
        tokens = sum(int(part.mask.sum()) for part in parts)
        with torch.no_grad():
            starts = [actor.forward(part) for part in parts]
            references = [self.reference.forward(part)[0] if self.reference else None for part in parts]
        gaps = [
            (start - part.behaviour).abs()[part.current]
            for part, (start, _, _) in zip(parts, starts, strict=True)
        ]
        entropy = sum(start[1][part.mask].sum().item() for part, start in zip(parts, starts, strict=True))
        returns = self._judge(parts, [start[2] for start in starts]) if actor.critic is not None else None

        clip = losses.Clip(args.clip_low, args.clip_high, args.truncate)
        for _ in range(args.passes):
            loss, clipped, truncated = 0.0, 0, 0
            for i, part in enumerate(parts):
                new, _, values = actor.forward(part)
                policy = losses.policy_loss(
                    new, starts[i][0], part.behaviour, part.advantages, part.mask, tokens, clip
                )
                total = policy.loss
                if references[i] is not None:
                    total = total + args.kl * losses.kl_penalty(new, references[i], part.mask, tokens)
                if returns is not None:
                    total = total + losses.value_loss(values, returns[i], part.mask, tokens)
                total.backward()
                loss += total.item()
                clipped += policy.clipped
                truncated += policy.truncated
            norm = float(torch.nn.utils.clip_grad_norm_(actor.model.parameters(), args.max_grad_norm))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return {
            "loss": loss,
            "logprob_gap": max((float(gap.max()) for gap in gaps if gap.numel()), default=None),
            "gap_tokens": sum(gap.numel() for gap in gaps),
            "tokens": tokens,
            "entropy": entropy / tokens,
            "grad_norm": norm,
            "clipped": clipped / tokens,
            "truncated": truncated / tokens,
        }

    def _judge(self, parts: list[Rows], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """PPO: advantages over the critic's values, into the parts; gives the returns."""
        advantages, returns = zip(
            *(
                losses.gae(value, part.rewards, part.mask, lam=self.args.gae_lambda)
                for part, value in zip(parts, values, strict=True)
            ),
            strict=True,
        )
        for part, white in zip(parts, losses.whiten(advantages, [part.mask for part in parts]), strict=True):
            part.advantages = white
        return list(returns)

    def _facts(self, collected: Collected, samples: list[Sample]) -> dict:
        """What the step's groups were: all decided ones count, not only those that were learned from."""
        members = [rollout for group in collected.groups for rollout in group.rollouts]
        usable = [group for group in collected.groups if scored(group)]
        ages = [
            self.step - int(version.rpartition("-")[2])
            for sample in samples
            for version in sample.versions
            if version is not None and version.startswith(f"{self.run}-")
        ]
        fresh = [group for group in collected.groups if group.reason != "stale"]
        return {
            "reward": mean([rollout.reward for group in fresh for rollout in scored(group)]),
            "informative": mean([float(is_informative(group)) for group in usable])
            if self.args.n > 1
            else None,
            "staleness": mean(ages),
            "staleness_max": max(ages, default=None),
            "scored": sum(len(scored(group)) for group in collected.groups),
            "dropped": sum(rollout.drop for rollout in members),
            "carried": sum(group.carried for group in collected.groups),
            "groups": {verdict.value: [group.id for group in collected.of(verdict)] for verdict in Verdict},
            "reasons": collected.batch.reasons,
        }

    # -- prompts -----------------------------------------------------------------------------

    def _prompts(self, step: int) -> Iterator[RolloutRequest]:
        """The step's prompts without end: a function of seed and step, so a restart asks for the same."""
        rng = random.Random(f"{self.args.seed}-{step}")
        while True:
            if self.args.tasks is None:
                tasks = make_tasks(TASK_DRAW, rng.randrange(2**31))
            else:
                tasks = [
                    json.loads(line) for line in self.args.tasks.read_text().splitlines() if line.strip()
                ]
                rng.shuffle(tasks)
            limits = Limits(max_turns=self.args.max_turns, max_response_tokens=self.args.max_tokens)
            how = {"handler": self.args.handler, "limits": limits}
            if self.args.agent:
                limits.run_timeout_s = PROGRAM_S
                how |= {"agent": Agent(harness=EXTERNAL), "tags": [self.run]}
            yield from (RolloutRequest(task=task, **how) for task in tasks)

    # -- weights -----------------------------------------------------------------------------

    def version(self, step: int) -> str:
        return f"{self.run}-{step}"

    def _save(self, row: dict | None) -> None:
        state = {"step": self.step, "optimizer": self.optimizer.state_dict(), "row": row}
        self.actor.save(self.checkpoints / f"step-{self.step:06d}", state)

    def _saved(self) -> dict[int, Path]:
        return {int(path.name[5:]): path for path in self.checkpoints.glob("step-*")}

    def _update_backends(self) -> None:
        """The weights of this step onto the backends; then checkpoints before the last two are not needed."""
        path = (self.checkpoints / f"step-{self.step:06d}").absolute()
        canary = Canary(
            token_ids=self.canary_ids, logprobs=self.actor.logprobs_of(self.canary_ids), tolerance=TOLERANCE
        )
        # Each call is sampled by one version, and nothing that older weights computed is used again: so a
        # token's label says exactly what the trainer has to compare it with.
        update = self.client.update_policy(
            self.version(self.step),
            str(path),
            canary=canary,
            mode="wait",
            reset_prefix_cache=True,
            wait=600.0,
        )
        if update.state is not UpdateState.DONE:
            errors = {name: backend.error for name, backend in update.backends.items()}
            raise RuntimeError(f"weights {update.version} did not arrive: {update.state.value}, {errors}")
        for step, old in self._saved().items():
            if step < self.step - 1:
                shutil.rmtree(old, ignore_errors=True)

    def _canary_ids(self) -> list[int]:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.args.model).encode(CANARY_TEXT, add_special_tokens=False)

    def _identity(self) -> str:
        """The run's name, part of its versions and batches; the same after a restart.

        Raises:
            SystemExit: The directory holds a run with other settings.
        """
        file, settings = self.out / "run.json", settings_of(self.args)
        if not file.exists():
            partial_file = file.with_suffix(".partial")
            partial_file.write_text(
                json.dumps({"run": f"train-{uuid.uuid4().hex[:8]}", "settings": settings})
            )
            partial_file.rename(file)
        saved = json.loads(file.read_text())
        differing = [name for name, value in settings.items() if saved["settings"].get(name) != value]
        if differing:
            raise SystemExit(
                f"{self.out} holds a run with another {', '.join(differing)}; give another --out"
            )
        return saved["run"]


def _shown(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def settings_of(args: argparse.Namespace) -> dict:
    """What makes two runs the same run; the number of steps may grow."""
    left_out = {"out", "url", "backend", "report", "steps", "device", "sandbox_runtime", "micro_batch"}
    left_out |= {"at_once"} if args.agent else {"at_once", "ask"}
    return {
        name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for name, value in vars(args).items()
        if name not in left_out
    }


def train(args: argparse.Namespace, client: Client, console: Console) -> Trainer:
    """Run to `args.steps`, showing where it is."""
    if args.device == "cpu":
        # The processors belong to the rollouts; on busy ones, threads that wait for each other cost a lot.
        torch.set_num_threads(1)
    trainer = Trainer(args, client)
    programs: AbstractContextManager[None] = nullcontext()
    if args.agent:
        programs = agents.driven(client, trainer.run, args.agent, args.ask, args.at_once)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with programs, Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bar:
        task = bar.add_task(args.algorithm, total=args.steps, completed=trainer.step, note="")
        note = ""
        while trainer.step < args.steps:
            row = trainer.advance(
                lambda batch: bar.update(task, note=f"{note} · {batch.kept}/{batch.wanted} groups")  # noqa: B023
            )
            note = f"reward {_shown(row['reward'], '.3f')}, gap {_shown(row['logprob_gap'], '.0e')}"
            bar.update(task, completed=trainer.step, note=note)
            if trainer.step % PLOT_EVERY == 0:
                plot(trainer.log.rows, args.out / "progress.png", f"{args.algorithm}, {trainer.run}")
        trainer.feed.close(trainer.step)
    return trainer


def run(args: argparse.Namespace, console: Console, say: Callable[[str], None]) -> None:
    """Train on the service of --url, or on one that starts and ends with the run."""
    # A TERM, and the Ctrl-C that a shell's background ignores, end the service of our own in order.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    service: AbstractContextManager[str] = (
        nullcontext(args.url) if args.url else own_service(args.backend, args.sandbox_runtime, say)
    )
    with service as url, Client(url) as client:
        train(args, client, console)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what an algorithm has its own default for is filled in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--algorithm", choices=sorted(DEFAULTS), default="grpo")
    add("--steps", type=int, default=150)
    add("--out", type=Path, help="directory of the run [.local/train/ALGORITHM-SEED]")
    add("--model", type=Path, default=DEMO_MODEL, help="checkpoint to start from [the demo model]")
    add("--handler", default="calculator")
    add("--tasks", type=Path, help="JSON lines, a task each [the calculator's]")
    add("--agent", type=Path, help="program that drives the rollouts [the service's own loop]")
    add("--ask", default="question", help="field of a task that is the program's question")
    add("--at-once", type=int, default=8, help="programs that run beside each other")
    add("--url", help="gateway of a service that runs [a service of its own]")
    add("--backend", help="LLM server for the service of its own [the embedded one]")
    add("--sandbox-runtime", help="auto, apptainer, bubblewrap or local-unsafe")
    add("--groups", type=int, help="groups of a step")
    add("--n", type=int, help="rollouts of a group")
    add(
        "--filters", type=lambda text: tuple(filter(None, text.split(","))), help="names, separated by commas"
    )
    add("--supply", type=float, help="prompts at hand for a step, as a multiple of --groups")
    add("--oversample", type=float, default=1.5, help="groups under way, as a multiple of those missing")
    add("--max-staleness", type=int, default=2, help="weight updates that a group may be behind")
    add("--max-turns", type=int, default=4)
    add("--max-tokens", type=int, default=256, help="ids that a rollout may sample")
    add("--lr", type=float)
    add("--critic-lr", type=float, default=1e-3)
    add("--passes", type=int, help="gradient steps on each batch")
    add("--micro-batch", type=int, default=16, help="sequences of one forward pass")
    add(
        "--advantage",
        choices=["group", "loo"],
        default="group",
        help="normalised in its group, or leave-one-out",
    )
    add("--gae-lambda", type=float, default=0.95)
    add("--clip-low", type=float, default=0.2)
    add("--clip-high", type=float, default=0.28)
    add("--truncate", type=float, default=2.0, help="largest weight of the importance sampling")
    add("--kl", type=float, default=0.0, help="weight of the distance from the first checkpoint")
    add("--max-grad-norm", type=float, default=1.0)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--report", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.algorithm].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out = args.out or ROOT / ".local" / "train" / f"{args.algorithm}-{args.seed}"
    return args


def main(argv: list[str] | None = None) -> int:
    """Train, draw, report."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    log = args.out / "log.jsonl"
    if sum(1 for _ in read_lines(log)) < args.steps:  # else there is only something to report
        try:
            run(args, console, say)
        except KeyboardInterrupt:
            say(f"interrupted; the same command goes on from here: {args.out}")
            return 130
    rows = list(read_lines(log))
    picture = args.out / "progress.png"
    plot(rows, picture, f"{args.algorithm}, {rows[-1]['version']}")
    summary = report(rows, json.loads((args.out / "run.json").read_text())["settings"])
    first, last = summary["results"]["reward_first20"], summary["results"]["reward_last20"]
    say(f"picture: {picture}")
    say(f"mean reward of the first 20 steps {first}, of the last 20 {last}")
    if args.report:
        print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
