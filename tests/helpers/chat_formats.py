"""Small tokenizers with the chat templates of several model families, written for these tests.

Byte-level BPE over a few sentences, so text splits into pieces of one to several characters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.helpers.lazy import Lazy
from tests.helpers.stack import CHECKPOINT
from workers.agent.formats import TemplateCodec
from workers.agent.guard import TokenizerGuard

transformers = Lazy("transformers")

_CORPUS = [
    'The answer is 42. Run the command, tell me what it says: {"name": "look", "arguments": {"word": 1}}',
    "user\nassistant\nsystem\ntool\nthink about the question, then call the tool again and again",
]

_TOOLS = (
    "{%- if tools -%}{{ '# Tools' }}{%- for t in tools -%}{{ '\\n' + t | tojson }}{%- endfor -%}{%- endif -%}"
)

_CHATML = (
    "{%- if tools -%}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for c in m.tool_calls or [] -%}"
    "{%- set f = {'name': c.function.name, 'arguments': c.function.arguments} -%}"
    "{{ '<tool_call>' + (f | tojson) + '</tool_call>' }}"
    "{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_HERMES = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>tool' }}{%- endif -%}"
    "{{ '\\n<tool_response>\\n' + (m.name + ': ' if m.name else '') + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_PREFILLED = _HERMES.replace(
    "'<|im_start|>assistant\\n' }}{%- endif -%}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)
"""As reasoning models that open the thought in the prompt, and drop it from the history."""

_HEADERS = (
    "{{ bos_token }}{%- for m in messages -%}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"
)

_TURNS = (
    "{{ bos_token }}{%- for m in messages -%}"
    "{%- if m.role not in ('user', 'assistant') -%}"
    "{{ raise_exception('only user and model turns') }}{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
    "{{ '<end_of_turn>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)

_BRACKETS = (
    "{{ bos_token }}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{%- elif m.role == 'tool' -%}{{ '[TOOL_RESULTS] ' + m.content + ' [/TOOL_RESULTS]' }}"
    "{%- else -%}{{ ' ' + m.content + ' ' + eos_token }}{%- endif -%}{%- endfor -%}"
)


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    text: tuple[str, ...] = (
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    )
    eos: str | None = "<|im_end|>"
    bos: str | None = None
    tools: bool = True


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(_CHATML, _IM),
    "hermes": Family(_HERMES, _IM),
    "prefilled-thought": Family(_PREFILLED, _IM),
    "no-eos": Family(_CHATML, _IM, eos=None),
    "other-eos": Family(_CHATML, _IM, eos="<|endoftext|>"),
    "headers": Family(
        _HEADERS,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "turns": Family(
        _TURNS,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("\n\n", "    ", "<start_of_turn", "turn>"),
        eos="<eos>",
        bos="<bos>",
        tools=False,
    ),
    "brackets": Family(
        _BRACKETS,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        eos="</s>",
        bos="<s>",
    ),
}


@cache
def tokenizer(name: str) -> Any:
    """The tokenizer of a family, trained on a few sentences."""
    family = FAMILIES[name]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_CORPUS * 3, trainer)
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.special])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.text])
    names: dict[str, Any] = {"eos_token": family.eos, "bos_token": family.bos}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=family.template,
        model_max_length=100_000,
        **{key: value for key, value in names.items() if value},
    )


@cache
def template_codec(name: str) -> TemplateCodec:
    """The codec of a family by its template; `demo` is the demo model's tokenizer."""
    if name == "demo":
        return TemplateCodec(TokenizerGuard(transformers.PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)))
    return TemplateCodec(TokenizerGuard(tokenizer(name)))


def save(name: str, directory: Path, **config: str) -> Path:
    """A family's tokenizer as a model directory, without a model."""
    tokenizer(name).save_pretrained(directory)
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return directory
