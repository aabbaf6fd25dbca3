"""The `rollout` command: one file a group of commands."""

from rollout.cli.common import err, out, url_option
from rollout.cli.main import main

__all__ = ["err", "main", "out", "url_option"]
