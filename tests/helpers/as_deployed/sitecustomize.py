"""Python reads this first where a stack's workers start: they see no torch, which the extra `worker` lacks.

Where it is installed, transformers imports it with the first tokenizer: seconds of a processor, and 200 MB.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
