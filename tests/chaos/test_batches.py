"""A batch while everything around it is killed: every group is accounted for, and none is decided twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from functools import partial

from rollout.batch import BatchRequest, BatchState
from rollout.client import RolloutError
from rollout.schema import RolloutRequest, State, new_id
from tests.chaos.harness import PATIENCE_S, STAGES, Chaos
from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import ROOT, wait_until

GROUPS = CHAOS("groups", short=12, long=60)
ROUNDS = CHAOS("rounds of faults", short=1, long=3)
KILLS = CHAOS(
    "stages whose workers are killed under a batch",
    short=[STAGES],
    long=[("run",), STAGES, ("init", "eval")],
)
N = 4


def lottery(count: int, run_s: float = 0.3) -> list[RolloutRequest]:
    """Prompts of which every second one is informative."""
    return [
        RolloutRequest(
            handler="lottery",
            task={"rewards": [1, 0] if k % 2 else [1], "run_s": run_s, "number": k},
        )
        for k in range(count)
    ]


def accounted_for(chaos: Chaos, batch_id: str) -> None:
    """Every group and rollout of a batch, by Redis' own accounts."""
    redis = chaos.redis.client
    batch = chaos.client.batches.get(batch_id)
    decided = batch.kept + batch.filtered + batch.failed + batch.cancelled
    assert batch.started + batch.carried_in == decided + batch.carried_out + batch.open
    events = [entry for _, entry in redis.xrange(f"batch:{{{batch_id}}}:events") if "group" in entry]
    assert len(events) == decided == len({entry["group"] for entry in events}), "each group is decided once"
    verdicts = Counter(entry["verdict"] for entry in events)
    assert (verdicts["kept"], verdicts["filtered"]) == (batch.kept, batch.filtered)
    ids = []
    for number in range(1, batch.started + 1):
        sent = int(redis.hget(f"batch:group:{{{batch_id}.{number}}}", "sent"))
        ids += [f"{batch_id}.{number}.{k}" for k in range(sent)]
    chaos.require_exact(ids)
    assert batch.in_flight == 0


def test_a_batch_survives_the_death_of_the_gateway_of_redis_and_of_all_workers(chaos):
    request = BatchRequest(
        id=new_id(), prompts=lottery(4 * GROUPS), n=N, groups=GROUPS, max_in_flight=12, carry="none"
    )
    chaos.client.batches.create(request)
    chance = random.Random(7)
    faults = [chaos.restart_gateway, chaos.restart_redis]
    faults += [partial(chaos.kill_workers, stages) for stages in KILLS]
    for fault in faults * ROUNDS:
        before = _kept(chaos, request.id)
        wait_until(
            lambda before=before: _kept(chaos, request.id) > before or _ended(chaos, request.id),
            PATIENCE_S,
            "the batch to go on",
        )
        time.sleep(chance.uniform(0, 0.3))
        fault()
        if missing := set(STAGES) - set(chaos.workers):
            chaos.start_stages(sorted(missing))
    groups = list(chaos.client.batches.stream(request.id, timeout=PATIENCE_S, include="summary"))
    assert len(groups) == len({group.id for group in groups}) == GROUPS
    for group in groups:
        assert len(group.rollouts) == N and {rollout.reward for rollout in group.rollouts} == {0.0, 1.0}
    wait_until(lambda: chaos.client.batches.get(request.id).open == 0, PATIENCE_S, "the rest to be cancelled")
    accounted_for(chaos, request.id)


def _kept(chaos: Chaos, batch_id: str) -> int:
    try:
        return chaos.client.batches.get(batch_id).kept
    except RolloutError:  # its gateway or Redis is on its way back
        return 10**9


def _ended(chaos: Chaos, batch_id: str) -> bool:
    return chaos.client.batches.get(batch_id).state.ended


TRAINER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from rollout.client import Client

    batch, notes = sys.argv[1], Path(sys.argv[2])
    client = Client(sys.argv[3])
    cursor = notes.read_text().split()[-1] if notes.exists() else "0"
    while True:
        page = client.batches.groups(batch, cursor, wait=5, limit=1, include="summary")
        for group in page.groups:
            with notes.open("a") as file:  # what was learnt from, and the cursor behind it, in one write
                file.write(f"{group.id} {page.cursor}\\n")
        cursor = page.cursor
        if not page.groups and page.batch.state.ended:
            break
    """
)


def test_a_trainer_that_is_killed_goes_on_at_its_cursor_and_misses_no_group(chaos, tmp_path):
    made = chaos.client.batches.create(
        BatchRequest(prompts=lottery(4 * GROUPS, 0.1), n=N, groups=GROUPS, max_in_flight=12, carry="none")
    )
    notes, script = tmp_path / "notes", tmp_path / "trainer.py"
    script.write_text(TRAINER)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(script), made.id, str(notes), chaos.url]

    def learnt() -> list[str]:
        return [line.split()[0] for line in notes.read_text().splitlines()] if notes.exists() else []

    for kills in range(3):
        trainer = subprocess.Popen(argv, env=env, cwd=tmp_path)
        wait_until(lambda kills=kills: len(learnt()) > 3 * kills, PATIENCE_S, "the trainer to learn")
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(10)
    assert subprocess.run(argv, env=env, cwd=tmp_path, timeout=PATIENCE_S, check=False).returncode == 0
    kept = [group.id for group in chaos.client.batches.stream(made.id, include="verdicts")]
    assert learnt() == kept and len(kept) == GROUPS
    assert chaos.client.batches.get(made.id).state is BatchState.DONE


def test_a_batch_goes_on_while_its_rollouts_are_cancelled_one_by_one(chaos):
    made = chaos.client.batches.create(
        BatchRequest(prompts=lottery(2 * GROUPS), n=N, groups=GROUPS, max_in_flight=16, min_scored=2)
    )
    chance = random.Random(3)
    while not chaos.client.batches.get(made.id).state.ended:
        page = chaos.client.list(state=State.RUNNING, limit=50)
        mine = [rollout.id for rollout in page.rollouts if rollout.id.startswith(made.id)]
        for rollout_id in chance.sample(mine, min(2, len(mine))):
            chaos.client.cancel(rollout_id)
        time.sleep(0.1)
    chaos.client.batches.cancel(made.id)
    wait_until(lambda: chaos.client.batches.get(made.id).open == 0, PATIENCE_S, "the rest to end")
    accounted_for(chaos, made.id)
