"""`rollout top`: a live view of the service in the terminal, by the HTTP API alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

import click
from rich.live import Live
from rich.text import Text

from rollout.cli.common import connect, out, show_view, url_option
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
    with connect(url, 0.0, timeout=ANSWER_S) as client, _pauses() as pause, suppress(KeyboardInterrupt):
        watcher = Watcher(client)

        def show(look: Look) -> None:
            if as_json:
                click.echo(look.model_dump_json(exclude=NOT_IN_JSON))
            else:
                show_view(view(look, client.base_url))

        if once:
            watcher.look()
            pause(interval)
            show(watcher.look())
        elif as_json or not out.is_terminal:
            _stream(watcher, show, interval, pause)
        else:
            _live(watcher, client.base_url, interval, pause)


@contextmanager
def _pauses() -> Iterator[Pause]:
    """A pause that a change of the window's size ends; TERM ends it all like Ctrl-C, the screen put back."""
    resized: SimpleQueue[int] = SimpleQueue()  # a signal's handler may put into it

    def pause(seconds: float) -> None:
        with suppress(Empty):
            resized.get(timeout=seconds)
            while True:  # a window that is dragged sends many
                resized.get_nowait()

    handlers = {
        signal.SIGTERM: signal.default_int_handler,
        signal.SIGWINCH: lambda number, _: resized.put(number),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield pause
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stream(watcher: Watcher, show: Callable[[Look], None], interval: float, pause: Pause) -> None:
    """For a pipe: one look after the other. A gateway that is away is told of on stderr and waited for."""
    while True:
        try:
            show(watcher.look())
        except Unavailable as error:
            click.echo(f"rollout top: {error}", err=True)
        pause(interval)


def _live(watcher: Watcher, url: str, interval: float, pause: Pause) -> None:
    look: Look | None = None
    with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            problem = None
            try:
                look = watcher.look()
            except Unavailable as error:
                problem = f"{url} does not answer; trying on. {error}"
            screen = view(look, url, out.size.height, problem) if look else Text(problem or "", "bold red")
            live.update(screen, refresh=True)
            pause(interval)
