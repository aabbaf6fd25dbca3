"""Two players, both trained: rollouts of the game `duel`, and what a trainer gets of each side.

    python examples/selfplay.py --groups 4 --n 4

The agent plays against policy --opponent, by default against itself. The chains of both are in each
trajectory, and both are samples: the request names the role `opponent` in `trained_roles`. Without --url it
starts a service of its own on this machine, with the demo model behind it, and ends that again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # examples are no installed package

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from examples.demo_model.task import make_tasks  # noqa: E402
from examples.training.service import own_service  # noqa: E402
from rollout.adapters.base import advantages, reward_of, samples, usable  # noqa: E402
from rollout.client import Client  # noqa: E402
from rollout.schema import DEFAULT_POLICY, Limits, Rollout, RolloutRequest, SamplingParams  # noqa: E402

TIMEOUT_S = 600.0


def games(groups: int, n: int, opponent: str, seed: int) -> list[RolloutRequest]:
    """So many questions, each to be played `n` times."""
    return [
        RolloutRequest(
            handler="duel",
            task=task | {"opponent": opponent},
            n=n,
            trained_roles=["opponent"],
            # Hot enough for mistakes: a game that both win teaches neither.
            sampling=SamplingParams(temperature=1.3, max_tokens=64, seed=seed),
            limits=Limits(max_turns=4),
        )
        for task in make_tasks(groups, random.Random(seed).randrange(2**31))
    ]


def sides(rollouts: Sequence[Rollout]) -> list[dict]:
    """A row for each sample: whose it is, what it is worth, and the versions that sampled it.

    A group's advantages are of one role: the agent's are compared with each other, and so are the opponent's.
    """
    by_role = {role: advantages(rollouts, role) for role in ("agent", "opponent")}
    return [
        {
            "rollout": rollout.id,
            "question": rollout.request.task["question"],
            "side": sample.chain.role,
            "policy": sample.chain.policy or rollout.request.policy,
            "sampled": sum(sample.loss_mask),
            "versions": sorted(set(filter(None, sample.policy_versions))),
            "reward": reward_of(rollout, sample.chain.role),
            "advantage": by_role[sample.chain.role][place],
        }
        for place, rollout in enumerate(rollouts)
        if usable(rollout)
        for sample in samples(rollout)
    ]


def table(rows: Sequence[dict]) -> Table:
    shown = Table(title="samples by side", box=None)
    for name in ("question", "side", "policy", "sampled", "versions", "reward", "advantage"):
        shown.add_column(name, justify="right" if name in ("sampled", "reward", "advantage") else "left")
    for row in sorted(rows, key=lambda row: row["side"]):
        texts = {**row, "versions": ", ".join(row["versions"]), "reward": f"{row['reward']:+g}"}
        texts["advantage"] = f"{row['advantage']:+.2f}"
        shown.add_row(*(str(texts[column.header]) for column in shown.columns))
    return shown


def play(client: Client, groups: int, n: int, opponent: str, seed: int = 0) -> list[dict]:
    """Play, and give the samples.

    Raises:
        SystemExit: Nothing could be played.
    """
    rollouts = client.run(games(groups, n, opponent, seed), TIMEOUT_S)
    rows = sides(rollouts)
    if not rows:
        first = rollouts[0]
        raise SystemExit(f"no game was played to its end: {first.error.message if first.error else first}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="a service that runs; None = one of its own")
    parser.add_argument("--backend", help="an LLM server for the service of its own; None = the demo model")
    parser.add_argument("--sandbox-runtime", help="apptainer, bubblewrap or local-unsafe")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--opponent", default=DEFAULT_POLICY, help="policy of the other player")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console()
    service = nullcontext(args.url) if args.url else own_service(args.backend, args.sandbox_runtime, print)
    with service as url, Client(url) as client:
        rows = play(client, args.groups, args.n, args.opponent, args.seed)
    console.print(table(rows))
    for side in ("agent", "opponent"):
        its = [row for row in rows if row["side"] == side]
        won = sum(row["reward"] > 0 for row in its)
        tokens = sum(row["sampled"] for row in its)
        console.print(f"{side}: {len(its)} samples, {tokens} sampled tokens in all, {won} won")


if __name__ == "__main__":
    main()
