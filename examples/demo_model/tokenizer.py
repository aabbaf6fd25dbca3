"""Make the demo model's tokenizer: byte-level BPE, digits split, Qwen3's special tokens.

Invariant: the same code makes the same file, so ids in a committed checkpoint stay valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.demo_model.task import OPERATORS, bash_command, make_tasks, parse_question

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""Dropped by `decode(skip_special_tokens=True)`."""

TEXT_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Single ids that stay in decoded text: parsers look for them there. Qwen3 marks them the same way."""

VOCABULARY = 342
"""Upper bound on ids, control and text tokens included; the model's embedding is padded to 384."""

MAX_LENGTH = 2048
"""Tokens; the model's context."""


def corpus() -> Iterator[str]:
    """Text the merges are learned from: both sides of a conversation, without the control tokens."""
    for task in make_tasks(400, seed=1):
        a, word, b = parse_question(task["question"])
        yield f"user\n{task['question']}"
        yield "assistant\n"
        command = bash_command(a, OPERATORS[word][0], b)
        yield f'\n{{"name": "execute_bash", "arguments": {{"command": "{command}"}}}}\n'
        yield f"user\n\n{task['answer']}\n"


def make_tokenizer(texts: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Train the merges on `texts` (default: `corpus()`) and add the special tokens behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL_TOKENS) - len(TEXT_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus() if texts is None else texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TEXT_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_LENGTH,
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8"),
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save so that transformers 4 and 5 both load it: version 5 writes a class name that 4 does not know."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
