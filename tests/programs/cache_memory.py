"""The cache counts at least the memory that the allocator takes, with different settings of PYTORCH_CUDA_ALLOC_CONF."""

import bitsandbytes as bnb
import torch

import nf4_patch
from nf4_patch.cache.store import cache

nf4_patch.enable(cache="40GiB")
first, kept = True, []
sizes = [(64, 64), (1024, 1024), (2048, 5632), (4096, 4096), (4096, 14336), (5000, 5000), (8192, 9000)]
junk = [torch.empty(size * 2**20, dtype=torch.uint8, device="cuda") for size in (30, 90, 170, 250)]
del junk  # blocks of other sizes, to be split or not
for rows, columns in [(64, 64), *sizes]:
    layer = bnb.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).cuda()
    kept.append(layer)
    x = torch.randn(2048, columns, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    before, counted = torch.cuda.memory_allocated(), cache.taken[0]
    y = layer(x)
    del y
    taken, counted = torch.cuda.memory_allocated() - before, cache.taken[0] - counted
    if first:  # the first product takes a workspace of cuBLAS
        first = False
        continue
    assert 0 < 2 * rows * columns <= taken <= counted, (rows, columns, taken, counted)
    print(rows, columns, taken, counted)
before, counted = torch.cuda.memory_allocated(), cache.taken[0]
nf4_patch.release()
assert 0 < before - torch.cuda.memory_allocated() <= counted
