"""The two launches of the fused matmul with a LoRA adapter, without a GPU.

The PTX runs in the simulator, and the Triton kernel is interpreted.
"""

from __future__ import annotations

import matmul_reference
import pytest
import torch
from alternation import thinned
from oracle import layout_of, quantized
from ptx_simulator import Source, launch

from nf4_patch.matmul import adapter, kernels, small_m
from nf4_patch.matmul.small_m_ptx import AdapterLayout
from nf4_patch.matmul.tuning import SMALL_M_ROWS, SmallMConfig
from nf4_patch.nf4.dequantize import reference

PROCESSORS = 3  # of an imagined GPU: the smallest weights still split K

# (config, M, N, K, rank, parts, wide, bias)
CASES = (
    (SmallMConfig(1, 1, 8, True, 1), 3, 40, 2048, 16, 3, False, False),
    (SmallMConfig(1, 1, 8, True, 1), 3, 40, 2048, 8, 16, True, True),
    (SmallMConfig(2, 1, 4, True, 1, prefetch_depth=2), 8, 70, 1280, 32, 2, False, True),
    (SmallMConfig(2, 1, 8, False, 1), 33, 65, 512, 4, 5, False, False),
    (SmallMConfig(2, 1, 8, False, 1), 64, 33, 512, 32, 2, True, False),  # half the room for partial sums
    (SmallMConfig(1, 4, 1, False, 1), 30, 67, 320, 64, 1, True, False),
    (SmallMConfig(2, 2, 2, False, 1, split_k=True), 20, 60, 832, 20, 1, True, True),
)


def adapter_of(m, n, rank, parts, wide, generator):
    """Return the parts of an inner product, padded to a multiple of 16 columns, and B."""
    inner = torch.randn(parts, m, rank, generator=generator) / parts**0.5
    b = torch.randn(n, rank, generator=generator) * 0.3
    return torch.nn.functional.pad(inner, (0, -rank % 16)), b if wide else b.bfloat16()


@pytest.mark.every(2)
@pytest.mark.parametrize("case", thinned(CASES, 3), ids=lambda case: "-".join(map(str, (case[1:]))))
def test_it_adds_the_adapter(case):
    """The error against fp64 is no greater than peft's. peft rounds the base product, the adapter's product and their sum."""
    config, m, n, k, rank, parts, wide, with_bias = case
    layout = layout_of(*quantized((n, k), torch.bfloat16, "cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator).bfloat16()
    bias = torch.randn(n, generator=generator).bfloat16() if with_bias else None
    inner, b = adapter_of(m, n, rank, parts, wide, generator)
    cut = small_m.plan(
        config, PROCESSORS, m, n, k, False, layout.offset_dtype(), with_bias, (9, 0), layout.step(),
        AdapterLayout(rank, wide, parts),
    )  # fmt: skip
    assert Source(cut.ptx).shared <= 49152
    found = launch(cut, x, layout, bias, (inner, b))
    got = found[0]
    if cut.split_k > 1:
        got = sum(found[1:], found[0]) + (0 if bias is None else bias.float())
    u = inner.double().sum(0)[:, :rank]
    truth = x.double() @ reference.dequantize(layout, False).double().t() + u @ b.double().t()
    truth += 0 if bias is None else bias.double()
    base = matmul_reference.matmul(x, layout, bias)
    u = u.float() if wide else u.bfloat16()
    stock = base + (u @ b.t()).bfloat16()
    assert (got.bfloat16() - truth).norm() <= (stock - truth).norm()


@pytest.mark.every(2)
@pytest.mark.parametrize("row", SMALL_M_ROWS, ids=lambda row: "-".join(map(str, (row.max_m, *row.config))))
@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_the_table_fit_into_shared_memory(row, wide):
    """Every rank up to 32 fits at every row count, and every rank up to 64 at up to 32 rows."""
    for m, rank in ((row.max_m, 32), (min(32, row.max_m), 64)):
        layout = layout_of(*quantized((64, 512), torch.bfloat16, "cpu"))
        adapter = AdapterLayout(rank, wide, 16)
        assert adapter.sum_bytes(-(-m // 8))
        cut = small_m.plan(
            row.config, 132, m, 64, 512, False, layout.offset_dtype(), False, (9, 0), layout.step(), adapter
        )
        assert Source(cut.ptx).shared <= 49152


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs in tests/gpu/test_lora_generation.py")
@pytest.mark.parametrize(
    ("m", "k", "rank", "wide"),
    [(1, 512, 16, False), (8, 640, 8, True), (33, 784, 36, True), (64, 4096, 4, False), (5, 4112, 64, False)],
)
def test_the_inner_product(m, k, rank, wide):
    """Check every part, column and row, with a tail of K.

    Columns beyond the rank are 0, so that the second launch can read them.
    """
    from triton.runtime.interpreter import InterpretedFunction

    torch.manual_seed(0)
    x, a = torch.randn(m, k).bfloat16(), torch.randn(rank, k)
    a = a if wide else a.bfloat16()
    layout, values = adapter.layout_of(a), adapter.constants(m, k, adapter.layout_of(a))
    out = torch.full((layout.parts, m, 16 * layout.ranks), float("nan"))
    InterpretedFunction(kernels.lora_inner_kernel.fn)[layout.parts, 1, 1](x, a, out, m, 0.5, **values, DEPENDENT=False)
    want = 0.5 * x.double() @ a.double().t()
    assert (out.double().sum(0)[:, :rank] - want).norm() <= (2e-5 if wide else 1e-6) * want.norm()
    assert not out[..., rank:].any()
