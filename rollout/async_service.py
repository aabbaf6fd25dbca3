"""The part of `AsyncClient` that is about the service: handlers, backends, policy, what runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from rollout.http import Gateway, Polls, present
from rollout.schema import (
    DEFAULT_POLICY,
    Backend,
    BackendRequest,
    Canary,
    DrainRequest,
    Fleet,
    HandlerInfo,
    PauseMode,
    PolicyList,
    PolicyRequest,
    PolicyStatus,
    PolicyUpdate,
    Report,
    ReportRequest,
)


class AsyncService(Gateway):
    """What a gateway tells of its service, and takes for it."""

    # ------------------------------------------------------------------------------ handlers, backends

    async def handlers(self) -> list[HandlerInfo]:
        """The handlers that the workers announced."""
        answer = await self.fetch_json("GET", "/v1/handlers")
        return [HandlerInfo.model_validate(entry) for entry in answer["handlers"]]

    async def backends(self) -> list[Backend]:
        """The LLM servers and their load."""
        answer = await self.fetch_json("GET", "/v1/backends")
        return [Backend.model_validate(entry) for entry in answer["backends"]]

    async def add_backend(
        self,
        url: str,
        id: str | None = None,
        model: str | None = None,
        tokenizer: str | None = None,
        logprobs_mode: str | None = None,
        capacity_tokens: int | None = None,
        max_rollouts: int | None = None,
        drain: bool = False,
        policies: Mapping[str, str | None] | None = None,
        key: str | None = None,
        text_only: bool = False,
    ) -> Backend:
        """Register an LLM server; one that is registered already is described anew. See `BackendRequest`.

        Args:
            policies: Each policy that it serves, with its model there; None = `model`.
            key: Name of a file with what calls to it carry, in the service's directory of them.
            text_only: It tells no token ids, and can serve judges and users alone.
        """
        given = present(id=id, model=model, tokenizer=tokenizer, logprobs_mode=logprobs_mode, key=key)
        given |= present(capacity_tokens=capacity_tokens, max_rollouts=max_rollouts, policies=policies)
        request = BackendRequest(url=url, drain=drain, text_only=text_only, **given)
        return await self.fetch(Backend, "POST", "/v1/backends", body=request)

    async def backend(self, backend_id: str) -> Backend:
        """One LLM server."""
        return await self.fetch(Backend, "GET", _backend_path(backend_id))

    async def drain_backend(self, backend_id: str, drain: bool = True) -> Backend:
        """Let an LLM server take no new rollouts, or with `drain=False` again some; those on it go on."""
        request = DrainRequest(drain=drain)
        return await self.fetch(Backend, "POST", f"{_backend_path(backend_id)}/drain", body=request)

    async def remove_backend(self, backend_id: str, force: bool = True) -> None:
        """Take an LLM server out of service; its rollouts move to others at their next call.

        Args:
            force: False = refuse (`ApiError` 409) while it has live rollouts.
        """
        params = {} if force else {"force": "false"}
        await self.send("DELETE", _backend_path(backend_id), params=params)

    # ------------------------------------------------------------------------------ policy

    async def policies(self) -> list[PolicyStatus]:
        """Every policy, by name."""
        return (await self.fetch(PolicyList, "GET", "/v1/policies")).policies

    async def policy(self, name: str = DEFAULT_POLICY) -> PolicyStatus:
        """A policy's current weights, the update under way, and the latest ones."""
        return await self.fetch(PolicyStatus, "GET", _policy_path(name))

    async def update_policy(
        self,
        version: str,
        path: str | None = None,
        *,
        mode: PauseMode = "keep",
        canary: Canary | None = None,
        wait: float = 60.0,
        policy: str = DEFAULT_POLICY,
        **more: Any,
    ) -> PolicyUpdate:
        """Bring new weights to the backends that serve a policy.

        Sending the same version and path again is harmless while the first update is under way or once it is
        done; another update of the policy meanwhile is refused (`ApiError` 409).

        Args:
            path: Checkpoint directory as the backends see it; None = they have the weights already.
            canary: Token ids and the trainer's log-probs of them; without one nothing is verified.
            wait: Seconds to wait for the end. The update goes on when they are over.
            more: Further fields of `PolicyRequest`.

        Returns:
            The update; look at its `state`, for one that failed raises nothing.
        """
        polls = Polls(wait)
        first = polls.next()
        request = PolicyRequest(version=version, path=path, mode=mode, canary=canary, wait=first, **more)
        update = await self.fetch(PolicyUpdate, "POST", _policy_path(policy), body=request, wait=first)
        while not update.state.ended and not polls.over:
            update = await self.policy_update(update.id, polls.next(), policy=policy)
            await polls.pause()
        return update

    async def forget_policy(self, policy: str = DEFAULT_POLICY) -> None:
        """Have backends of any weights take rollouts, because nobody can bring the current ones any more.

        Refused (`ApiError` 409) while a backend that is registered serves them, or an update is under way.
        """
        await self.send("DELETE", _policy_path(policy))

    async def policy_update(
        self, update_id: str, wait: float = 0.0, *, policy: str = DEFAULT_POLICY
    ) -> PolicyUpdate:
        """One update, once it has ended or after `wait` seconds (at most what the gateway allows)."""
        path = f"{_policy_path(policy)}/updates/{quote(update_id, safe='')}"
        return await self.fetch(PolicyUpdate, "GET", path, params={"wait": round(wait, 3)}, wait=wait)

    # ------------------------------------------------------------------------------ training

    async def report(
        self, step: int, metrics: Mapping[str, Any], run: str = "default", policy_version: str | None = None
    ) -> None:
        """Say what a step of training came to, for whoever looks at the page.

        Saying it again replaces it, so a trainer that is started again need not know what it said.

        Args:
            metrics: Numbers by name, at most 64: `reward`, `logprob_gap`, `staleness`, … Those that are None,
                NaN or infinite are left out.
            policy_version: The weights after the step.
        """
        numbers = {name: float(value) for name, value in metrics.items() if value is not None}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if finite:
            request = ReportRequest(run=run, step=step, metrics=finite, policy_version=policy_version)
            await self.send("POST", "/v1/reports", body=request)

    async def reports(self, run: str = "default", limit: int | None = None) -> list[Report]:
        """The steps of a run that were reported, in their order."""
        path = f"/v1/reports/{quote(run, safe='')}"
        answer = await self.fetch_json("GET", path, params=present(limit=limit))
        return [Report.model_validate(entry) for entry in answer["reports"]]

    # ------------------------------------------------------------------------------ the service

    async def status(self) -> dict[str, Any]:
        """`{"states": {state: count}, "queues": {name: depth}, "backends": [...], "version"}`."""
        return await self.fetch_json("GET", "/v1/status")

    async def fleet(self) -> Fleet:
        """What works on rollouts, where, and how much of it there is."""
        return await self.fetch(Fleet, "GET", "/v1/fleet")

    async def ready(self) -> dict[str, Any]:
        """`{"ready": bool, ...}` with what is missing; asks once and raises nothing."""
        try:
            response = await self._send_once("GET", "/ready")
        except httpx.TransportError as error:
            return {"ready": False, "detail": f"the gateway does not answer: {error!r}"}
        try:
            answer = response.json()  # 503 has one, too
        except ValueError:
            answer = response.text[:300]
        answer = answer if isinstance(answer, dict) else {"detail": answer}
        return {**answer, "ready": response.status_code == 200}


def _policy_path(name: str) -> str:
    # Older gateways know only the one.
    return "/v1/policy" if name == DEFAULT_POLICY else f"/v1/policies/{quote(name, safe='')}"


def _backend_path(backend_id: str) -> str:
    return f"/v1/backends/{quote(backend_id, safe='')}"
