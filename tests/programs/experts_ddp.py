"""LoRA on packed experts under DDP: the gradient of two processes is the mean of theirs."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tiny_experts import adapters_of, ids_of, model_of, with_lora

import nf4_patch


def loss(model, rank):
    ids = (ids_of() + rank) % 96
    return model(input_ids=ids, labels=ids).loss


def worker(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    nf4_patch.enable(experts="4bit")
    alone = []
    for each in range(2):
        model = with_lora(model_of("qwen3", torch.float32, lora=False))
        loss(model, each).backward()
        alone.append({name: p.grad for name, p in adapters_of(model).items()})
    model.zero_grad()
    parallel = DistributedDataParallel(model)
    for _ in range(2):  # the second fails where a parameter got no gradient in the first
        model.zero_grad()
        loss(parallel, rank).backward()
    for name, parameter in adapters_of(model).items():
        mean = (alone[0][name] + alone[1][name]) / 2
        assert mean.any() and torch.allclose(parameter.grad, mean, rtol=1e-4, atol=1e-9), name
    print("the mean", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (os.path.join(folder, "store"),), nprocs=2, start_method="fork")
