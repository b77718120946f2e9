"""Products of bf16 with narrow fp32 matrices: at least as accurate as fp32's own, whatever the shape, address and strides."""

from __future__ import annotations

import pytest
import torch

from nf4_patch.lora import launch
from nf4_patch.tools.bench.matmul import error

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(160, 128, 16), (37, 192, 5), (130, 80, 64), (5, 48, 100), (1, 16, 1)]


def matrices(device, rows, width, rank, wide):
    torch.manual_seed(rows)
    x = torch.randn(rows, width, device=device).to(BF16)
    inner = torch.randn(rows, rank, device=device)
    factor = torch.randn(*((rank, width) if wide else (width, rank)), device=device)
    return x, inner, factor, factor.t() if wide else factor


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_sums_over_many_are_as_accurate_as_fp32(device, rows, width, rank, wide):
    x, inner, factor, narrow = matrices(device, rows, width, rank, wide)
    found = launch.project(x, factor, wide)
    want = x.double() @ narrow.double()
    assert found.dtype is FP32 and found.shape == (rows, rank)
    assert error(found, want) <= max(error(x.float() @ narrow, want), 1.2e-7)
    found = launch.correlate(x, inner, wide, 1.5)
    found, want = found.t() if wide else found, 1.5 * x.double().t() @ inner.double()
    assert found.dtype is FP32 and found.shape == (width, rank)
    assert error(found, want) <= max(error(1.5 * (x.float().t() @ inner), want), 1.2e-7)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_a_wide_result_is_rounded_once(device, rows, width, rank, wide):
    x, inner, factor, narrow = matrices(device, rows, width, rank, wide)
    want = 1.5 * inner.double() @ narrow.double().t()
    out = x.clone()
    assert launch.expand(inner, factor, wide, 1.5, out) is out
    for found, wanted in ((launch.expand(inner, factor, wide, 1.5, None), want), (out, x.double() + want)):
        # half a unit in the last place of 8 bits, and what fp32 sums lose where large numbers cancel
        bound = wanted.abs() * 2**-8 * 1.001 + 2**-15 * (
            inner.double().abs() @ narrow.double().abs().t() + x.double().abs()
        )
        assert found.dtype is BF16 and ((found.double() - wanted).abs() <= bound).all()


def test_addresses_and_strides(device):
    """Off 16 bytes, and not contiguous."""
    x, inner, factor, narrow = matrices(device, 70, 96, 8, True)
    want = launch.project(x, factor, True), launch.correlate(x, inner, True, 1.0)
    shifted = torch.empty(x.numel() + 1, dtype=BF16, device=device)[1:].view(70, 96).copy_(x)
    across = x.t().contiguous().t()
    for other in (shifted, across):
        assert torch.equal(launch.project(other, narrow.t().clone(), True), want[0])
        assert torch.equal(launch.correlate(other, inner, True, 1.0), want[1])


def test_the_same_at_every_run(device):
    x, inner, factor, _ = matrices(device, 512, 256, 16, True)
    first = launch.project(x, factor, True), launch.correlate(x, inner, True, 1.0)
    for _ in range(3):
        assert torch.equal(launch.project(x, factor, True), first[0])
        assert torch.equal(launch.correlate(x, inner, True, 1.0), first[1])
