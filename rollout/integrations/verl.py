"""verl's LLM servers as backends of the service: there while verl trains, each labelled with its weights.

    with Client() as client, VerlServers(client, llm_server_manager.get_addresses()) as servers:
        servers.update(0)       # after verl has brought the first weights
        ...
        servers.drain()         # before verl puts its servers to sleep
        servers.update(step)    # after verl has brought the weights of a step

Checked against verl 0.9.1; `examples/verl/trainer.py` calls it at these moments.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence

from rollout.errors import ApiError, RolloutError
from rollout.http import NOT_FOUND
from rollout.schema import PolicyUpdate, State, UpdateState
from rollout.sync import Client

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(https?://)?(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):(\d{1,5})")
"""As verl's `LLMServerManager.get_addresses` has them: host and port."""
_POLL_S = 0.2
_SETTLE_S = 10.0
"""For an update under way to see that its servers are gone; a worker takes about one second."""


class VerlServers:
    """The servers of one run. A context manager: what it registered is removed at the end.

    Backends are called `NAME-0`, `NAME-1`, … in the order of the addresses, so the next run under the same
    name takes over what a killed one has left. Versions are `NAME-RUN-STEP`, where RUN is this object's own:
    a label must not be that of other weights. A service trains one policy, so two runs cannot share it.
    """

    def __init__(
        self,
        client: Client,
        addresses: Sequence[str],
        *,
        name: str = "verl",
        tokenizer: str | None = None,
        logprobs_mode: str | None = None,
        max_rollouts: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """
        Args:
            client: Of the service, with a key of an operator where keys are asked for.
            addresses: `host:port` of each server, as the RUN workers reach it.
            name: Begins the ids of the backends and the versions.
            tokenizer, logprobs_mode, max_rollouts: As in `Client.add_backend`, for each server.
            timeout_s: Seconds that labelling all servers may take.

        Raises:
            ValueError: An address is none, or comes twice; or there is none.
        """
        self._client, self._name, self._timeout_s = client, name, timeout_s
        self._options = {"tokenizer": tokenizer, "logprobs_mode": logprobs_mode, "max_rollouts": max_rollouts}
        self._wanted = _urls(addresses)
        self._run = secrets.token_hex(4)
        self._backends: dict[str, str] = {}

    @property
    def backends(self) -> list[str]:
        """Ids of the backends that are registered now."""
        return [*self._backends]

    def __enter__(self) -> VerlServers:
        try:
            self.register(self._wanted)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def register(self, addresses: Sequence[str]) -> None:
        """Make these the servers of the run: those that are new take rollouts from the next `update` on.

        Raises:
            ValueError: As in the constructor.
            ApiError: A server cannot be used; the message says why.
        """
        urls = _urls(addresses)
        wanted = {f"{self._name}-{rank}": url for rank, url in enumerate(urls)}
        left = re.compile(rf"{re.escape(self._name)}-\d+")
        for backend in self._client.backends():
            # Also another one at a wanted address: a server under two ids would be loaded twice.
            ours, url = left.fullmatch(backend.id) is not None, wanted.get(backend.id)
            if (ours and url != backend.url) or (url is None and backend.url in urls):
                self._remove(backend.id)
        for name, url in wanted.items():
            if self._backends.get(name) != url:
                # Until it is labelled, what it samples could not be told from other weights' tokens.
                self._client.add_backend(url, id=name, drain=True, **self._options)
                self._backends[name] = url

    def update(self, step: int) -> PolicyUpdate:
        """Label all servers with the weights that verl has brought there, and let them take rollouts.

        Calls still under way are ended and made again: no token gets the label of other weights.

        Args:
            step: verl's `global_steps`; versions end in it, which `adapters.base.step_of` reads.

        Raises:
            ValueError: The step is no step.
            RuntimeError: A server did not get the label, so none of its tokens would be believed.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step {step!r} is not a whole number from 0 on: give verl's global_steps")
        update = self._client.update_policy(
            f"{self._name}-{self._run}-{step}",
            mode="abort",
            backends=self.backends,
            timeout_s=self._timeout_s,
            wait=self._timeout_s,
        )
        if not update.state.ended:
            raise RuntimeError(
                f"version {update.version} is {update.state.value} after {self._timeout_s:g} s: see "
                "`rollout status` for RUN workers that live: they bring labels to the servers"
            )
        if update.state is not UpdateState.DONE:
            outcomes = update.backends.items()
            errors = "; ".join(f"{name}: {outcome.error}" for name, outcome in outcomes if outcome.error)
            raise RuntimeError(
                f"version {update.version} did not reach all servers ({update.state.value}): {errors}. They "
                "need VLLM_SERVER_DEV_MODE=1 and enable_scale_out, see docs/verl.md"
            )
        for backend in self._backends:
            self._client.drain_backend(backend, False)
        log.info("%d servers have the weights %s", len(self._backends), update.version)
        return update

    def drain(self) -> None:
        """Take all rollouts off the servers, because verl is about to put them to sleep; `update` ends it.

        None is placed there, and those that are still there are cancelled: verl has its step, so nobody waits
        for them, and their next call would meet a server that sleeps, or other weights.

        Raises:
            RuntimeError: Some are still there after `timeout_s` seconds.
        """
        for backend in self._backends:
            self._client.drain_backend(backend)
        deadline = time.monotonic() + self._timeout_s
        while busy := [b.id for b in self._client.backends() if b.id in self._backends and b.live_rollouts]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rollouts are still on {', '.join(busy)} after {self._timeout_s:g} s: cancel them, see "
                    "`rollout list --state running`; those of another tenant only its key or an admin's can"
                )
            self._client.cancel_many([*self._running()])
            time.sleep(_POLL_S)

    def _running(self) -> Iterator[str]:
        """Ids of the rollouts that may call the servers."""
        page = None
        while page is None or page.cursor:
            page = self._client.list(state=State.RUNNING, cursor=page and page.cursor)
            yield from (rollout.id for rollout in page.rollouts if rollout.backend in self._backends)

    def remove(self) -> None:
        """Take all servers out of the service, and with them the run's weights: any take rollouts then."""
        for backend in [*self._backends]:
            self._remove(backend)
        try:
            status, deadline = self._client.policy(), time.monotonic() + _SETTLE_S
            # An update that was begun fails now, and then the weights before it are wanted again.
            while status.update and self._is_mine(status.update.version) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                status = self._client.policy()
            # Also those of a killed run of this name, whose servers these have replaced.
            if status.current is not None and self._is_mine(status.current.version):
                self._client.forget_policy()
        except RolloutError as error:
            # The run is over; what ended it must not be hidden by this.
            log.warning("other backends may get no rollouts before `rollout policy forget`: %s", error)

    def _is_mine(self, version: str) -> bool:
        """Whether a run of this name brought that version."""
        return re.fullmatch(rf"{re.escape(self._name)}-[0-9a-f]{{8}}-\d+", version) is not None

    def _remove(self, backend: str) -> None:
        try:
            self._client.remove_backend(backend)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        self._backends.pop(backend, None)


def _urls(addresses: Sequence[str]) -> list[str]:
    """URLs of addresses; a ValueError names the one at fault."""
    if isinstance(addresses, str) or not addresses:
        raise ValueError(
            f"addresses {addresses!r} is no list of servers: give verl's LLMServerManager.get_addresses()"
        )
    urls = []
    for address in addresses:
        parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if parts is None or not 0 < int(parts[3]) < 1 << 16:
            raise ValueError(f"address {address!r} is not host:port; give it as verl names it, 10.0.0.7:8000")
        url = f"{parts[1] or 'http://'}{parts[2]}:{parts[3]}"
        if url in urls:
            raise ValueError(f"address {address!r} is there twice: give each server once")
        urls.append(url)
    return urls
