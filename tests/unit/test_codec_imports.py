"""What loading a tokenizer imports, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from workers.agent.renderer_codec import import_library
import_library()
import renderers
assert issubclass(renderers.OverlongPromptError, Exception)
assert "openai" not in sys.modules
import renderers.client
assert "openai" in sys.modules and renderers.client.AsyncOpenAI
"""


def test_the_library_of_formats_comes_without_its_client_which_can_be_had_afterwards():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
