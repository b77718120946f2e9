"""The kernels of lora/, compared with their reference: at least as accurate as fp32, for every shape, address and stride."""

from __future__ import annotations

import pytest
import torch

from benchmarks.products import error
from nf4_patch.lora import launch, reference

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(160, 128, 16), (37, 192, 5), (130, 80, 64), (5, 48, 100), (1, 16, 1)]


def matrices(device, rows, width, rank, wide):
    torch.manual_seed(rows)
    x = torch.randn(rows, width, device=device).to(BF16)
    inner = torch.randn(rows, rank, device=device)
    return x, inner, torch.randn(*((rank, width) if wide else (width, rank)), device=device)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_long_sums_are_as_accurate_as_in_fp32(device, rows, width, rank, wide):
    x, inner, factor = matrices(device, rows, width, rank, wide)
    for name, arguments in (("project", (x, factor, wide)), ("correlate", (x, inner, wide, 1.5))):
        found, formula = getattr(launch, name)(*arguments), getattr(reference, name)
        want = formula(*arguments)
        assert found.dtype is FP32 and found.shape == want.shape
        assert error(found, want) <= max(error(formula(*arguments, FP32), want), 1.2e-7)


@pytest.mark.every(2)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_expand_rounds_once_and_writes_to_no_argument(device, rows, width, rank, wide):
    x, inner, factor = matrices(device, rows, width, rank, wide)
    before, largest = x.clone(), reference.expand(inner.abs(), factor.abs(), wide, 1.0, x.abs())
    for addend in (None, x):
        found, want = (each.expand(inner, factor, wide, 1.5, addend) for each in (launch, reference))
        # half a unit in the last of 8 bits, and the error of fp32 sums in which large numbers cancel
        bound = want.abs() * 2**-8 * 1.001 + 2**-15 * largest
        assert found.dtype is BF16 and ((found.double() - want).abs() <= bound).all()
    assert torch.equal(x, before)


def test_addresses_and_strides(device):
    """Tensors that are not 16-byte aligned, or not contiguous, give the same bits."""
    x, inner, factor = matrices(device, 70, 96, 8, True)
    want = (
        launch.project(x, factor, True),
        launch.correlate(x, inner, True, 1.0),
        launch.expand(inner, factor, True, 1, x),
    )
    shifted = torch.empty(x.numel() + 1, dtype=BF16, device=device)[1:].view(70, 96).copy_(x)
    across = x.t().contiguous().t()
    for other in (shifted, across):
        assert torch.equal(launch.project(other, factor.t().contiguous().t(), True), want[0])
        assert torch.equal(launch.correlate(other, inner, True, 1.0), want[1])
        assert torch.equal(launch.expand(inner, factor, True, 1, other), want[2])


@pytest.mark.full
def test_every_run_gives_the_same_bits(device):
    x, inner, factor = matrices(device, 512, 256, 16, True)
    first = launch.project(x, factor, True), launch.correlate(x, inner, True, 1.0)
    for _ in range(3):
        assert torch.equal(launch.project(x, factor, True), first[0])
        assert torch.equal(launch.correlate(x, inner, True, 1.0), first[1])
