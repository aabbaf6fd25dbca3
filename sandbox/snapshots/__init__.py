"""Sandboxes kept as they are: files, working directory and variables, to begin others with."""

from sandbox.snapshots.keeper import Snapshots

__all__ = ["Snapshots"]
