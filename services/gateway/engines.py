"""Asks an LLM server who it is: model, context, tokenizer, endpoints, policy version."""

from __future__ import annotations

import httpx

from rollout.schema import Backend, BackendRequest
from services.gateway.problems import invalid
from services.state.backends import BackendStore

TIMEOUT_S = 10.0


def describe(wanted: BackendRequest) -> Backend:
    """The backend as its own server describes it.

    Raises:
        ApiProblem: 400, when the server cannot be reached or does not say what is needed.
    """
    url = wanted.url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
            models = http.get("/v1/models").raise_for_status().json()["data"]
            # An empty request: 400 or 422 means the route is there; vLLM without --enable-scale-out
            # answers 403 or 404.
            probe = http.post("/inference/v1/generate", json={})
            weights = http.get("/weight_info")
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise invalid("url", f"{url} does not answer as an LLM server: {error}") from None
    served = next((model for model in models if wanted.model in (None, model["id"])), None)
    if served is None:
        names = ", ".join(model["id"] for model in models) or "none"
        raise invalid("model", f"{url} does not serve {wanted.model!r}; it serves: {names}")
    max_model_len = served.get("max_model_len")
    if not max_model_len:
        raise invalid("url", f"{url}/v1/models does not say max_model_len of {served['id']!r}")
    version = None
    if weights.status_code == 200:
        version = weights.json().get("weight_version")
    return Backend(
        id=wanted.id or BackendStore.id_of(url),
        url=url,
        model=served["id"],
        tokenizer=wanted.tokenizer or served.get("root") or served["id"],
        max_model_len=int(max_model_len),
        policy_version=str(version) if version is not None else None,
        logprobs_mode=wanted.logprobs_mode or served.get("logprobs_mode"),
        api="completions" if probe.status_code in (403, 404, 405) else "generate",
    )
