"""The kernels of moe/ and their autograd functions, compared with the reference, and compiled for every GPU."""

from __future__ import annotations

import machine_code
import pytest
import torch
from subprocess_python import support

from nf4_patch.moe import launch, reference
from nf4_patch.moe.forward import Combined, Gated, Gathered, Order, Weighted

TOKENS, TOP_K, EXPERTS = 5, 3, 7
CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Triton's interpreter truncates to bf16
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * torch.cuda.is_available()]


@pytest.fixture(autouse=True)
def poisoned():
    """Fill new memory of PyTorch with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape).to(device, dtype).requires_grad_()


def order(device, tokens=TOKENS) -> Order:
    """Return a random Order in which expert 2 gets no token."""
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(tokens)]) if tokens else torch.empty(0, TOP_K)
    return Order.of((ids + (ids >= 2)).long().to(device), EXPERTS)


def test_order(device):
    found = order(device)
    assert torch.equal(found.slot_of[found.row_of.view(-1)].cpu(), torch.arange(TOKENS * TOP_K))
    counts = torch.bincount(found.expert_of, minlength=EXPERTS)
    assert (
        counts[2] == 0
        and torch.equal(found.ends.cpu(), counts.cumsum(0).int().cpu())
        and found.ends[-1] == TOKENS * TOP_K
    )
    for token in range(TOKENS):  # a token's slots in the order of its experts
        assert torch.equal(found.slot_of[found.row_of[token]].cpu(), torch.arange(TOP_K) + token * TOP_K)


def close(got, exact, dtype):
    assert got.dtype is exact.dtype and got.shape == exact.shape
    return bool((got - exact).norm() <= CLOSE[dtype] * exact.norm())


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "width", [77, pytest.param(1, marks=pytest.mark.full), pytest.param(1040, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels(dtype, width, device):
    """Try every kernel with and without an addend, and with tensors that are not 16-byte aligned."""
    where, count = order(device), TOKENS * TOP_K
    spare = torch.randn(1 + count * width).to(device, dtype)
    rows, gradient, addend = (torch.randn(count, width).to(device, dtype) for _ in range(3))
    weights = torch.rand(TOKENS, TOP_K, device=device)
    pairs = torch.randn(count, 2 * width).to(device, dtype)
    for each, other in ((rows, None), (spare[1:].view(count, width), addend)):
        arguments = each, where.row_of, torch.float32
        for weight in (None, weights):
            assert close(*(at.combine(*arguments, weight, other) for at in (launch, reference)), torch.float32)
        arguments = gradient, other, each, where.slot_of, weights
        found, want = (at.weigh(*arguments, True) for at in (launch, reference))
        assert close(found[0], want[0], dtype) and close(found[1], want[1], dtype)
        assert launch.weigh(*arguments, False)[1] is None
    for other in (None, pairs.flip(0)):
        found, want = (at.silu_and_mul(pairs, other) for at in (launch, reference))
        assert close(found[0], want[0], dtype) and close(found[1], want[1], dtype)
    assert close(*(at.silu_and_mul_backward(pairs, gradient) for at in (launch, reference)), dtype)


def same(function, formula, *inputs, dtype):
    """Compare results and gradients of an autograd function with those of a formula in PyTorch."""
    out, want = function(*inputs), formula(*inputs)
    assert out.dtype is want.dtype and out.shape == want.shape
    gradient = torch.randn_like(want)
    wanted = [each for each in inputs if each is not None and each.requires_grad]
    found, expected = torch.autograd.grad(out, wanted, gradient), torch.autograd.grad(want, wanted, gradient)
    for got, exact in zip((out, *found), (want, *expected), strict=True):
        assert close(got, exact, dtype)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("width", "adds"),
    [
        (77, False),
        (77, True),
        pytest.param(1, True, marks=pytest.mark.full),
        pytest.param(1030, True, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_functions(dtype, width, adds, device):
    where = order(device).for_backward(True)
    tokens = where.slot_of // TOP_K
    hidden = random(TOKENS, width, device=device)
    same(lambda x: Gathered.apply(x, where, dtype), lambda x: x.to(dtype)[tokens], hidden, dtype=dtype)

    rows, addend = (random(TOKENS * TOP_K, 2 * width, dtype=dtype, device=device) for _ in range(2))
    addend = addend if adds else None

    same(
        lambda rows, addend: Gated.apply(rows, addend)[0],
        lambda *each: reference.silu_and_mul(*each)[0],
        rows,
        addend,
        dtype=dtype,
    )

    weights = random(TOKENS, TOP_K, device=device)

    def combined(rows, addend, weights):
        return reference.combine(rows, where.row_of, torch.float32, weights, addend)

    def ours(rows, addend, weights):
        rows, _ = Weighted.apply(rows, weights, where)
        return Combined.apply(rows, addend, weights.detach(), where, where.saved, torch.float32)

    same(ours, combined, rows, addend, weights, dtype=dtype)


def test_no_tokens(device):
    rows, where = torch.empty(0, 8, device=device), order(device, tokens=0)
    assert launch.combine(rows, where.row_of, torch.float16).shape == (0, 8)
    assert launch.silu_and_mul(rows)[0].shape == (0, 4) and launch.silu_and_mul_backward(rows, rows[:, :4]).shape == (
        0,
        8,
    )


@pytest.mark.full
def test_every_gpu_is_compiled_for():
    """No kernel spills registers, and every kernel loads and stores 16 bytes at a time."""
    found = [line.split() for line in support("compile_routing")]
    assert {int(arch) for arch, *_ in found} == set(map(machine_code.sm, machine_code.CAPABILITIES))
    assert len(found) == 7 * 3 * 4
    for arch, dtype, kernel, registers, stack, widths in found:
        assert int(stack) == 0 and int(registers) <= 96 and widths.startswith("128"), (arch, dtype, kernel)
