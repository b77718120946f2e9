"""Compile the fused matmul for every row of the tables, and print "arch registers stack shared name", one per line.

This runs in a separate process, because the tests' process may hold Triton's interpreter.
"""

from __future__ import annotations

import itertools

import matmul_elsewhere
import torch

from nf4_patch.matmul import small_m
from nf4_patch.matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS, TILE_COUNTS


def compile_for(arch, config, m, n, k, half, bias, offset=torch.float32, step=64):
    capability = divmod(arch, 10)
    cut = small_m.plan(config, 132, m, n, k, half, offset, bias, capability, step)
    code = matmul_elsewhere.code_of(cut, capability)
    name = f"x:{m}x{n}x{k}:{half:d}:{offset}:{bias:d}:{step}-{'-'.join(map(str, config))}"
    print(arch, code.registers, code.stack, code.shared, name)


def rows_of(m):
    """Return one number of rows of X for each tile count that a table's row for up to m rows serves."""
    return {8: (8,), 16: (16,), 64: (24, 32, 48, 64)}[m]


for row in SMALL_M_ROWS:
    k = 4096 if row.max_k == 4096 else 14336
    n = max(row.min_n, 4096)
    for m in rows_of(row.max_m):
        compile_for(90, row.config, m, n, k, half=False, bias=False)
        compile_for(90, row.config, m, n, k - 64, half=True, bias=True, offset=None)
        for step in (32, 16):
            compile_for(90, row.config, m, n, k - step, half=False, bias=True, step=step)
for row, arch in itertools.product((SMALL_M_ROWS[0], SMALL_M_CANDIDATES[0]), (75, 80, 90)):
    for offset in (torch.float16, torch.bfloat16):
        compile_for(arch, row.config, 8, 4096, 4096, half=True, bias=False, offset=offset)
for row in SMALL_M_ROWS[1], SMALL_M_ROWS[-2]:
    for arch in (80, 86, 89, 100, 120):
        compile_for(arch, row.config, row.max_m, 4096, 14336, half=False, bias=False)
for row in SMALL_M_CANDIDATES:
    arch = 10 * row.capability[0] + row.capability[1]
    for m in (count * 8 for count in TILE_COUNTS if count * 8 <= row.max_m):
        compile_for(arch, row.config, m, 4096, 14336, half=True, bias=False)
        compile_for(arch, row.config, m, 1000, 14336 - 64, half=True, bias=True, offset=None)  # K split, with a tail
        compile_for(arch, row.config, m, 1000, 512, half=True, bias=True)  # one chunk a warp
