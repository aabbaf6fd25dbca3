"""Programs that drive a run's rollouts in place of the service's loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from httpx import HTTPStatusError

from examples.agents.drive import drive
from rollout.client import ApiError, Client
from rollout.schema import Rollout, State

POLL_S = 0.1
MOST_RUNNING = 1000
"""Rollouts of a page."""


def _is_over(error: Exception) -> bool:
    """Whether the rollout had ended meanwhile, as those do that a batch needs no more."""
    if isinstance(error, ApiError):
        return error.status == HTTPStatus.GONE
    return isinstance(error, HTTPStatusError) and error.response.status_code == HTTPStatus.GONE


@contextmanager
def driven(client: Client, tag: str, program: Path, ask: str, at_once: int) -> Iterator[None]:
    """Meanwhile the program is started for every attempt under a tag that comes to RUN, so many at once.

    Who has submitted the rollouts does not matter: batches do it by themselves. The handlers score. At the
    end programs that are under way are waited for: once a rollout has ended its calls are refused.
    """
    over, begun = threading.Event(), set()

    def attempt(rollout: Rollout) -> None:
        try:
            drive(client.agent(rollout.id), rollout.request, program, ask, None)
        except Exception as error:
            # The pool would keep it to itself. RUN's own limit ends a rollout of which nothing more is heard.
            if not _is_over(error):
                print(f"{program.name} for {rollout.id}: {error}", file=sys.stderr)

    def begin(pool: ThreadPoolExecutor) -> None:
        running = client.list(State.RUNNING, tag=tag, limit=MOST_RUNNING).rollouts
        for rollout in running:
            if (rollout.id, rollout.attempt) not in begun:
                begun.add((rollout.id, rollout.attempt))
                pool.submit(attempt, rollout)

    def watch() -> None:
        with ThreadPoolExecutor(at_once) as pool:
            while not over.wait(POLL_S):
                try:
                    begin(pool)
                except Exception as error:
                    print(f"rollouts are not looked for: {error}", file=sys.stderr)
            pool.shutdown(cancel_futures=True)

    thread = threading.Thread(target=watch, name="agents")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
