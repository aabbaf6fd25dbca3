"""vLLM's NCCL weight transfer where there is no GPU: all of vLLM's own code but the broadcast itself.

The tensors go through the TCP store by which the members of the group find each other. Both sides need it. A
server has it by `--worker-extension-cls tests.helpers.transfer_without_gpu.Extension`. Run by vLLM's python,
as `python -m tests.helpers.transfer_without_gpu PLAN`, it is a trainer: it connects, waits for a line, sends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

DEAD = 9
"""Exit code of a trainer that was to die half-way."""


class StoreGroup:
    """As `PyNcclCommunicator` is used by the engines."""

    def __init__(self, info, rank: int) -> None:
        self._group = StatelessProcessGroup.create(
            info.master_address, info.master_port, rank, info.world_size
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        tensor.copy_(self._group.broadcast(tensor, src))

    def destroy(self) -> None:
        pass


nccl_engine.worker_init_process_group = lambda info, parallel: StoreGroup(
    info, info.rank_offset + parallel.rank
)
nccl_engine.open_trainer_endpoint = lambda info: StoreGroup(info, 0)
torch.cuda.current_stream = lambda device=None: None
torch.accelerator.synchronize = lambda device=None: None


class Extension:
    """What a server loads; importing this module is all."""


class Checkpoint(WeightSource):
    """The tensors of a directory, as a trainer would have them."""

    def __init__(self, path: Path, half: Callable[[], None]) -> None:
        """`half` is called in the middle: one of two tensors has gone that an engine joins to one."""
        from safetensors.torch import load_file

        self.tensors, self.half = load_file(path / "model.safetensors"), half

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        for name, tensor in self.tensors.items():
            if name == "model.layers.1.mlp.up_proj.weight":
                self.half()
            yield name, tensor


def main() -> None:
    """Connect, send once, and tell what became of both."""
    from rollout import Client
    from rollout.weight_sync import WeightSync

    plan = json.loads(sys.argv[1])
    with Client(plan["url"]) as client:
        sync = WeightSync(client, plan["connected"], gpus={plan["backend"]: 1}, timeout_s=plan["timeout_s"])
        info = nccl_engine.NCCLTrainerInitInfo(
            "127.0.0.1", plan["port"], sync.world_size, packed=False, rank=0
        )

        def die() -> None:
            # Not before the engine has what was sent.
            while (
                not (update := client.policy().update) or update.backends[plan["backend"]].state != "loading"
            ):
                time.sleep(0.05)
            time.sleep(1)
            os._exit(DEAD)

        source = Checkpoint(Path(plan["path"]), die if plan.get("dies") else lambda: None)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=sync, source=source)
        print(json.dumps({"connected": sync.update.model_dump(mode="json")}), flush=True)
        sys.stdin.readline()
        sync.version, sync.canary = plan["version"], plan["canary"]
        engine.send_weights()
        print(json.dumps({"sent": sync.update.model_dump(mode="json")}), flush=True)


if __name__ == "__main__":
    main()
