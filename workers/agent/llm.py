"""Calls to an LLM engine: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import aiohttp

from rollout.schema import Backend, SamplingParams
from workers.errors import ModelError


class BackendUnavailable(Exception):
    """The backend is away, overloaded or broken; another one may serve the same call."""


@dataclass(frozen=True)
class Completion:
    """One call's answer. `token_ids` and `logprobs` are parallel."""

    call_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop`, `length` or `abort`."""
    spans: list[tuple[str | None, int, int]]
    """Policy version of the ids from start to end (exclusive), in order and without gaps."""
    cached_tokens: int | None = None
    """Prompt ids that came from the engine's prefix cache; None = not told."""


def session() -> aiohttp.ClientSession:
    """The HTTP session of a worker process. Closing a response cancels the call in the engine."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
    )


class EngineClient:
    """One backend, by vLLM's wire contract."""

    def __init__(self, http: aiohttp.ClientSession, backend: Backend) -> None:
        self._http = http
        self._backend = backend
        self._url = backend.url.rstrip("/").removesuffix("/v1")

    async def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        seed: int | None,
        stop_token_ids: list[int],
        call_id: str,
        cache_salt: str | None,
        timeout_s: float,
    ) -> Completion:
        """Sample a continuation of `prompt`.

        Raises:
            BackendUnavailable: No usable answer: connection, time-out, 5xx, or an aborted call.
            ModelError: The engine refused the call (4xx), or its answer breaks the contract.
        """
        params: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": sorted({*stop_token_ids, *sampling.stop_token_ids}),
            "logprobs": 0,
        }
        if seed is not None:
            params["seed"] = seed
        if self._backend.api == "generate":
            body = {
                "request_id": call_id,
                "model": self._backend.model,
                "token_ids": prompt,
                "sampling_params": {**params, "detokenize": False},
            }
            path = "/inference/v1/generate"
        else:
            body = {
                "model": self._backend.model,
                "prompt": prompt,
                "return_token_ids": True,
                **params,
            }
            path = "/v1/completions"
        if cache_salt:
            body["cache_salt"] = cache_salt
        answer = await self._post(path, body, timeout_s)
        return self._read(answer, call_id)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        where = f"backend {self._backend.id} ({self._url}{path})"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.post(self._url + path, json=body) as response,
            ):
                if response.status < 400:
                    return await response.json()
                text = (await response.text())[:500]
        except TimeoutError:
            raise BackendUnavailable(f"{where}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise BackendUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if response.status >= 500 or response.status == 429:
            raise BackendUnavailable(f"{where}: HTTP {response.status}: {text}")
        raise ModelError(f"{where}: HTTP {response.status}: {text}")

    def _read(self, answer: dict[str, Any], call_id: str) -> Completion:
        try:
            choice = answer["choices"][0]
            token_ids = [int(token) for token in choice["token_ids"]]
            logprobs = choice["logprobs"]
            if self._backend.api == "generate":
                values = [float(item["logprob"]) for item in logprobs["content"]]
            else:
                values = [float(value) for value in logprobs["token_logprobs"]]
            finish_reason = choice["finish_reason"] or "abort"
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ModelError(f"backend {self._backend.id}: answer without {error}") from error
        if finish_reason == "abort":
            raise BackendUnavailable(f"backend {self._backend.id}: the call was aborted")
        if not token_ids:
            raise ModelError(f"backend {self._backend.id}: no token was sampled")
        if len(values) != len(token_ids):
            raise ModelError(f"backend {self._backend.id}: {len(token_ids)} ids with {len(values)} log-probs")
        if not all(map(math.isfinite, values)):
            raise ModelError(f"backend {self._backend.id}: a log-prob is not finite")
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return Completion(
            call_id=call_id,
            token_ids=token_ids,
            logprobs=values,
            finish_reason=finish_reason,
            spans=self._spans(choice.get("weight_versions"), len(token_ids)),
            cached_tokens=details.get("cached_tokens"),
        )

    def _spans(self, spans: list[dict[str, Any]] | None, length: int) -> list[tuple[str | None, int, int]]:
        """The engine's version spans; without any, the version the backend had at registration."""
        whole = [(self._backend.policy_version, 0, length)]
        if not spans:
            return whole
        out = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
        out = [span for span in out if span[2] > span[1]]
        edges = [0, *(end for _, _, end in out)]
        if [start for _, start, _ in out] != edges[:-1] or edges[-1] != length:
            raise ModelError(f"backend {self._backend.id}: version spans {spans} do not cover {length} ids")
        return out
