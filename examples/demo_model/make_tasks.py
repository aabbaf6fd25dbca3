"""Write calculator tasks as JSON lines: `python -m examples.demo_model.make_tasks -n 200 -o tasks.jsonl`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from examples.demo_model.task import make_tasks


def main() -> None:
    """Parse the command line and write one `{"question", "answer"}` object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="number of tasks")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same tasks")
    parser.add_argument("-o", "--output", default="-", help="file to write; - is standard output")
    args = parser.parse_args()
    lines = "".join(json.dumps(task) + "\n" for task in make_tasks(args.n, args.seed))
    if args.output == "-":
        sys.stdout.write(lines)
    else:
        Path(args.output).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
