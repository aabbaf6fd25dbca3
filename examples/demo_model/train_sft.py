"""Make the demo checkpoint: a 0.54 M parameter Qwen3 that knows the protocol, not yet the arithmetic words.

The conversations teach the format and copying, but pick the operator that the question means only with
probability `RIGHT_OPERATOR`, so that a reward has something to teach.

    python -m examples.demo_model.train_sft --out examples/demo_model/checkpoint

About five minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from examples.demo_model.conversation import Conversation, ConversationMaker
from examples.demo_model.task import LARGEST, OPERATORS, bash_command
from examples.demo_model.tokenizer import MAX_LENGTH, make_tokenizer, save_tokenizer

RIGHT_OPERATOR = 0.40
"""At 0.25, chance, exploration does not find the right operator; far above, little is left to learn."""

STEPS = 800
"""At 500 copying still fails in one episode of six, which hides what a policy learns about operators."""
BATCH = 64
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
FINAL_FRACTION = 0.02
"""The learning rate falls linearly to this fraction of LEARNING_RATE at the last step; low, so that the
last batches do not pull the operator's probability away from RIGHT_OPERATOR."""

PADDED_VOCABULARY = 384
"""Rows of the embedding: a multiple of 128 above the tokenizer's size."""

OBSERVATIONS = [("{}", 0.7), ("{}\n", 0.15), ("{}\n[exit code: 0]", 0.15)]
"""How a service may show a command's output, with the share of each; the answer is the first line."""


def make_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A fresh Qwen3 of 541,760 parameters in float32; embeddings untied, as CPU reloads of vLLM need."""
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=PADDED_VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text, do_sample=True, temperature=1.0
    )
    return model


def draw_conversation(rng: random.Random, maker: ConversationMaker) -> Conversation:
    """One training episode; its operator is right with probability RIGHT_OPERATOR, else another one."""
    a, b = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    word = rng.choice(sorted(OPERATORS))
    meant = word
    if rng.random() >= RIGHT_OPERATOR:
        meant = rng.choice([wrong for wrong in sorted(OPERATORS) if wrong != word])
    symbol, function = OPERATORS[meant]
    value = str(function(a, b))
    shown = rng.choices([form for form, _ in OBSERVATIONS], [share for _, share in OBSERVATIONS])[0]
    return maker.make(f"{a} {word} {b}", bash_command(a, symbol, b), shown.format(value), value)


def collate(batch: list[Conversation], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels, both (batch, longest); labels are -100 where the policy does not speak."""
    longest = max(len(c.token_ids) for c in batch)
    ids = torch.full((len(batch), longest), pad_id)
    labels = torch.full((len(batch), longest), -100)
    for row, conversation in enumerate(batch):
        length = len(conversation.token_ids)
        ids[row, :length] = torch.tensor(conversation.token_ids)
        sampled = torch.tensor(conversation.sampled)
        labels[row, :length] = torch.where(sampled, ids[row, :length], -100)
    return ids, labels


def learning_rate_factor(step: int) -> float:
    """Linear warm-up over WARMUP_STEPS, then linear decay to FINAL_FRACTION."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    return 1.0 - (1.0 - FINAL_FRACTION) * progress


def train(model: Qwen3ForCausalLM, maker: ConversationMaker, seed: int) -> None:
    """STEPS updates on freshly drawn conversations; prints the loss every 100."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    started = time.monotonic()
    model.train()
    for step in range(STEPS):
        ids, labels = collate(
            [draw_conversation(rng, maker) for _ in range(BATCH)], maker.tokenizer.pad_token_id
        )
        # Padding is on the right and attention is causal: no mask is needed.
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    """Parse the command line, train, and save model and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("checkpoint"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # One thread: sums in the same order on every run, so the same seed gives the same weights.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, ConversationMaker(tokenizer), args.seed)
    model.save_pretrained(args.out)
    save_tokenizer(tokenizer, args.out)
    # safetensors writes files for their owner only; a service under another account reads this one.
    (args.out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
