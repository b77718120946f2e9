"""The kernel has the bits of bitsandbytes. It is interpreted without a GPU, and compiled with one."""

from __future__ import annotations

import itertools
import math

import bitsandbytes.functional as F
import pytest
import torch
from oracle import DTYPES, every_pair, expected, layout_of, quantized

from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import compilation, launch, reference
from nf4_patch.nf4.weight import BLOCKSIZES, PackedWeight
from nf4_patch.patching import op
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason

pytestmark = pytest.mark.usefixtures("every_launch_interpreted")
SHAPES = [(256, 128), (64, 4096), (5,), (1, 1), (3, 7, 64), (2, 3, 5, 11), (129, 8), (4097,), (33, 77)]


def poisoned(layout: PackedWeight) -> torch.Tensor:
    return torch.full(tuple(layout.shape), math.nan, dtype=layout.dtype, device=layout.packed.device)


def check(packed: torch.Tensor, state: F.QuantState) -> None:
    """Check that kernel and reference give bitsandbytes' numbers, and that every element was written."""
    layout = layout_of(packed, state)
    want = expected(packed, state)
    upright = want.t() if layout.transposed() else want
    got = launch.dequantize(layout, out=poisoned(layout))
    assert got.dtype is want.dtype
    assert torch.equal(got, upright)
    assert torch.equal(reference.dequantize(layout), want)
    if packed.is_cuda:  # signs of zero too: the CPU library gives FP4's minus zero the other sign
        assert runtime.same_bits(got, upright)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", [32, 64, 512])
def test_every_absmax_byte_with_every_packed_byte(dtype, blocksize, device):
    check(*every_pair(dtype, device, blocksize))


# A blocksize changes a shift alone, and tools/test_fuzz.py meets each with every dtype.
QUICK = [(True, torch.bfloat16, 64), (False, torch.float16, 64), (False, torch.float32, BLOCKSIZES[0])]
LAYOUTS = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
    for case in itertools.product((True, False), DTYPES, BLOCKSIZES)
]


@pytest.mark.full
@pytest.mark.parametrize(("nested", "dtype", "blocksize"), LAYOUTS, ids=str)
def test_layouts(dtype, blocksize, nested, device):
    for i, shape in enumerate(SHAPES + SHAPES[:1]):  # another table is another tensor: with each of the shapes one
        packed, state = quantized(shape, dtype, device, blocksize, nested, ("nf4", "fp4")[i % 2])
        check(packed, state)
    assert torch.equal(op.dequantize(*layout_of(packed, state)), expected(packed, state))


@pytest.mark.parametrize("blocksize2", [1, 2, 16, 256, 4096])
def test_second_level_blocksizes(blocksize2, device):
    """bitsandbytes makes only blocks of 256. The layout allows every power of two."""
    packed, state = quantized((256, 512), torch.float16, device)
    blocks = state.absmax.numel()
    layout = layout_of(packed, state)._replace(
        absmax2=torch.linspace(0.1, 2.3, -(-blocks // blocksize2), device=device), blocksize2=blocksize2
    )
    assert torch.equal(launch.dequantize(layout, out=poisoned(layout)), reference.dequantize(layout))


SPECIAL = [0.0, -0.0, 1e-38, 1e-39, 1e-45, 3e-38, math.inf, -math.inf, math.nan, 3e38, 65504.0, 7e4, 6e-8, 2e-40]


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("offset", [0.0, 1e-39, math.inf])
def test_special_scales(dtype, nested, offset, device):
    """Try zeros, infinities, NaN, overflow, and subnormals, which the CPU library keeps and the CUDA library flushes."""
    packed, state = quantized((512, 256), dtype, device, nested=nested)
    values = torch.tensor(SPECIAL, device=device)
    if dtype is torch.bfloat16 and device.type == "cpu":  # the CPU's own bf16 convert (AVX512-BF16) drops subnormals
        values = values[(values == 0) | (values.abs() > 1e-30) | values.isnan()]
        offset = 0.0 if offset < 1e-30 else offset
    if nested:
        state.state2.absmax = values.repeat(8)[: state.state2.absmax.numel()].contiguous()
        state.offset = torch.tensor(offset, device=device)
    else:
        state.absmax = values.repeat(1000)[: state.absmax.numel()].contiguous()
    want = expected(packed, state)
    layout = layout_of(packed, state)
    assert runtime.same_bits(launch.dequantize(layout, out=poisoned(layout)), want)
    assert runtime.same_bits(reference.dequantize(layout), want)


@pytest.mark.parametrize(("even", "tail"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("offset", [None, torch.float32], ids=["flat", "nested"])
def test_what_the_first_use_is_checked_on(even, tail, offset, device):
    """The sample has every value of both codes.

    FP4's two zeros are also among the last elements, which another code path may decode.
    """
    variant = compilation.Variant(8, torch.bfloat16, offset, even=even, tail=tail)
    sample = compilation.sample_weight(variant, compilation.elements_of(variant), device)
    assert sample.numel() % 8 == (3 if tail else 0)
    packed = sample.bytes().long()
    nibbles = torch.stack((packed >> 4, packed & 15), 1).view(-1)[: sample.numel()]
    assert nibbles.unique().numel() == 16 and {0, 8} <= set(nibbles[-3:].tolist())
    dense = reference.dense(sample._replace(quant_type="fp4"), flush_subnormals=True)
    scales = reference.block_scales(sample, True).repeat_interleave(sample.blocksize)[: sample.numel()]
    zero = (nibbles & 7 == 0) & (scales != 0)
    assert torch.equal(torch.signbit(dense[zero]), (nibbles[zero] == 8) != torch.signbit(scales[zero]))


def test_same_bits_sees_one_bit(device):
    a = torch.randn(1000, device=device).half()
    b = a.clone()
    b.view(torch.int16)[617] ^= 1
    assert runtime.same_bits(a, a.clone())
    assert not runtime.same_bits(a, b)
    assert not runtime.same_bits(torch.zeros(1, device=device), -torch.zeros(1, device=device))
    assert runtime.same_bits(torch.tensor([math.nan], device=device), torch.tensor([-math.nan], device=device))


def test_op_is_well_formed(device):
    packed, state = quantized((64, 128), torch.bfloat16, device)
    torch.library.opcheck(
        torch.ops.nf4_patch.dequantize_nf4,
        tuple(layout_of(packed, state)),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_a_packed_weight_off_16_bytes(device, monkeypatch):
    """The kernel runs if the weight is 4-byte aligned. If it is not, the op reads a copy, and a replacement calls the original."""
    monkeypatch.setattr(runtime, "WORD", 4)  # as on a GPU
    packed, state = quantized((64, 256), torch.float16, device)
    want = expected(packed, state)
    server = Dequantizer("test")
    holder = torch.zeros(packed.numel() + 64, dtype=torch.uint8, device=device)
    for start in (0, 4, 8, 12, 16, 20):
        view = holder[start : start + packed.numel()].view(-1, 1).copy_(packed)
        assert torch.equal(server.of_state(view, state), want), start
    view = holder[1 : 1 + packed.numel()].view(-1, 1).copy_(packed)
    assert server.of_state(view, state) is Reason.MISALIGNED
    assert torch.equal(launch.dequantize(layout_of(view, state)), want)
