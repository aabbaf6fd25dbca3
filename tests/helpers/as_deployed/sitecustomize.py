"""Python reads this first where tests start it: workers, capture and fake engines see no torch.

The extras `worker` and `gateway` lack it. Where it is installed, transformers imports it with the first
tokenizer: seconds of a processor, and 200 MB.
"""

import sys

MODULES = {"workers.app", "services.capture", "tests.helpers.fake_engine", "tests.helpers.agent_engine"}
MODULES |= {"benchmarks.capture", "benchmarks.token_drift"}

if MODULES.intersection(sys.orig_argv):
    sys.modules["torch"] = None  # type: ignore[assignment]
