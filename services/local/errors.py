"""What can go wrong with the stack of one machine."""

from __future__ import annotations


class StackError(RuntimeError):
    """The stack cannot be started, or a part of it did not start; the message says which and why."""
