"""Pictures for README and docs/, made of what commands print, of the page and of Flower: `make screenshots`.

A stack of its own with the demo model; terminals as SVG (docs/img/NAME.svg), Flower as PNG where chromium is.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from docs import page_pictures
from examples.demo_model.task import make_tasks
from rollout.client import Client
from rollout.schema import Limits, RolloutRequest
from services.launch.local import Options, Stack

CHECKOUT = Path(__file__).resolve().parents[1]
IMAGES = CHECKOUT / "docs" / "img"
WIDTH = 100
LIVE = 120
"""Rollouts that are under way while `top` is looked at."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhln]")
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def terminal(name: str, command: list[str], environment: Mapping[str, str]) -> None:
    """Run `rollout …` as in a terminal of `WIDTH` columns, and keep its last screen as a picture."""
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    argv = [sys.executable, "-m", "rollout.cli", *command]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(argv, env={**environment, **colours}, **both, check=True)
    # Of a line that is drawn again and again, the last one.
    lines = [
        _CONTROL.sub("", line.rpartition("\r")[2]).replace(f"{CHECKOUT}/", "")
        for line in done.stdout.decode().rstrip().split("\n")
    ]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in lines:
        console.print(Text.from_ansi(line))
    # Fonts from another site are not asked for.
    svg = _FONTS.sub("", console.export_svg(title=f"rollout {command[0]}", unique_id=name))
    (IMAGES / f"{name}.svg").write_text(svg)


def flower(url: str, credentials: str) -> None:
    """Flower's list of tasks, by chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        print("flower.png stays as it is: chromium is not on PATH", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        options += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
        ]
        options += [
            "--window-size=1500,460",
            "--virtual-time-budget=8000",
            f"--screenshot={IMAGES / 'flower.png'}",
        ]
        page = url.replace("://", f"://{credentials}@") + "/tasks"
        subprocess.run([chromium, *options, page], capture_output=True, timeout=120, check=True)


def main() -> None:
    """Start a stack, take the pictures, end it."""
    page_pictures.main()
    terminal("demo", ["demo", "--n", "16"], os.environ)
    directory = Path(tempfile.mkdtemp(prefix="rollout-shots-"))
    stack = Stack(directory, print)
    try:
        record = stack.up(Options(directory, private_ports=True, require_sandbox=True))
        environment = os.environ | {"ROLLOUT_URL": record.url, "ROLLOUT_API_KEY": stack.api_key}
        with Client(record.url, api_key=stack.api_key) as client:
            limits = Limits(max_turns=4)
            tasks = [
                RolloutRequest(handler="calculator", task=task, limits=limits) for task in make_tasks(LIVE, 7)
            ]
            ended = client.run(tasks[:24])
            client.submit(tasks)
            time.sleep(3)
            terminal("top", ["top", "--once"], environment)
            best = max(
                ended, key=lambda item: (item.reward or 0, item.trajectory.turns if item.trajectory else 0)
            )
            terminal("show", ["show", best.id, "--timeline"], environment)
        flower(str(record.flower_url), (directory / "flower.auth").read_text().strip())
    finally:
        stack.down()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
