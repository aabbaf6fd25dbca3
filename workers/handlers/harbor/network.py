"""What of a network a part of a task gets: none, or the way through the deployment's proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sandbox.client import SandboxClient
from services.settings import settings
from workers.errors import TaskError
from workers.handlers.base import Context
from workers.handlers.harbor.egress import EVERY_HOST, Egress

NO_NETWORK, ALLOWLIST, PUBLIC = "no-network", "allowlist", "public"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
REFUSED = "the task wants a network for {}, and this deployment gives tasks none (ROLLOUT_TASK_EGRESS)"
WITHOUT = "network_mode public: this deployment gives tasks no network (ROLLOUT_TASK_EGRESS)"


def check(mode: str | None, hosts: Sequence[str] = ()) -> str | None:
    """A warning where a task runs without the network that it has by default; None: it has what it asks for.

    Raises:
        TaskError: `allowlist`, and the deployment lets tasks have no network.
    """
    if mode in (None, NO_NETWORK) or settings().task_egress:
        return None
    if mode == ALLOWLIST:
        raise TaskError(REFUSED.format(", ".join(hosts) or "an empty list of hosts"))
    return WITHOUT


def leads_out(mode: str | None, hosts: Sequence[str] = ()) -> bool:
    """Whether `way_out` leads anywhere. The port by which it does is the sandbox's own: another one, with the
    files and variables of this one, would look for it in vain.

    Raises:
        TaskError: As `check`.
    """
    return not check(mode, hosts) and mode not in (None, NO_NETWORK)


@asynccontextmanager
async def way_out(
    box: SandboxClient, mode: str | None, hosts: Sequence[str] = (), ctx: Context | None = None
) -> AsyncIterator[dict[str, str]]:
    """The variables (`HTTP_PROXY`, …; {} = there is no network) by which programs of the sandbox get out.

    Args:
        mode: `no-network`, `allowlist` or `public`, of an agent or a verifier; None = none.
        hosts: Of the allow-list.
        ctx: Where the hosts that were refused are told: its log, and the metric `refused_hosts`.

    Raises:
        TaskError: `allowlist`, and the deployment lets tasks have no network.
    """
    if not leads_out(mode, hosts):
        yield {}
        return
    async with (
        Egress([EVERY_HOST] if mode == PUBLIC else hosts) as egress,
        box.tunnel("127.0.0.1", egress.port) as tunnel,
    ):
        address, inside = f"http://127.0.0.1:{tunnel.port}", "localhost,127.0.0.1,::1"
        told = dict(zip(VARIABLES, (address, address, inside), strict=True))
        yield told | {name.lower(): value for name, value in told.items()}
        if ctx is not None and egress.refused:
            ctx.log.warning(
                "hosts were refused that a task's programs asked for", hosts=sorted(egress.refused)
            )
            ctx.metrics["refused_hosts"] = ctx.metrics.get("refused_hosts", 0) + len(egress.refused)
