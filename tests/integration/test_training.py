"""The reference trainer and TRL against a whole service: the mechanism, not the learning."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from examples.training.feed import read_lines
from examples.training.record import report
from rollout.adapters import trl as adapter
from rollout.batch import BatchState
from rollout.schema import EXTERNAL
from tests.helpers.lazy import Lazy
from tests.helpers.llm_servers import embedded_server
from tests.helpers.long_forms import TRAINING
from tests.helpers.rollouts import ended
from tests.helpers.sandboxes import leftovers, stop_host
from tests.helpers.stack import CHECKPOINT, ROOT, Stack, free_port, wait_until

conversation, tree = Lazy("examples.demo_model.conversation"), Lazy("examples.tree")
STEPS = TRAINING("steps with kills between", short=8, long=40)
KILLED_AFTER = TRAINING("checkpoints before a kill", short=3, long=7)
GROUPS, N = 2, 2
MAX_GAP = 1e-3
"""Nats between the engine's log-probs and the trainer's, both in float32."""
TIMEOUT_S = 280
OPTIONS = ["--device", "cpu", "--micro-batch", "3", "--seed", "1"]


def load(name: str):
    """A script of `examples/` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """Its own stack and backend: a training run leaves both with other weights."""
    with (
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir,
        embedded_server() as server,
    ):
        port = free_port()
        env = {"ROLLOUT_HANDLERS": f"workers.handlers.calculator:Calculator,{tree.HANDLER}"}
        env["ROLLOUT_CAPTURE_URL"] = f"http://127.0.0.1:{port}"
        try:
            with Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir), env) as stack:
                stack.start("capture", [sys.executable, "-m", "services.capture", "--port", str(port)])
                stack.start_workers({stage: stage for stage in ("init", "run", "eval")})
                stack.client.add_backend(server.url)
                yield stack
                assert leftovers(stack.sandbox_dir) == []
        finally:
            stop_host(Path(sandbox_dir))


def run(stack, out: Path, steps: int, *more: str) -> tuple[list[dict], object]:
    """The trainer in this process, to `steps`; gives the log and the trainer."""
    module = load("train")
    args = module.parse(["--url", stack.url, "--out", str(out), "--steps", str(steps), *OPTIONS, *more])
    trainer = module.train(args, stack.client, Console(stderr=True))
    return list(read_lines(out / "log.jsonl")), trainer


def batches_of(stack, rows: list[dict]):
    name = rows[0]["version"].rpartition("-")[0]
    return [stack.client.batches.get(f"{name}-b{row['step']}") for row in rows]


def decided(batch) -> int:
    return batch.kept + batch.filtered + batch.failed + batch.cancelled


def test_steps_with_a_trainer_killed_between_lose_no_group_and_keep_log_probs_exact(stack, tmp_path):
    out = tmp_path / "run"
    sizes = ["--algorithm", "grpo", "--groups", str(GROUPS), "--n", str(N)]
    command = [sys.executable, "examples/train.py", "--url", stack.url, "--out", str(out)]
    first = subprocess.Popen([*command, "--steps", str(STEPS), *OPTIONS, *sizes], cwd=ROOT)
    try:
        # In the middle of a step: groups have been read that no checkpoint holds yet.
        log, journal = out / "log.jsonl", out / "journal.jsonl"

        def in_the_middle():
            assert first.poll() is None, "the trainer ended by itself"
            lines = list(read_lines(journal))
            return len(list(read_lines(log))) >= KILLED_AFTER and len(lines) > 1

        wait_until(in_the_middle, TIMEOUT_S, "the trainer to be in the middle of a step")
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    before = list(read_lines(log))
    rows, trainer = run(stack, out, STEPS, *sizes)

    # Each step once, in order, each with weights of its own, and what was done is not done again.
    name = trainer.run
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and len(before) < STEPS
    assert rows[: len(before)] == before
    assert [row["version"] for row in rows] == [f"{name}-{step}" for step in range(1, STEPS + 1)]
    reported = {item.step: item for item in stack.client.reports(name)}
    assert len(reported) >= STEPS - 1, "all but one that was killed between its log and its report"
    assert reported[STEPS].metrics.get("reward") == rows[-1]["reward"]
    assert stack.client.policy().current.version == f"{name}-{STEPS}"
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == [f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"]

    # The trainer's log-probs of what its own weights sampled are the engine's.
    gaps = [row["logprob_gap"] for row in rows if row["logprob_gap"] is not None]
    assert len(gaps) > STEPS / 2 and max(gaps) < MAX_GAP
    assert report(rows, {})["results"]["max_logprob_gap"] == max(gaps)
    assert max(row["staleness_max"] for row in rows) <= 2

    # Every group: what the batches decided is what the log has, none missing and none twice.
    batches = batches_of(stack, rows)
    wait_until(lambda: batches_of(stack, rows)[-1].open == 0, TIMEOUT_S, "the last groups to be cancelled")
    batches = batches_of(stack, rows)
    for batch in batches:
        assert batch.state is BatchState.DONE and batch.kept == GROUPS and batch.open == 0
        assert batch.started + batch.carried_in == decided(batch) + batch.carried_out
    assert sum(batch.started for batch in batches) == sum(map(decided, batches))
    logged = [group for row in rows for group in row["groups"]["kept"]]
    served = [
        group.id
        for batch in batches
        for group in stack.client.batches.groups(batch.id, include="verdicts", limit=100).groups
    ]
    assert sorted(logged) == sorted(served) and len(set(logged)) == len(logged) == STEPS * GROUPS
    assert sum(row["carried"] for row in rows) > 0
    assert {row["scored"] for row in rows} == {GROUPS * N}


@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [("dapo", ("--groups", "1", "--n", "4")), ("ppo", ("--groups", "4"))],
)
def test_the_other_algorithms_go_through_steps_and_move_the_weights(stack, tmp_path, algorithm, sizes):
    rows, trainer = run(stack, tmp_path / algorithm, 2, "--algorithm", algorithm, *sizes)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in rows if row["groups"]["kept"])
    assert max(row["logprob_gap"] or 0.0 for row in rows) < MAX_GAP
    if algorithm == "dapo":
        # Uniform groups are told of, and not learned from.
        assert all(set(row["reasons"]) <= {"uniform_reward"} for row in rows)
    else:
        assert {len(row["groups"]["kept"]) for row in rows} == {4}
        assert trainer.actor.load_state(tmp_path / algorithm / "checkpoints" / "step-000002")["critic"]


def test_a_tree_is_learned_from_beside_groups_and_samples_fewer_tokens(stack, tmp_path, capsys):
    sizes = ["--quizzes", "2", "--n", "4", "--tokens", "1", "--tests", "2", "--shown", "1"]
    args = tree.parse(["--seeds", "5", "--out", str(tmp_path), *sizes])
    result = tree.compare(stack.client, args)
    row, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last == {"all_right": result} and result["tree"]["seeds"] == [row["tree"]["all_right"]]
    for arm, shares in (("grpo", False), ("tree", True)):
        assert row[arm]["steps"] == 1 and (row[arm]["tokens_ratio"] < 1) == shares
        assert row[arm]["curve"][-1][0] == row[arm]["sampled_tokens"] > 0

    tasks = tree.make_quizzes(2, 3, seed=7)
    rollouts = tree.grown(stack.client, "tree", tasks, n=4, turns=[1])
    samples = tree.samples_of(rollouts)
    assert sum(sum(sample.sampled) for sample in samples) == sum(
        r.trajectory.sampled_tokens for r in rollouts
    )
    roots = {rollout.id: rollout for rollout in rollouts if rollout.request.origin is None}
    forks = [rollout for rollout in rollouts if rollout.request.origin]
    assert len(roots) == 4 and forks, "the demo model nearly always says something behind its first call"
    for fork in forks:
        branch, source = fork.trajectory.branch, roots[fork.request.origin.rollout]
        assert (branch.rollout, branch.turn) == (source.id, 1)
        shared = fork.trajectory.chain.token_ids[: branch.tokens]
        assert shared == source.trajectory.chain.token_ids[: branch.tokens]
        assert fork.trajectory.chain.prompt_ids == shared


def test_a_program_on_a_vendors_sdk_drives_a_run_with_the_ids_that_its_model_was_taught(stack, tmp_path):
    from transformers import AutoTokenizer

    program = ROOT / "examples" / "agents" / "calculator_agent.py"
    # Each rollout is a process that imports the SDK: none more than the steps learn from.
    sizes = ["--groups", "1", "--n", "2", "--oversample", "1", "--supply", "1"]
    sizes += ["--agent", str(program), "--at-once", "2"]
    rows, _ = run(stack, tmp_path / "run", 2, "--algorithm", "grpo", *sizes)
    assert [row["step"] for row in rows] == [1, 2] and {row["scored"] for row in rows} == {2}
    gaps = [row["logprob_gap"] for row in rows if row["logprob_gap"] is not None]
    assert gaps and max(gaps) < MAX_GAP

    maker = conversation.ConversationMaker(AutoTokenizer.from_pretrained(CHECKPOINT))
    names = [group for row in rows for group in row["groups"]["kept"]]
    members = [item for name in names for item in stack.client.list(group_id=name).rollouts]
    assert len(members) == 4
    followed = 0
    for rollout in (stack.client.get(item.id) for item in members):
        assert rollout.request.agent.harness == EXTERNAL and rollout.trajectory.receipt.drift == 0
        (chain,) = rollout.trajectory.chains
        prompt = maker.prompt_ids(rollout.request.task["question"])
        for segment, told in zip(chain.segments, [*chain.segments[1:], None], strict=True):
            if not segment.sampled:
                assert segment is not chain.segments[0] or segment.token_ids == prompt
            elif told is not None and not told.sampled:
                (output,) = (message.text for message in told.messages)
                before = ids_before(chain, segment)
                assert maker.after_tool(before, segment.token_ids, output) == (
                    before + segment.token_ids + told.token_ids
                )
                followed += 1
    assert followed >= 2, "the demo model calls its tool nearly always"


def ids_before(chain, segment) -> list[int]:
    """The ids of a chain up to a segment of it."""
    at = next(place for place, other in enumerate(chain.segments) if other is segment)
    return [token for other in chain.segments[:at] for token in other.token_ids]


def test_a_run_refuses_to_go_on_with_other_settings(stack, tmp_path):
    module = load("train")
    (tmp_path / "run.json").write_text(json.dumps({"run": "train-x", "settings": {"lr": 1.0}}))
    args = module.parse(["--url", stack.url, "--out", str(tmp_path), *OPTIONS])
    with pytest.raises(SystemExit, match=r"another .*lr.*; give another --out"):
        module.Trainer(args, stack.client)


def test_trl_trains_on_our_rollouts_with_log_probs_that_are_its_own(stack, tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed: run `make setup-trainer`")
    module = load("train_trl")
    trainer = module.make_trainer(stack.client, tmp_path, steps=2, prompts=2, n=4, learning_rate=1e-4)
    steps = []
    rollouts = trainer.rollout_func
    # One a step without a model call, which a `rollout_func` cannot leave out.
    silent = adapter.rollout_func_result([ended(drop=True)])

    def watched(prompts, trainer_):
        answer = rollouts(prompts, trainer_)
        for name, (value,) in silent.items():
            answer[name][len(steps)] = value
        steps.append((prompts, answer, own_logprobs(trainer_.model, answer)))
        return answer

    trainer.rollout_func = watched
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()

    assert len(steps) == 2 and stack.client.policy().current.version == f"{rollouts.run}-1"
    for prompts, answer, own in steps:
        assert len(prompts) == 8 and {len(column) for column in answer.values()} == {8}
        texts = [trainer.processing_class.decode(ids) for ids in answer["prompt_ids"]]
        assert sum(prompt in text for prompt, text in zip(prompts, texts, strict=True)) == 7
        assert answer["reward"].count(None) == 1
        rows = zip(answer["logprobs"], answer["env_mask"], own, answer["reward"], strict=True)
        for logprobs, mask, mine in (row for *row, reward in rows if reward is not None):
            assert 0 in mask and 1 in mask
            gaps = [abs(a - b) for a, on, b in zip(logprobs, mask, mine, strict=True) if on]
            assert max(gaps) < MAX_GAP
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert rewards == pytest.approx([sum(filter(None, answer["reward"])) / 7 for _, answer, _ in steps])
    groups = [[answer["reward"][at : at + 4] for at in (0, 4)] for _, answer, _ in steps]
    varied = any(len({*group} - {None}) > 1 for step in groups for group in step)
    after = trainer.model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert varied == any(not before[name].equal(after[name]) for name in before)


def own_logprobs(model, answer) -> list[list[float]]:
    """The trainer's own, of each completion."""
    import torch

    out = []
    with torch.no_grad():
        for prompt, completion in zip(answer["prompt_ids"], answer["completion_ids"], strict=True):
            ids = torch.tensor([prompt + completion])
            table = torch.log_softmax(model(input_ids=ids[:, :-1]).logits.float(), dim=-1)
            chosen = table.gather(-1, ids[:, 1:, None]).flatten().tolist()
            out.append(chosen[len(prompt) - 1 :])
    return out
