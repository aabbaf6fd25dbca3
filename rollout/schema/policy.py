"""The policy's part of the wire contract: which weights the backends serve, and how they are exchanged."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_serializer, model_validator

from rollout.schema.base import DEFAULT_POLICY, MAX_INT32, Identifier, Items, Strict, TokenId, new_id

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of the calls under way: frozen and continued, waited for, or ended and made elsewhere."""


class Canary(Strict):
    """Fixed token ids, and what the trainer's own forward pass says of them."""

    token_ids: Items[TokenId] = Field(min_length=2, max_length=4096)
    logprobs: Items[float] = Field(max_length=4095)
    """Natural log-prob at temperature 1 of each id but the first, given those before it."""
    tolerance: float = Field(default=0.05, gt=0, le=100)
    """Largest absolute difference from the backend's own numbers, in nats, that is accepted."""

    @model_validator(mode="after")
    def _parallel(self) -> Canary:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(
                f"{len(self.token_ids)} token_ids need {len(self.token_ids) - 1} logprobs (the first id has "
                f"none); got {len(self.logprobs)}"
            )
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError("a log-prob is not finite")
        return self


class LoraAdapter(Strict):
    """A LoRA adapter that is exchanged in place of the whole weights."""

    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The model name under which the server offers it, which backends must have been registered with for the
    policy; None = that one."""


TransferBackend = Literal["nccl", "ipc"]
MOST_TRANSFER_BYTES = 8 << 20
"""Of `init_info` and `update_info` together, as JSON: some ten thousands of tensors."""


class WeightTransfer(Strict):
    """Weights that the trainer's process sends to the engines itself, by their own transfer routes.

    `init_info` and `update_info` are between trainer and engine; `rollout.weight_sync` makes them for vLLM.
    """

    id: Identifier = Field(default_factory=new_id)
    """Of one sending: the request again under the same id is the same update, and not sent for twice."""
    backend: TransferBackend = "nccl"
    ranks: dict[Identifier, Annotated[int, Field(ge=1, le=MAX_INT32)]] | None = Field(
        default=None, min_length=1, max_length=256
    )
    """`nccl`: backend → rank of its first worker in the trainer's group. The update is for these."""
    init_info: dict[str, Any] | None = None
    """Given, the engines first join the group that it describes; None = they are in it already."""
    update_info: dict[str, Any] | None = None
    """What the engines are to receive; None = nothing yet, and `version` is the one that they have."""

    @model_validator(mode="after")
    def _complete(self) -> WeightTransfer:
        init, update, ranks = self.init_info or {}, self.update_info or {}, [*(self.ranks or {}).values()]
        if self.init_info is None and self.update_info is None:
            raise ValueError("nothing to do: give `init_info`, `update_info` or both")
        if (self.backend == "nccl") != (self.ranks is not None):
            raise ValueError(
                "`ranks` are needed with nccl, each backend's first in the group, and with it only"
            )
        size = init.get("world_size")
        if len({*ranks}) < len(ranks) or (isinstance(size, int) and max(ranks, default=0) >= size):
            raise ValueError("`ranks` are each another one, and below `world_size`")
        if self.backend == "ipc" and (init.get("packed") or "tensor_sizes" in update):
            raise ValueError("packed IPC comes in many parts, and an update is one: send with packed=False")
        if len(json.dumps([init, update], allow_nan=False)) > MOST_TRANSFER_BYTES:
            raise ValueError(f"init_info and update_info are more than {MOST_TRANSFER_BYTES} bytes of JSON")
        return self

    def init_info_of(self, backend_id: str) -> dict[str, Any]:
        """`init_info` as that backend is told it."""
        return {**(self.init_info or {}), **({"rank_offset": self.ranks[backend_id]} if self.ranks else {})}


class PolicyRequest(Strict):
    """Asks for new weights on the backends."""

    version: Annotated[str, Field(min_length=1, max_length=128)]
    """Label of the weights; every token sampled from them carries it."""
    path: Annotated[str, Field(max_length=4096)] | None = None
    """Checkpoint directory as the backends see it; None = the weights are there already, only label them."""
    mode: PauseMode = "keep"
    canary: Canary | None = None
    """None = the update is not verified."""
    lora: LoraAdapter | None = None
    """Given, `path` is the adapter's directory."""
    transfer: WeightTransfer | None = None
    """Given, the trainer sends the weights now, from its own process; in place of `path`."""
    backends: Items[Identifier] | None = Field(default=None, min_length=1, max_length=10_000)
    """Only these; the others follow when they are next probed. None = all."""
    concurrency: int = Field(default=0, ge=0, le=MAX_INT32)
    """Backends under exchange at once; 0 = all."""
    reset_prefix_cache: bool = False
    """True: nothing computed by the old weights is used again, not even by rollouts under way."""
    timeout_s: float = Field(default=600.0, gt=0, le=86400)
    """Seconds that one backend may take, waiting for calls under way included."""
    wait: float = Field(default=0.0, ge=0)
    """Seconds to wait for the end before the answer is given."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"{value!r} is not an absolute path; backends do not share your directory")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> PolicyRequest:
        if self.lora is not None and self.path is None:
            adapter = f"adapter {self.lora.name!r}" if self.lora.name else "an adapter"
            raise ValueError(f"{adapter} needs `path`, the directory that it is loaded from")
        transfer = self.transfer
        if transfer is not None and (self.path is not None or self.concurrency):
            raise ValueError(
                "`transfer` goes without `path` and `lora`, and to all backends at once (concurrency 0)"
            )
        if transfer is not None and transfer.ranks is not None:
            if self.backends is not None and set(self.backends) != set(transfer.ranks):
                raise ValueError("`backends` are not those of `transfer.ranks`; leave them out")
            self.backends = sorted(transfer.ranks)
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, dump):
        """Without a word of newer releases where it says nothing: a release that knows none refuses it."""
        return {name: value for name, value in dump(self).items() if name != "transfer" or value}

    @property
    def only_connects(self) -> bool:
        """Whether engines are to join a trainer's group, and nothing comes yet."""
        return self.transfer is not None and self.transfer.update_info is None


class UpdateState(StrEnum):
    """Where an update is. `partly`: at least one backend has the new weights and at least one has not."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    PARTLY = "partly"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self not in (UpdateState.QUEUED, UpdateState.RUNNING)


class BackendUpdateState(StrEnum):
    """Where one backend is in an update."""

    WAITING = "waiting"
    PAUSING = "pausing"
    LOADING = "loading"
    CHECKING = "checking"
    """The canary runs. Calls under way go on, but their tokens count only once it has passed."""
    RESUMED = "resumed"
    """It serves the new weights."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """It was removed meanwhile, or was to be connected only and has another version or unknown weights."""

    @property
    def ended(self) -> bool:
        return self.value in ("resumed", "failed", "skipped")


class BackendUpdate(BaseModel):
    """What an update did to one backend."""

    state: BackendUpdateState = BackendUpdateState.WAITING
    error: str | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    """Of `pause`, `connect` (a transfer's), `reload`, `canary` and `total`."""
    canary_max_error: float | None = None
    """Largest absolute difference from the trainer's log-probs, in nats."""


class PolicyUpdate(BaseModel):
    """One update of the weights, and how far it has come."""

    id: str
    policy: str = DEFAULT_POLICY
    version: str
    path: str | None
    mode: PauseMode
    lora: LoraAdapter | None = None
    transfer: TransferBackend | None = None
    """How the trainer sends the weights itself; None = it does not."""
    verified: bool
    """Whether a canary was given; without one nothing checks that the weights are the trainer's."""
    warnings: list[str] = Field(default_factory=list)
    state: UpdateState = UpdateState.QUEUED
    backends: dict[str, BackendUpdate]
    created_at: float
    """Seconds since the epoch, as the next two."""
    started_at: float | None = None
    finished_at: float | None = None


class Policy(BaseModel):
    """The weights that new rollouts run on."""

    version: str
    path: str | None
    lora: LoraAdapter | None = None
    verified: bool
    update_id: str
    since: float
    """When the update ended, seconds since the epoch."""


class PolicyStatus(BaseModel):
    """What `GET /v1/policies/NAME` answers, and `GET /v1/policy` of `default`."""

    name: str = DEFAULT_POLICY
    backends: list[str] = Field(default_factory=list)
    """Ids of those that serve it."""
    waiting: int = 0
    """Rollouts that wait for room on them."""
    longest_wait_s: float = 0.0
    """Of the one that has waited longest."""
    current: Policy | None
    """None: no update has succeeded yet, or it was forgotten; backends of any weights take rollouts."""
    update: PolicyUpdate | None
    """The one under way."""
    history: list[PolicyUpdate]
    """The latest updates, the newest first."""


class PolicyList(BaseModel):
    """Every policy that a backend serves or that weights were brought to, by name."""

    policies: list[PolicyStatus]
