"""Packed experts in host memory in two processes under DDP: losses and adapters of the resident model's steps, to the
bit. torchrun ...

NCCL with GPUs, gloo without, where CUDA is played by CPU tensors.
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
from offloaded import in_host, model_of, same_steps, train
from tiny_experts import adapters_of, ids_of, random_model, saved, with_lora

import nf4_patch
from nf4_patch.offload import host_memory

rank, gpu = int(os.environ["RANK"]), torch.cuda.is_available()
device = tiny_experts.DEVICE = torch.device("cuda", rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
else:
    host_memory.cuda = Cuda()
STEPS = 5 if gpu else 2
SIZES = {"hidden_size": 512, "num_experts": 32} if gpu else {}
folder = tempfile.mkdtemp()
saved(random_model("qwen3", num_hidden_layers=4, **SIZES), folder)  # before there is a process group
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)


def steps(where):
    model = with_lora(model_of(folder, where))
    assert all(bool(unit) == (where == "all") for unit in in_host(model).values())
    parallel = functools.partial(DistributedDataParallel, device_ids=[rank] if gpu else None)
    ids = (ids_of() + 5 * rank) % 96  # each has tokens of its own
    return train(model, STEPS, {"use_reentrant": False}, ids=ids, parallel=parallel)


want, found = steps("off"), steps("all")
assert same_steps(found, want) and want[0].isfinite().all() and want[0][0] != want[0][-1]
print(f"the steps of the resident model, {nf4_patch.status().offload}", flush=True)
dist.barrier()
dist.destroy_process_group()
