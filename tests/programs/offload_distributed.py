"""Packed weights in host memory in two processes under DDP: torchrun ... offload_distributed.py [auto].

Losses and adapters are bit-identical to those of the resident model. The weights are those of experts with
offload="all". With the word auto, the weights are those of a dense model with offload="auto", and each process keeps
another number of layers on its GPU. The processes use NCCL with GPUs, otherwise gloo and CPU tensors that stand in for
CUDA.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_experts
from host_memory import Cuda
from offloaded import (
    all_in_host,
    counts,
    dense_model,
    in_host,
    load_dense,
    model_of,
    same_steps,
    train,
    with_lora_on_all,
)
from tiny_experts import ids_of, random_model, saved, with_lora

import nf4_patch
from nf4_patch.memory import spare as memory
from nf4_patch.nf4 import runtime
from nf4_patch.offload import host_memory, prefetch

rank, gpu = int(os.environ["RANK"]), torch.cuda.is_available()
device = tiny_experts.DEVICE = torch.device("cuda", rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
else:
    host_memory.cuda = Cuda()
AUTO, LAYERS = sys.argv[1:] == ["auto"], 4
STEPS = 5 if gpu or AUTO else 2
SIZES = {"hidden_size": 512, "num_experts": 32} if gpu else {}
folder = tempfile.mkdtemp()
model = dense_model(LAYERS) if AUTO else random_model("qwen3", num_hidden_layers=LAYERS, **SIZES)
saved(model, folder)  # before there is a process group
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)


def experts(where):
    model = with_lora(model_of(folder, where))
    assert all(bool(unit) == (where == "all") for unit in in_host(model).values())
    return model


def dense(where):
    nf4_patch.enable(offload="off" if where == "off" else "auto", lora="fused")
    torch.manual_seed(0)
    model = with_lora_on_all(load_dense(folder))
    assert all_in_host(model) == (where != "off")
    return model


def room(device):
    """Give rank 0 room for two layers, and rank 1 for all layers."""
    taken, margin, size = prefetch.taken[device], 2**26, max((block.size for block in host_memory.living()), default=0)
    return memory.MemoryInfo((LAYERS if rank else 2) * size + margin - taken, 2**30 + taken, 2**30, margin)


if AUTO and not gpu:
    memory.MemoryInfo.of, memory.SECONDS = room, 0
    runtime.devices_in_use, runtime.empty_cache, runtime.allocation_retries = (
        lambda: [-1],
        lambda: None,
        lambda device: 0,
    )


def steps(where):
    model = dense(where) if AUTO else experts(where)
    parallel = functools.partial(DistributedDataParallel, device_ids=[rank] if gpu else None)
    ids = (ids_of() + 5 * rank) % 96  # each has tokens of its own
    found = train(model, STEPS, {"use_reentrant": False}, ids=ids, parallel=parallel)
    if AUTO and where != "off":
        assert counts().kept == (LAYERS if rank or gpu else 2), repr(counts())
    return found


want, found = steps("off"), steps("all")
assert same_steps(found, want) and want[0].isfinite().all() and want[0][0] != want[0][-1]
print(f"the steps of the resident model, {nf4_patch.status().offload}", flush=True)
dist.barrier()
dist.destroy_process_group()
