"""What the commands share: where they write, and the option that names the gateway."""

from __future__ import annotations

import click
from pydantic import ValidationError
from rich.console import Console

out = Console()
err = Console(stderr=True)
url_option = click.option("--url", help="The gateway. [default: $ROLLOUT_URL, or your running service]")


def problems_of(error: ValidationError) -> str:
    """Each field at fault, with what is wrong with it."""
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
