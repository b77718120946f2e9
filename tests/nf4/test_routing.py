"""What surrounds the grouped products of a mixture: the kernels against PyTorch, and for every GPU through ptxas."""

from __future__ import annotations

import machine_code
import pytest
import torch
from subprocess_python import support
from torch.nn.functional import silu

from nf4_patch.moe import launch
from nf4_patch.moe.forward import Combined, Gated, Gathered, Order, Weighted

TOKENS, TOP_K, EXPERTS = 5, 3, 7
CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Triton's interpreter truncates to bf16
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * torch.cuda.is_available()]


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that PyTorch hands out is filled with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape).to(device, dtype).requires_grad_()


def order(device, tokens=TOKENS) -> Order:
    """Expert 2 gets no token."""
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


def same(function, reference, *inputs, dtype):
    """Results and gradients."""
    out, want = function(*inputs), reference(*inputs)
    assert out.dtype is want.dtype and out.shape == want.shape
    gradient = torch.randn_like(want)
    wanted = [each for each in inputs if each is not None and each.requires_grad]
    found, expected = torch.autograd.grad(out, wanted, gradient), torch.autograd.grad(want, wanted, gradient)
    for got, exact in zip((out, *found), (want, *expected), strict=True):
        assert got.dtype is exact.dtype and (got - exact).norm() <= CLOSE[dtype] * exact.norm()


@pytest.mark.parametrize(("width", "adds"), [(1, True), (77, False), (77, True), (1030, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_pytorch(dtype, width, adds, device):
    where = order(device).for_kernels()
    tokens = where.slot_of // TOP_K
    hidden = random(TOKENS, width, device=device)
    same(lambda x: Gathered.apply(x, where, dtype), lambda x: x.to(dtype)[tokens], hidden, dtype=dtype)

    rows, addend = (random(TOKENS * TOP_K, 2 * width, dtype=dtype, device=device) for _ in range(2))
    addend = addend if adds else None

    def gated(rows, addend):
        rows = rows if addend is None else rows + addend
        return (silu(rows[:, :width].float()) * rows[:, width:].float()).to(dtype)

    same(lambda rows, addend: Gated.apply(rows, addend), gated, rows, addend, dtype=dtype)

    weights = random(TOKENS, TOP_K, device=device)

    def combined(rows, addend, weights):
        total = rows[where.row_of].float() * weights[..., None]
        return (total if addend is None else total + addend[where.row_of].float()).sum(dim=1)

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
    """Nothing spills, and most is read and written 16 bytes at once."""
    found = [line.split() for line in support("compile_routing")]
    assert {int(arch) for arch, *_ in found} == set(map(machine_code.sm, machine_code.CAPABILITIES))
    assert len(found) == 7 * 3 * 4
    for arch, dtype, kernel, registers, stack, widths in found:
        assert int(stack) == 0 and int(registers) <= 96 and widths.startswith("128"), (arch, dtype, kernel)
