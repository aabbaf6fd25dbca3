"""The fake engine with the model of `agent_script`, for a stack of its own:
`python -m tests.helpers.agent_engine PORT DIRECTORY`.

Its tokenizer is Qwen3's where set-up has fetched it, else the demo model's. What it writes is in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.helpers.fake_engine import main
from tests.helpers.stack import CHECKPOINT, ROOT


def tokenizer(directory: Path) -> Path:
    """A model's directory without weights."""
    home = Path(os.environ.get("ROLLOUT_HOME") or ROOT / ".local").absolute()
    source, target = home / "tokenizers/qwen3", directory / "qwen3"
    if not (source / "tokenizer.json").is_file():
        return CHECKPOINT
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).symlink_to(source / name)
    (target / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return target


CONTEXT_TOKENS = 65536
"""Programs' first prompts have up to 25,000."""

if __name__ == "__main__":
    port, directory = sys.argv[1:]
    os.environ["AGENT_TOKENIZER"] = str(tokenizer(Path(directory)))
    options = {"script": "tests.helpers.agent_script:turn", "tokenizer": os.environ["AGENT_TOKENIZER"]}
    options |= {"port": port, "max-model-len": str(CONTEXT_TOKENS), "vocab-size": "151936", "step-ms": "0.1"}
    sys.argv[1:] = [part for name, value in options.items() for part in (f"--{name}", value)]
    main()
