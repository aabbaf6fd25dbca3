"""What attackers try, a file a subject, and a control for each that shows that it bites.

`python -m tests.attacks` runs them all and prints a table. :func:`attack` makes a test of an attempt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Target(Protocol):
    """What the fixture `target` of a file gives: where the attempt is made."""

    place: str
    """`apptainer`, `bubblewrap`, or `service` where no sandbox takes part."""
    control: bool
    """Whether this is the control: nothing (or not the wall under test) stands in the attacker's way."""


@dataclass
class RewardTarget:
    """Where a cheat is tried: the service, or the naive way."""

    control: bool
    outcome: Any
    place: str = "service"


def attack(stopped_by: str) -> Callable:
    """Make a test of a function that tells whether the attacker got what its name says.

    The attempt takes a :class:`Target` as `target`. It must fail everywhere but where `target.control` is
    true, and succeed there: an attack that nothing lets through shows nothing.

    Args:
        stopped_by: The wall, as the table shows it; a few words.
    """

    def make(attempt: Callable[..., bool]) -> Callable[..., None]:
        @functools.wraps(attempt)
        def test(*args, **kwargs):
            target: Target = kwargs["target"]
            succeeded = attempt(*args, **kwargs)
            assert isinstance(succeeded, bool), f"{attempt.__name__} must tell whether it succeeded"
            if target.control:
                assert succeeded, "the control failed: this attack succeeds nowhere, so it shows nothing"
            else:
                assert not succeeded, "THE ATTACK SUCCEEDED"

        test.stopped_by = stopped_by
        return test

    return make


def one_a_wall(cheats: dict[str, tuple[str, str]]) -> tuple[str, ...]:
    """The first script for each wall. Args: `cheats`: what is attempted → its script, and the wall."""
    return tuple({wall: script for script, wall in reversed(cheats.values())}.values())
