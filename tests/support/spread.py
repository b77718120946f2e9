"""Two processes over gloo on the CPU, and a model that is distributed over them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # every parameter is sharded
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def start(zero3: bool, backend: str = "gloo") -> None:
    if not zero3:
        return dist.init_process_group(backend)
    os.environ["DS_ACCELERATOR"] = "cuda" if backend == "nccl" else "cpu"  # else what DeepSpeed was installed on
    import deepspeed

    # else it compiles an extension in ~/.cache, where a killed run's lock stops every later one
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend)


def spread(model: Any, way: str, layers: Iterable[Any], optimizer: Any, **options: Any) -> Any:
    """Distribute the model by ``way``: ddp, fsdp2, or zero3 with these options of DeepSpeed's."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "zero3":
        import deepspeed

        return deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO3 | options)[0]
    return sharded(model, layers, "cpu")


def sharded(model: Any, layers: Iterable[Any], device: str) -> Any:
    """Shard the model with FSDP2, each of the layers separately."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
    for each in (*layers, model):
        fully_shard(each, mesh=mesh)
    return model
