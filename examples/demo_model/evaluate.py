"""Success rate of a demo checkpoint: whole episodes, sampled at temperature 1, with a real bash.

    python -m examples.demo_model.evaluate --model examples/demo_model/checkpoint -n 400

Prints one JSON object. `format` is the share of episodes that called the tool once and then answered.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo_model.conversation import TOOL_NAME, ConversationMaker
from examples.demo_model.task import make_tasks, score

MAX_NEW_TOKENS = 64
BASH_TIMEOUT = 5.0
"""Seconds for one command."""

# A model's text runs on this machine without a sandbox here: arithmetic only.
ALLOWED = re.compile(r"echo \$\(\([0-9+*/ -]+\)\)")


def run_bash(command: str) -> str:
    """Output of an arithmetic `echo`, without the last newline; a refusal for any other command."""
    if ALLOWED.fullmatch(command) is None:
        return "error: this evaluation runs arithmetic only"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=BASH_TIMEOUT, check=False
    )
    return (done.stdout + done.stderr).strip()


@torch.inference_mode()
def sample(model, prompts: list[list[int]], pad_id: int) -> list[list[int]]:
    """One completion per prompt at temperature 1 over the whole vocabulary, padding removed."""
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    stops = set(model.generation_config.eos_token_id)
    completions = []
    for row in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in stops), len(row) - 1)
        completions.append(row[: end + 1])
    return completions


def evaluate(model_dir: Path, n: int, seed: int) -> dict[str, float]:
    """Play `n` episodes; returns `{"tasks", "format", "success"}`, the last two as shares of `n`."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    maker = ConversationMaker(tokenizer)
    tasks = make_tasks(n, seed)
    prompts = [maker.prompt_ids(task["question"]) for task in tasks]
    calls = sample(model, prompts, tokenizer.pad_token_id)

    second, played = [], []
    for task, prompt, call in zip(tasks, prompts, calls, strict=True):
        tool_calls = maker.renderer.parse_response(call).tool_calls
        if len(tool_calls) != 1 or tool_calls[0].name != TOOL_NAME:
            continue
        command = (tool_calls[0].arguments or {}).get("command", "")
        second.append(maker.after_tool(prompt, call, run_bash(command)))
        played.append(task)
    answers = sample(model, second, tokenizer.pad_token_id) if second else []
    parsed = [maker.renderer.parse_response(answer) for answer in answers]
    well_formed = sum(not message.tool_calls for message in parsed)
    success = sum(
        score(message.content, task["answer"]) for message, task in zip(parsed, played, strict=True)
    )
    return {"tasks": n, "format": well_formed / n, "success": success / n}


def main() -> None:
    """Parse the command line, evaluate, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name("checkpoint"))
    parser.add_argument("-n", type=int, default=400)
    parser.add_argument("--seed", type=int, default=12345)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(evaluate(args.model, args.n, args.seed)))


if __name__ == "__main__":
    main()
