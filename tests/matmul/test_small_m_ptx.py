"""The PTX of the fused matmul, run without a GPU: it has the bits of its emulation and of dequantize, no race and no
stray access.
"""

from __future__ import annotations

import matmul_reference
import pytest
import torch
from matmul_emulation import in_order
from oracle import layout_of, quantized
from ptx_simulator import launch

from nf4_patch.matmul import small_m, small_m_ptx
from nf4_patch.matmul.tuning import SMALL_M_ROWS, SmallMConfig
from nf4_patch.nf4.dequantize import reference

T4, A100, H200 = (7, 5), (8, 0), (9, 0)
PROCESSORS = 3  # of an imagined GPU: the smallest weights still split K

# (config, M, N, K, blocksize, nested, quant_type, bias): both widths of a load, X in registers and not, every split
# of warps, one and two rounds of sums, with tails of M, N and K.
CASES = (
    (SmallMConfig(1, 1, 8, True, 1), 1, 40, 2048, 64, True, "nf4", False),
    (SmallMConfig(1, 1, 4, True, 2), 8, 53, 1344, 64, True, "fp4", True),
    (SmallMConfig(2, 1, 4, True, 1, prefetch_depth=2), 5, 70, 1280, 128, False, "nf4", False),
    (SmallMConfig(1, 2, 4, False, 1), 13, 50, 1088, 64, True, "nf4", True),
    (SmallMConfig(2, 2, 2, False, 1, split_k=True), 20, 60, 832, 64, False, "fp4", True),
    (SmallMConfig(1, 4, 1, False, 1), 30, 67, 320, 64, True, "nf4", False),
    (SmallMConfig(2, 1, 8, False, 1), 64, 33, 512, 256, True, "nf4", False),
    (SmallMConfig(1, 1, 2, True, 1), 3, 19, 320, 256, True, "nf4", False),  # a block spans two rows
    (SmallMConfig(1, 2, 2, True, 1), 7, 40, 1024, 32, True, "nf4", True),
    (SmallMConfig(2, 1, 2, False, 1, prefetch_depth=2), 3, 33, 832, 32, False, "fp4", False),
    (SmallMConfig(1, 1, 4, True, 1), 4, 21, 608, 64, True, "nf4", False),  # K is no multiple of 64,
    (SmallMConfig(2, 1, 2, True, 1, split_k=True), 9, 30, 848, 64, True, "nf4", False),  # or of 32
)


def execute(x, layout, config, bias=None, capability=T4):
    """Return the result of what matmul_4bit launches, on the CPU, and split_k."""
    (m, k), n, offset = x.shape, layout.shape[0], layout.offset_dtype()
    half, step = x.dtype is torch.float16, layout.step()
    cut = small_m.plan(config, PROCESSORS, m, n, k, half, offset, bias is not None, capability, step)
    parts = launch(cut, x, layout, bias)
    if cut.split_k == 1:
        return parts[0], 1
    total = sum(parts[1:], parts[0])
    return (total if bias is None else total + bias.float()).to(x.dtype), cut.split_k


def has_the_bits_of_its_emulation(x, layout, config, bias, capability):
    """Check that the result has the bits of the emulation. Return the result, the weight and split_k."""
    got, split_k = execute(x, layout, config, bias, capability)
    weight, depth = reference.dequantize(layout, False), small_m_ptx.DIALECTS[capability].mma_k
    assert torch.equal(got, in_order(x, weight, config, split_k, bias, depth, layout.step()))
    return got, weight, split_k


DIALECTS = {
    T4: torch.float16,
    H200: torch.bfloat16,
    A100: torch.float16,
}  # sm_80 is sm_90 but for the wait of a barrier


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("case", "capability"),
    [  # in each run every second case for one GPU: the seconds of a simulation add up
        pytest.param(case, capability, marks=() if number % 2 and place == number // 2 % 2 else pytest.mark.full, id=f"{number}-sm_{a}{b}")
        for number, case in enumerate(CASES) for place, capability in enumerate(DIALECTS) for a, b in [capability]
    ],
)  # fmt: skip
def test_it_computes_the_matmul(case, capability):
    dtype = DIALECTS[capability]
    config, m, n, k, blocksize, nested, quant_type, with_bias = case
    layout = layout_of(*quantized((n, k), dtype, "cpu", blocksize, nested, quant_type))
    generator = torch.Generator().manual_seed(0)
    x, columns = torch.randn(m, k, generator=generator).to(dtype), torch.randperm(k, generator=generator)
    bias = torch.randn(n, generator=generator).to(dtype) if with_bias else None
    hot = range(m // 2)  # rows with a single 1: a column of the weight, to the bit
    for row in hot:
        x[row] = torch.nn.functional.one_hot(columns[row], k)
    got, weight, split_k = has_the_bits_of_its_emulation(x, layout, config, bias, capability)
    assert (split_k > 1) == config.split_k
    assert torch.equal(got[hot], weight[:, columns[hot]].t() + (0 if bias is None else bias))
    x, got = x[len(hot) :], got[len(hot) :]
    truth = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert (got - truth).norm() <= 1.01 * (matmul_reference.matmul(x, layout, bias) - truth).norm()


@pytest.mark.parametrize("row", SMALL_M_ROWS, ids=lambda row: "-".join(map(str, (row.max_m, *row.config))))
@pytest.mark.full
def test_every_row_of_the_table(row):
    """Run the config with its most rows of X on an H200. The weight has few rows, and K exceeds one round of the warps."""
    n, k = 5 * row.config.block_n // 2, 2368 if row.config.warps_k == 8 else 1088
    x = torch.randn(row.max_m, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    has_the_bits_of_its_emulation(x, layout_of(*quantized((n, k), torch.bfloat16, "cpu")), row.config, None, H200)


@pytest.mark.every(2)
@pytest.mark.parametrize("offset", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [T4, H200])
def test_an_offset_of_16_bits(offset, capability):
    layout = layout_of(*quantized((20, 1344), torch.float16, "cpu"))
    layout = layout._replace(offset=layout.offset.to(offset))
    x = torch.randn(8, 1344, generator=torch.Generator().manual_seed(0)).half()
    has_the_bits_of_its_emulation(x, layout, CASES[1][0], None, capability)
