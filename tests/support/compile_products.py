"""Compile the fused product of every row of the table and print "arch registers stack shared name" a line.

A process of its own, because the tests' process may hold Triton's interpreter.
"""

from __future__ import annotations

from nf4_patch.nf4.matmul import backward as matmul_dx
from nf4_patch.nf4.matmul import launch as matmul
from nf4_patch.tools.sass.machine_code import fused_matmul_code


def compile_for(arch, name, config, cut):
    code = fused_matmul_code(cut.text, config.along_n * config.along_k, divmod(arch, 10), cut.cluster)
    print(arch, code.registers, code.stack, code.shared, f"{name}-{'-'.join(map(str, config))}")


def forward(arch, config, m, n, k, half, nested, bias):
    cut = matmul.plan(config, 132, m, n, k, half, nested, bias, divmod(arch, 10))
    compile_for(arch, f"x:{m}x{n}x{k}:{half:d}{nested:d}{bias:d}", config, cut)


def backward(arch, config, m, n, k, half, nested):
    cut = matmul_dx.plan(config, 132, m, n, k, half, nested)
    compile_for(arch, f"dx:{m}x{n}x{k}:{half:d}{nested:d}", config, cut)


def rows_of(m):
    """Rows of X, one of each tile count that a table's row for up to m serves."""
    return {8: (8,), 16: (16,), 32: (24, 32), 64: (24, 32, 48, 64)}[m]


for row in matmul.ROWS:
    k = 4096 if row.k == 4096 else 14336
    n = max(row.n, 4096)
    for m in rows_of(row.m):
        forward(90, row.config, m, n, k, half=False, nested=True, bias=False)
        forward(90, row.config, m, n, k - 64, half=True, nested=False, bias=True)
for row in matmul.ROWS[1], matmul.ROWS[-1]:
    for arch in (80, 86, 89, 100, 120):
        forward(arch, row.config, row.m, 4096, 14336, half=False, nested=True, bias=False)
for row in matmul.CANDIDATES:
    arch = 10 * row.capability[0] + row.capability[1]
    for m in (count * 8 for count in matmul.TILE_COUNTS if count * 8 <= row.m):
        forward(arch, row.config, m, 4096, 14336, half=True, nested=True, bias=False)
        forward(arch, row.config, m, 1000, 14336 - 64, half=True, nested=False, bias=True)  # slices, a tail of K
        forward(arch, row.config, m, 1000, 512, half=True, nested=True, bias=True)  # one chunk a warp
for row in matmul_dx.ROWS:
    for m in rows_of(row.m):
        backward(90, row.config, m, 14336, 4096, half=False, nested=True)  # slices of N
        backward(90, row.config, m, 4090, 65536, half=True, nested=False)  # a tail of N
for row in matmul_dx.ROWS[0], matmul_dx.ROWS[-1]:
    for arch in (80, 86, 89, 100, 120):
        config = row.config if arch >= 90 else row.config._replace(cluster=1)
        backward(arch, config, row.m, 14336, 4096, half=False, nested=True)
