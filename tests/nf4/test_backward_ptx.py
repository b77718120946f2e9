"""The text of the backward product, executed without a GPU: right numbers, dequantize's bits, no race, no stray access."""

from __future__ import annotations

import pytest
import torch
from oracle import layout_of, quantized
from ptx_simulator import launch

from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.matmul import backward as matmul_dx
from nf4_patch.nf4.matmul.backward import Config

PROCESSORS = 4  # of an imagined GPU: enough for two slices of the smallest weights

# (config, M, N, K, blocksize, dtype, nested, quant_type): every width of a load, depth, split of warps and way to add up,
# with tails of M, of N in a step and of K in a warp's and a program's columns.
CASES = (
    (Config(1, 4, 1, 1), 8, 32, 64, 64, torch.bfloat16, True, "nf4"),
    (Config(1, 8, 2, 2, ahead=2), 5, 160, 192, 64, torch.float16, True, "nf4"),
    (Config(2, 4, 1, 2), 8, 100, 256, 128, torch.bfloat16, False, "fp4"),
    (Config(2, 8, 2, 4), 12, 250, 320, 64, torch.bfloat16, True, "fp4"),
    (Config(4, 8, 1, 8), 3, 97, 448, 64, torch.float16, False, "nf4"),
    (Config(4, 4, 1, 8, cluster=2), 8, 300, 256, 256, torch.bfloat16, True, "nf4"),
    (Config(4, 8, 1, 2, resident=2, cluster=4), 7, 300, 320, 64, torch.bfloat16, True, "nf4"),
    (Config(1, 8, 1, 16, ahead=2, cluster=2), 16, 1030, 64, 64, torch.float16, True, "nf4"),
    (Config(1, 8, 2, 4, cluster=2), 61, 260, 192, 64, torch.bfloat16, True, "nf4"),
    (Config(2, 8, 2, 4, cluster=2), 32, 288, 256, 64, torch.float16, False, "fp4"),
    (Config(1, 8, 4, 4), 24, 260, 256, 64, torch.bfloat16, True, "nf4"),
)


def execute(dy, layout, config):
    """What matmul_4bit_dx launches, on the CPU."""
    (m, n), k, nested = dy.shape, layout.shape[1], layout.nested()
    cut = matmul_dx.plan(config, PROCESSORS, m, n, k, dy.dtype is torch.float16, nested)
    padded = torch.nn.functional.pad(dy, (0, -n % 32))
    parts = launch(cut, config.along_k * config.along_n, padded, layout, m, k)
    return parts.float().sum(0).to(dy.dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[0])))
def test_the_text_computes_dx(case):
    config, m, n, k, blocksize, dtype, nested, quant_type = case
    packed, state = quantized((n, k), dtype, "cpu", blocksize, nested, quant_type)
    layout = layout_of(packed, state)
    weight = reference.dequantize(layout, False)
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(m, n, generator=generator).to(dtype)
    truth = dy.double() @ weight.double()
    got, plain = execute(dy, layout, config), matmul_dx.matmul_dx_reference(dy, layout)
    assert (got - truth).norm() <= 1.01 * (plain - truth).norm()
    rows = torch.randperm(n, generator=generator)[:m]
    assert torch.equal(execute(torch.eye(n, dtype=dtype)[rows], layout, config), weight[rows])


@pytest.mark.parametrize("row", matmul_dx.ROWS, ids=lambda row: "-".join(map(str, (row.m, *row.config))))
def test_the_text_of_every_row_of_the_table(row):
    """What an H200 runs, at its most rows of dY, with tails of N and of K in a program's columns: dequantize's bits."""
    n, k = 12 * row.config.depth * row.config.along_n // 2 + 5, 64 * (row.config.words * row.config.along_k + 1)
    packed, state = quantized((n, k), torch.bfloat16, "cpu")
    layout = layout_of(packed, state)
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: row.m]
    dy = torch.zeros(row.m, n, dtype=torch.bfloat16)
    dy[torch.arange(len(rows)), rows] = 1
    assert torch.equal(execute(dy, layout, row.config)[: len(rows)], reference.dequantize(layout, False)[rows])
