"""Asks an LLM server who it is: engine, wire format, model, context, tokenizer, capacity, weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import requests

from rollout.schema import DEFAULT_POLICY, Backend, BackendRequest, EngineApi, EngineName
from services.engines.address import ask, json_object, root, text_of
from services.engines.credentials import REFUSED, EngineKeyProblem, refusal
from services.engines.labels import versions_of
from services.engines.stats import MOST, WEIGHT_ROUTES, samples, version_in
from services.state.backends.store import BackendStore

TIMEOUT_S = 10.0
"""Seconds for each question."""
INFO_TIMEOUT_S = 20.0
"""Seconds for `/server_info`: vLLM looks at all of its environment at the first one; seen: 3 s."""
SERVER_INFO = ("/server_info?config_format=json", "/get_server_info")
"""Where vLLM (in dev mode), SGLang and the embedded backend tell settings; the second is of older SGLangs."""
MAX_CONTEXT = 2**31 - 1
UNTOLD = "-"
"""The tokenizer of a text-only backend."""
MAX_NAME = 4096
"""Characters of a model's name, or of a path."""
_OWNERS: dict[str, EngineName] = {"vllm": "vllm", "sglang": "sglang", "rollout-embedded": "embedded"}
"""`owned_by` in `/v1/models`."""


class DescribeError(Exception):
    """A server cannot be used as a backend."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        """The field of `BackendRequest` that is at fault."""
        self.message = message


def describe(request: BackendRequest) -> Backend:
    """The backend as its own server describes it; what the request names goes before what the server says.

    Raises:
        DescribeError: The server cannot be reached or does not say what is needed.
    """
    url = root(request.url)
    try:
        server = _Server(url, request.key)
        return server.text_only(request) if request.text_only else server.describe(request)
    except EngineKeyProblem as error:
        raise DescribeError("key", str(error)) from None
    except requests.RequestException as error:
        text = f"{url} does not answer as an LLM server: {text_of(error)}"
        raise DescribeError("url", text) from error


class _Server:
    """One server under examination."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._key = key
        self._ask = partial(ask, key=key)

    def describe(self, request: BackendRequest) -> Backend:
        cards = self._cards()
        policies, absent = self._policies(request, cards)
        first = next(iter(policies))
        # An adapter's card leaves to the one of its base what they share, and one may not be loaded yet.
        card = cards.get(policies[first]) or next(iter(cards.values()))
        card = cards.get(_name(card.get("parent")) or "") or card
        engine = self._engine(card)
        info = self._info()
        max_model_len = _positive(card.get("max_model_len")) or _positive(info.get("context_length"))
        if not max_model_len or max_model_len > MAX_CONTEXT:
            raise DescribeError("url", f"{self._url}/v1/models does not say max_model_len of {card['id']!r}")
        told = request.tokenizer or _name(info.get("tokenizer_path")) or _name(card.get("root"))
        backend = Backend(
            **self._named(request, policies),
            rejected=absent,
            tokenizer=told or card["id"],
            max_model_len=max_model_len,
            engine=engine,
            api=self._api(engine),
            logprobs_mode=request.logprobs_mode or self._logprobs_mode(card, info),
            routed_experts=bool(info.get("enable_return_routed_experts")),
            capacity_tokens=request.capacity_tokens or self._capacity(engine, info),
        )
        versions = versions_of(backend, version_in(self._weights(engine)))
        known = {policy: version for policy, version in versions.items() if version}
        described = backend.model_copy(update={"versions": known}).of(first)
        # Of one alone `policy_version` says it all.
        return described if len(policies) > 1 else described.model_copy(update={"versions": {}})

    def text_only(self, request: BackendRequest) -> Backend:
        """A server of which nothing is asked but `/v1/chat/completions`: who lists no models must be told."""
        why = ""
        try:
            cards = self._cards()
        except (requests.HTTPError, DescribeError) as error:
            if getattr(error, "field", "") == "key":
                raise
            cards, why = {}, f"{error}; "
        asked = request.policies or {DEFAULT_POLICY: None}
        usual = request.model or next(iter(cards), "")
        policies = {policy: model or usual for policy, model in asked.items()}
        absent = sorted(model for model in policies.values() if not model or (cards and model not in cards))
        if absent:
            if not any(absent):
                raise DescribeError("model", f"{why}name a model that {self._url} serves")
            names = ", ".join(filter(None, absent))
            message = f"{self._url} does not serve {names!r:.300}; it serves: {', '.join(cards):.1000}"
            raise DescribeError("model", message)
        card = cards.get(next(iter(policies.values())), {})
        room = _positive(card.get("max_model_len")) or MAX_CONTEXT
        named = self._named(request, policies)
        return Backend(**named, tokenizer=UNTOLD, max_model_len=room, api="chat")

    def _named(self, request: BackendRequest, policies: dict[str, str]) -> dict[str, Any]:
        """What a backend of any kind is called, serves and is asked with."""
        first = next(iter(policies))
        named = {"id": request.id or BackendStore.id_of(self._url), "url": self._url, "policies": policies}
        asked = {"max_rollouts": request.max_rollouts, "key": request.key}
        return {**named, **asked, "policy": first, "model": policies[first]}

    def _get(self, path: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The object at a path; empty when the server has none there."""
        answer = self._ask("GET", self._url + path, timeout_s)
        return json_object(answer) if answer.status == 200 else {}

    def _cards(self) -> dict[str, dict[str, Any]]:
        """The entries of `/v1/models` by name."""
        answer = self._ask("GET", f"{self._url}/v1/models", TIMEOUT_S)
        if answer.status in REFUSED:
            why = f"HTTP {answer.status}{refusal(answer.status, self._key)}"
            raise DescribeError("key", f"{self._url}/v1/models: {why}")
        if answer.status != 200:
            raise requests.HTTPError(f"{self._url}/v1/models: HTTP {answer.status} {answer.reason}")
        try:
            cards = {_name(card["id"]): card for card in json_object(answer)["data"]}
            if None in cards:
                raise ValueError("a model without a name")
        except (ValueError, KeyError, TypeError) as error:
            raise DescribeError("url", f"{self._url}/v1/models is no list of models: {error!r}") from error
        if not cards:
            raise DescribeError("url", f"{self._url}/v1/models lists no model")
        return cards

    def _policies(
        self, request: BackendRequest, cards: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Each policy's model, and of those whose adapters are not loaded yet what will load them."""
        asked = request.policies or {DEFAULT_POLICY: None}
        usual = request.model or next(iter(cards))
        policies = {policy: model or usual for policy, model in asked.items()}
        absent: dict[str, str] = {}
        for policy, model in policies.items():
            if list(policies.values()).count(model) > 1:
                message = f"two policies cannot be one model, and {model!r} is named for several"
                raise DescribeError("policies", message)
            if model in cards:
                continue
            message = f"{self._url} does not serve {model!r}; it serves: {', '.join(cards):.1000}"
            if not asked[policy]:
                raise DescribeError("model", message)
            if not self._loads_adapters():
                message += (
                    "; vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 has updates load it"
                )
                raise DescribeError("policies", message)
            when = f"the first update of policy {policy!r} does it"
            absent[policy] = f"adapter {model!r} is not loaded yet: {when}"
        return policies, absent

    def _loads_adapters(self) -> bool:
        """Whether updates can load adapters: an empty request is refused where the route is there."""
        answer = self._ask("POST", f"{self._url}/v1/load_lora_adapter", TIMEOUT_S, json={})
        return answer.status in (400, 422)

    def _engine(self, card: dict[str, Any]) -> EngineName:
        """Which engine it is. A server in front of another one may name another owner."""
        owner = card.get("owned_by")
        if isinstance(owner, str) and owner in _OWNERS:
            return _OWNERS[owner]
        return "sglang" if "is_generation" in self._weights("sglang") else "vllm"

    def _api(self, engine: EngineName) -> EngineApi:
        if engine == "sglang":
            return "sglang"
        # An empty request: 400 or 422 means the route is there; vLLM without --enable-scale-out answers
        # 403 or 404.
        answer = self._ask("POST", f"{self._url}/inference/v1/generate", TIMEOUT_S, json={})
        return "completions" if answer.status in (403, 404, 405) else "generate"

    def _info(self) -> dict[str, Any]:
        """What the server tells of its settings, flat; nothing when it tells nothing, or too late."""
        for path in SERVER_INFO:
            try:
                info = self._get(path, INFO_TIMEOUT_S)
            except requests.Timeout:
                continue
            if info:
                config = info.get("vllm_config")
                return _flat(config) if isinstance(config, dict) else info
        return {}

    @staticmethod
    def _logprobs_mode(card: dict[str, Any], info: dict[str, Any]) -> str | None:
        """`raw_logprobs` (without the temperature) or `processed_logprobs`; None = the server does not say.

        vLLM says it in dev mode. SGLang does not, for an environment variable can change it.
        """
        mode = info.get("logprobs_mode") or card.get("logprobs_mode")
        return mode if mode in ("raw_logprobs", "processed_logprobs") else None

    def _capacity(self, engine: EngineName, info: dict[str, Any]) -> int | None:
        """Tokens that fit into the key-value cache."""
        if engine == "embedded":
            return _positive(info.get("kv_cache_tokens"))
        if engine == "sglang":
            each = _positive(info.get("max_total_num_tokens"))
            return each and each * (_positive(info.get("dp_size")) or 1)
        answer = self._ask("GET", f"{self._url}/metrics", TIMEOUT_S)
        return capacity_of_vllm(answer.text) if answer.status == 200 else None

    def _weights(self, engine: EngineName) -> dict[str, Any]:
        """Where the engine names its weights."""
        return next(filter(None, map(self._get, WEIGHT_ROUTES[engine])), {})


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of vLLM that matter here, out of its nested configuration."""
    model, auxiliary = (
        part if isinstance(part := config.get(name), dict) else {}
        for name in ("model_config", "aux_output_config")
    )
    routed = model.get("enable_return_routed_experts") or auxiliary.get("enable_return_routed_experts")
    return {
        "logprobs_mode": model.get("logprobs_mode"),
        "tokenizer_path": model.get("tokenizer"),
        "enable_return_routed_experts": routed,
    }


def capacity_of_vllm(metrics: str) -> int | None:
    """Tokens in the caches of all engines, from `vllm:cache_config_info`; None when it is not told.

    Newer versions name the tokens. Else blocks times their size, which is too much for a model whose layers
    need caches of different kinds.
    """
    tokens: list[int] = []
    for name, labels, _ in samples(metrics):
        if name == "vllm:cache_config_info":
            blocks, size = _positive(labels.get("num_gpu_blocks")), _positive(labels.get("block_size"))
            tokens.append(_positive(labels.get("kv_cache_size_tokens")) or (blocks or 0) * (size or 0))
    return sum(tokens) if tokens and all(tokens) else None


def _positive(value: Any) -> int | None:
    """A number above 0 and within reason, also as text; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if 1 <= number <= MOST and value is not True else None


def _name(value: Any) -> str | None:
    """A name or path; None for anything else."""
    return value if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable() else None
