"""Weights straight from a trainer's process: what vLLM's trainer engines take as their `client`.

    sync = WeightSync(Client(), "step-0", gpus={"a": 2, "b": 2})  # what the backends serve now, and where
    info = NCCLTrainerInitInfo(master_address=here, master_port=29500, world_size=sync.world_size, rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=sync, source=ModuleSource(model))
    ...
    sync.version, sync.canary = "step-1", canary
    engine.send_weights()

The engine sends; pausing, labels, the canary and what a failure needs are the service's.
"""

from __future__ import annotations

import base64
import pickle
from itertools import accumulate
from typing import Any

from rollout.errors import RolloutError
from rollout.schema.policy import BackendUpdateState, Canary, PolicyUpdate, UpdateState, WeightTransfer
from rollout.sync import Client

PATIENCE_S = 60.0
"""On top of a backend's own time limit: until a worker has begun, and for what a failure leaves to do."""


class WeightsNotSent(RolloutError):
    """Not every backend serves the weights; `update` says which one failed and why."""

    def __init__(self, update: PolicyUpdate) -> None:
        errors = "; ".join(backend.error for backend in update.backends.values() if backend.error)
        super().__init__(f"weights {update.version!r} are {update.state.value}: {errors or 'see the update'}")
        self.update = update


class WeightSync:
    """Has the service tell the backends what a vLLM trainer engine would tell one server."""

    def __init__(
        self, client: Client, version: str, *, gpus: dict[str, int] | None = None, **options: Any
    ) -> None:
        """
        Args:
            version: Label of the weights that the backends have when they are connected.
            gpus: For NCCL: workers of each backend (tensor × pipeline × data parallel), as its
                `/get_world_size` says. They follow the trainer, which is rank 0, in this order.
                None = CUDA IPC.
            options: Further ones of `Client.update_policy`; a trainer that is gone holds a backend for
                `timeout_s`.
        """
        self._client, self._options = client, {"timeout_s": 600.0, **options}
        self._kind: dict[str, Any] = {"backend": "ipc"}
        if gpus is not None:
            ranks = dict(zip(gpus, accumulate(gpus.values(), initial=1), strict=False))
            self._kind = {"backend": "nccl", "ranks": ranks}
        self.world_size = 1 + sum((gpus or {}).values())
        self.version = version
        """Of the next sending."""
        self.canary: Canary | None = None
        """Of the next sending."""
        self.update: PolicyUpdate | None = None
        """The latest."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the backends, whose weights stay as they are; others than those wait for a sending."""
        update = self._tell(None, init_info=init_info)
        for backend in update.backends.values():
            if backend.state is BackendUpdateState.FAILED or "connect" not in backend.seconds:
                raise WeightsNotSent(update)

    def start_weight_update(self) -> None:
        """Nothing: the service begins when it is told what comes."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Bring the weights; returns when every backend serves them."""
        info = dict(update_info)
        if (handles := info.pop("ipc_handles", None)) is not None:
            # As vLLM's own HTTP client does. Engines read it with VLLM_ALLOW_INSECURE_SERIALIZATION=1 only.
            info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        given = {name: value for name, value in info.items() if value is not None}
        update = self._tell(self.canary, update_info=given)
        if update.state is not UpdateState.DONE:
            raise WeightsNotSent(update)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing: the service has done it, before the engines sampled again."""

    def _tell(self, canary: Canary | None, **infos: Any) -> PolicyUpdate:
        transfer, wait = WeightTransfer(**self._kind, **infos), self._options["timeout_s"] + PATIENCE_S
        options = {"transfer": transfer, "canary": canary, "wait": wait, **self._options}
        self.update = self._client.update_policy(self.version, **options)
        return self.update
