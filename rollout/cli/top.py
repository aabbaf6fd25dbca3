"""`rollout top`: a live view of the service in the terminal, by the HTTP API alone."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollout.cli.common import connect, url_option
from rollout.cli.top_look import Look, Watcher
from rollout.cli.top_view import view
from rollout.errors import Unavailable

Pause = Callable[[float], None]
BULKY = {"__all__": {"request", "trajectory", "timeline", "notes"}}
NOT_IN_JSON = {"live": BULKY, "recent": BULKY}
ANSWER_S = 10.0
"""For one answer of the gateway; then it counts as away."""


@click.command()
@click.option("--once", is_flag=True, help="Look twice, --interval apart, show it and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a look, on one line.")
@click.option(
    "--interval",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.2, 3600),
    help="Seconds between two looks.",
)
@url_option
def top(once: bool, as_json: bool, interval: float, url: str | None) -> None:
    """Watch stages, backends, nodes, batches and what ends, live; Ctrl-C ends it.

    A key with the scope `admin` shows batches and rollouts of all tenants, any other those of its own.
    """
    console = Console()
    with connect(url, 0.0, timeout=ANSWER_S) as client, _pauses() as pause:
        watcher = Watcher(client)

        def show(look: Look) -> None:
            if as_json:
                print(look.model_dump_json(exclude=NOT_IN_JSON), flush=True)
            else:
                console.print(view(look, client.base_url))

        try:
            if once:
                watcher.look()
                pause(interval)
                show(watcher.look())
            elif as_json or not console.is_terminal:
                _stream(watcher, show, interval, pause)
            else:
                _live(watcher, client.base_url, console, interval, pause)
        except KeyboardInterrupt:
            pass


@contextmanager
def _pauses() -> Iterator[Pause]:
    """A pause that a change of the window's size ends; TERM ends it all like Ctrl-C, the screen put back."""
    reader, writer = os.pipe()
    # A window that is dragged sends many signals: what does not fit into the pipe is not missed.
    os.set_blocking(writer, False)

    def resized(*_: object) -> None:
        with suppress(BlockingIOError):
            os.write(writer, b".")

    def pause(seconds: float) -> None:
        if select.select([reader], [], [], seconds)[0]:
            os.read(reader, 4096)

    old = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler),
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, resized),
    }
    try:
        yield pause
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _stream(watcher: Watcher, show: Callable[[Look], None], interval: float, pause: Pause) -> None:
    """For a pipe: one look after the other. A gateway that is away is told of on stderr and waited for."""
    while True:
        try:
            show(watcher.look())
        except Unavailable as error:
            print(f"rollout top: {error}", file=sys.stderr, flush=True)
        pause(interval)


def _live(watcher: Watcher, url: str, console: Console, interval: float, pause: Pause) -> None:
    look: Look | None = None
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            problem = None
            try:
                look = watcher.look()
            except Unavailable as error:
                problem = f"{url} does not answer; trying on. {error}"
            screen = (
                view(look, url, console.size.height, problem) if look else Text(problem or "", "bold red")
            )
            live.update(screen, refresh=True)
            pause(interval)
