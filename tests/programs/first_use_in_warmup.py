"""A process uses its first 4-bit weight in the warm-up before torch.compile captures a CUDA graph."""

import sys

import torch
from target import linear

import nf4_patch

nf4_patch.enable(cache=sys.argv[1])
layers = [linear(torch.device("cuda"), 256, 256, seed=seed) for seed in range(2)]
model = torch.compile(torch.nn.Sequential(*layers), mode="reduce-overhead")
x = torch.randn(600, 256, dtype=torch.bfloat16, device="cuda")
results = []
for _ in range(5):
    torch.compiler.cudagraph_mark_step_begin()
    mine = x.clone().requires_grad_()
    y = model(mine)
    y.sum().backward()
    results.append((y.detach().clone(), mine.grad.clone()))
nf4_patch.disable()
mine = x.clone().requires_grad_()
y = torch.nn.Sequential(*layers)(mine)
y.sum().backward()
assert all(torch.equal(a, y) and torch.equal(b, mine.grad) for a, b in results)
