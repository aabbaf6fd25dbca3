"""`rollout plan`: its figures against the same worked out by hand, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest

from rollout.planning import PUBLISHED, PlanError, model_of, plan
from tests.helpers.lazy import Lazy
from tests.helpers.stack import ROOT

transformers = Lazy("transformers")

ROLLOUT = [sys.executable, "-m", "rollout.cli"]
EIGHT = {"gpus": 8, "gpu_gb": 80, "share": 0.6, "cores": 128, "memory_gb": 1000}
STEP = EIGHT | {"tasks": 32, "n": 8, "images": 0, "unpacked_gb": 2.7}
ROW = {"repo": "me/twice", "base_commit": "HEAD", "problem_statement": "twice(2) is 5.", "patch": ""}
ROW |= {"test_patch": "diff --git a/t.py b/t.py\n", "FAIL_TO_PASS": ["t.py::test"], "PASS_TO_PASS": []}


def test_an_8b_model_on_eight_gpus():
    result = plan(PUBLISHED["Qwen/Qwen3-8B"], **STEP | {"images": 500})
    # 36 layers, K and V, 8 heads of 128, 2 bytes.
    assert result["model"]["cache_bytes_per_token"] == 36 * 2 * 8 * 128 * 2
    tokens = int((0.6 * 80 - 3 - 16.38) * 1e9 / 147_456)
    assert result["engines"] == {"count": 8, "gpus_each": 1, "cache_tokens_each": tokens}
    assert result["rollouts"]["by_caches"] == int(0.75 * 8 * tokens / 16_384)
    # 116 sandboxes of 4.3 GB in half of the memory, for all three stages.
    assert result["slots"] == {"init": 17, "run": 66, "eval": 33}
    assert result["disk_gb"]["unpacked_all"] == 1350
    assert "ROLLOUT_IMAGE_CACHE_GB=1350 " in result["commands"]["service"]
    assert result["commands"]["verl"].startswith(
        "data.train_batch_size=32 actor_rollout_ref.rollout.n=8 "
        "data.max_prompt_length=4096 data.max_response_length=28672 "
    )


def test_large_weights_are_spread_over_gpus_and_small_nodes_bound_the_slots():
    large = plan(PUBLISHED["Qwen/Qwen3-32B"], **STEP)
    assert (large["engines"]["count"], large["engines"]["gpus_each"]) == (2, 4)
    small = plan(PUBLISHED["Qwen/Qwen3-8B"], **STEP | {"cores": 8, "memory_gb": 64})
    assert small["slots"] == {"init": 1, "run": 4, "eval": 2}  # 7 sandboxes of 4.3 GB in half of 64 GB
    with pytest.raises(PlanError, match=r"--memory-gb 20: half of it must hold 3 sandboxes"):
        plan(PUBLISHED["Qwen/Qwen3-8B"], **STEP | {"memory_gb": 20})
    assert plan(PUBLISHED["Qwen/Qwen3-8B"], **STEP | {"memory_gb": 26})["slots"]["run"] == 1
    with pytest.raises(PlanError, match="0 tokens of cache on 1 GPUs, fewer than a context of 32768"):
        plan(PUBLISHED["Qwen/Qwen3-32B"], **STEP | {"gpus": 1})
    with pytest.raises(PlanError, match="--context 50000: Qwen/Qwen3-8B has a context of 40960"):
        plan(PUBLISHED["Qwen/Qwen3-8B"], **STEP, context=50_000)


@pytest.mark.parametrize(("kv_heads", "held_by"), [(8, 1), (4, 1), (2, 2), (1, 4)])
def test_a_cache_with_fewer_heads_than_gpus_lies_on_several(kv_heads, held_by):
    model = replace(PUBLISHED["Qwen/Qwen3-32B"], kv_heads=kv_heads)
    tokens = (4 * (0.6 * 80 - 3) - 65.6) * 1e9 / (model.token_bytes * held_by)
    assert plan(model, **STEP)["engines"] == {"count": 2, "gpus_each": 4, "cache_tokens_each": int(tokens)}


def test_a_checkpoint_is_read_as_transformers_reads_it(tmp_path):
    path = ROOT / "examples" / "demo_model" / "checkpoint"
    config, model = transformers.AutoConfig.from_pretrained(path), model_of(str(path))
    assert (model.layers, model.context) == (config.num_hidden_layers, config.max_position_embeddings)
    assert model.values == 2 * config.num_key_value_heads * config.head_dim
    assert model.weights_gb == (path / "model.safetensors").stat().st_size / 1e9
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(PlanError, match=r"no \*\.safetensors beside .*: give --params"):
        model_of(str(tmp_path))
    assert model_of(str(tmp_path), 8).weights_gb == 16
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(latent | {"max_position_embeddings": 163_840}))
    model = model_of(str(tmp_path), 671)
    assert (model.token_bytes, model.kv_heads) == (61 * 576 * 2, 1)
    assert model_of("Qwen/Qwen3-8B", 16).weights_gb == 32
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PlanError, match="no model's configuration: KeyError"):
        model_of(str(tmp_path), 8)


def test_the_command_in_a_pipe_and_in_a_terminal(tmp_path):
    rows = [
        json.dumps(ROW | {"instance_id": f"me__twice-{n}", "image": f"me/twice:{n % 2}"}) for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    argv = [
        *ROLLOUT,
        "plan",
        "--model",
        "Qwen/Qwen3-8B",
        "--gpus",
        "8",
        "--dataset",
        str(tmp_path / "rows.jsonl"),
    ]
    argv += ["--cores", "128", "--memory-gb", "1000"]
    piped = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "slots     init 17, run 66, eval 33\n" in piped and "disk_gb   images 2," in piped
    plain = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True).stdout
    assert json.loads(plain)["slots"]["run"] == 66
    leader, follower = pty.openpty()
    subprocess.run(argv, stdout=follower, env=os.environ | {"COLUMNS": "80"}, check=True)
    os.close(follower)
    with os.fdopen(leader, "rb") as terminal:
        assert terminal.read(len(piped) + piped.count("\n")).decode().replace("\r\n", "\n") == piped


def test_the_command_says_what_it_cannot_plan(tmp_path):
    def told(*args: str) -> str:
        done = subprocess.run([*ROLLOUT, "plan", *args], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        return done.stderr

    assert "no model 'Qwen/Qwen3-8C': give a directory" in told("--model", "Qwen/Qwen3-8C", "--gpus", "8")
    for value in ("nan", "inf"):
        argv = [*ROLLOUT, "plan", "--model", "Qwen/Qwen3-8B", "--gpus", "8", "--gpu-gb", value]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and f"--gpu-gb: {value} is no finite number" in done.stderr
    (tmp_path / "rows.jsonl").write_text('{"question": "1 plus 2"}\n')
    words = told("--model", "Qwen/Qwen3-8B", "--gpus", "8", "--dataset", str(tmp_path / "rows.jsonl"))
    assert "rows.jsonl, line 1" in words
