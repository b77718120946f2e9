"""The fused backward product on the GPU: correct, as accurate as dequantize + matmul, deterministic, and reached by bitsandbytes' backward."""

from __future__ import annotations

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from oracle import layout_of, quantized
from test_matmul import error, exact, poison

import nf4_patch
from nf4_patch.nf4.dequantize import launch, reference
from nf4_patch.nf4.matmul import backward as matmul_dx
from nf4_patch.nf4.matmul import launch as matmul
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.stats import ledger

CUDA = torch.device("cuda", 0)
MEASURED = torch.cuda.is_available() and any(
    row.capability == torch.cuda.get_device_capability(CUDA) for row in matmul_dx.ROWS
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not MEASURED, reason="the table of backward products has no row for this GPU: it steps aside"),
]
ROWS = (1, 2, 5, 8, 9, 16, 17, 24, 31, 40, 64)

# (N, K, blocksize): tails of N in a step, of K in a warp's and a program's columns, more and fewer steps than warps.
SIZES = (
    (1024, 256, 64), (250, 320, 64), (4096, 1024, 64), (777, 4160, 64), (2048, 5120, 128), (130, 4096, 4096),
    (4416, 4096, 64), (321, 12032, 64), (96, 64, 64), (8, 512, 256), (1, 128, 64), (4096, 14336, 64),
)  # fmt: skip


def multiply(dy, layout, **kwargs):
    """With the table's config; where it has none for so small a weight, with the last that has as many rows."""
    n, k = layout.shape
    m = dy.numel() // n
    if m <= 64 and matmul_dx.config_for(torch.cuda.get_device_capability(CUDA), m, n, k) is None:
        kwargs["config"] = next(row.config for row in matmul_dx.ROWS if m <= row.m and k <= row.k)
    return matmul_dx.matmul_4bit_dx(dy, layout, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_as_accurate_as_dequantize_and_matmul(quant_type, nested, dtype):
    """Against fp64, over tails of M, N and K; the same bits at a second call. 1 %: as for the forward."""
    missed = []
    torch.manual_seed(0)
    sizes, rows = (SIZES, ROWS) if nested else (SIZES[1:8:2], ROWS[::3])  # a flat weight differs in its scales only
    for seed, (n, k, blocksize) in enumerate(sizes):
        packed, state = quantized((n, k), dtype, CUDA, blocksize, nested, quant_type, seed=seed)
        layout = layout_of(packed, state)
        truth_weight, weight = exact(layout), reference.dequantize(layout)
        for m in rows:
            dy = torch.randn(m, n, device=CUDA).to(dtype)
            truth = dy.double() @ truth_weight
            poison((m, k), (4 * m, 2 * k), dtype=dtype)
            got = multiply(dy, layout)
            again = multiply(dy, layout, out=torch.full_like(got, float("nan")))
            theirs = max(error(dy @ weight, truth), error(matmul_dx.matmul_dx_reference(dy, layout), truth))
            if not (error(got, truth) <= 1.01 * theirs and torch.equal(got, again)):
                missed.append((n, k, blocksize, m, error(got, truth), theirs, torch.equal(got, again)))
    assert not missed, missed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_one_hot_rows_return_the_bits_of_dequantize(quant_type, nested, dtype):
    """What the product multiplies by is what dequantize writes: 1 * w, plus zeros, in every lane, warp and slice."""
    for n, k in ((1003, 4096), (4096, 1024), (520, 8192)):
        packed, state = quantized((n, k), dtype, CUDA, nested=nested, quant_type=quant_type)
        layout = layout_of(packed, state)
        want = F.dequantize_4bit(packed, state)
        for m in (1, 8, 16, 32, 64):
            rows = torch.randperm(n, device=CUDA)[:m]
            dy = torch.zeros(m, n, dtype=dtype, device=CUDA)
            dy[torch.arange(m, device=CUDA), rows] = 1
            assert torch.equal(multiply(dy, layout), want[rows]), (n, k, m)


def test_refusals_are_sentences():
    packed, state = quantized((128, 256), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    dy = torch.randn(4, 128, device=CUDA, dtype=torch.bfloat16)

    def why(dy=dy, **changes):
        return matmul_dx.refusal(dy, layout._replace(**changes))

    assert why() is None
    assert why(dy=dy.cpu()) == "dY is on cpu; the kernel runs on NVIDIA GPUs"
    assert why(dy=dy.float()) == "dY is torch.float32; the kernel multiplies in float16 or bfloat16"
    assert why(blocksize=512) == "K = 256 is no multiple of the blocksize 512: a block spans two rows"
    assert why(packed=packed[4:]).endswith("not on 16 bytes")
    assert why(dy=torch.zeros(65, 128, device=CUDA, dtype=torch.bfloat16)).startswith(
        "no measured config for 65 rows on"
    )
    with pytest.raises(ValueError, match=r"matmul_4bit_dx cannot serve this: dY is torch.float32"):
        multiply(dy.float(), layout)


def test_every_number_of_rows_shares_the_compiled_text():
    packed, state = quantized((1280, 1024), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    dy = torch.randn(64, 1280, device=CUDA, dtype=torch.bfloat16)
    for count in matmul.TILE_COUNTS:
        multiply(dy[: 8 * count], layout)
    compiled = len(matmul._entries)
    weight = F.dequantize_4bit(packed, state).double()
    for m in range(1, 65):
        assert error(multiply(dy[:m], layout), dy[:m].double() @ weight) < 0.01
    assert len(matmul._entries) == compiled


def test_out_stride_and_empty_rows():
    packed, state = quantized((512, 320), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    dy = torch.randn(3, 1, 512, device=CUDA, dtype=torch.bfloat16)
    want = multiply(dy, layout)
    assert want.shape == (3, 1, 320)
    out = torch.full((4, 1, 320), float("nan"), device=CUDA, dtype=torch.bfloat16)
    assert torch.equal(multiply(dy, layout, out=out[:3]), want)
    assert out[3].isnan().all()
    wide = torch.randn(3, 1, 1024, device=CUDA, dtype=torch.bfloat16)
    wide[..., ::2] = dy
    assert torch.equal(multiply(wide[..., ::2], layout), want)
    odd = torch.empty(3 * 512 + 1, device=CUDA, dtype=torch.bfloat16)[1:].view(3, 1, 512).copy_(dy)
    assert torch.equal(multiply(odd, layout), want)
    assert multiply(dy[:0], layout).shape == (0, 1, 320)


def test_in_a_cuda_graph():
    """Compiled before: a replay follows its input with the bits of the eager call. Not compiled: refused by name."""
    packed, state = quantized((2048, 1024), torch.float16, CUDA)
    layout = layout_of(packed, state)
    static, other = torch.randn(2, 8, 2048, device=CUDA, dtype=torch.float16)
    want = multiply(other, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = multiply(static, layout)
    static.copy_(other)
    graph.replay()
    assert torch.equal(result, want)
    saved = dict(matmul._entries), dict(matmul_dx._kernels)
    matmul._entries.clear()
    matmul_dx._kernels.clear()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(launch.KernelUnavailable) as caught:
            multiply(static, layout)
        torch.zeros(1, device=CUDA)
    assert caught.value.reason == "CAPTURING"
    matmul._entries.update(saved[0])
    matmul_dx._kernels.update(saved[1])


TARGET = "bitsandbytes.autograd._functions.MatMul4Bit.backward"


def linear(n, k, dtype=torch.bfloat16, bias=False):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(k, n, bias=bias, quant_type="nf4", compute_dtype=dtype)
    layer.weight.data.normal_(std=0.02)
    return layer.to(dtype).to(CUDA)


def gradient(layer, m, dtype=torch.bfloat16):
    """dX, and the dY it came from."""
    generator = torch.Generator(device=CUDA).manual_seed(m)
    x = torch.randn(2, m, layer.in_features, device=CUDA, generator=generator).to(dtype)[:1].requires_grad_()
    dy = torch.randn(1, m, layer.out_features, device=CUDA, generator=generator).to(dtype)
    layer(x).backward(dy)
    return x.grad, dy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backward_of_linear4bit_hits_it_and_off_has_its_own_bits(auto, dtype):
    layer = linear(2048, 1024, dtype)
    truth_weight = exact(layout_of(layer.weight.data, layer.weight.quant_state))
    for m in (1, 8, 16, 32, 64):
        nf4_patch.disable()
        stock, dy = gradient(layer, m, dtype)
        nf4_patch.enable(matmul="off")
        ledger.reset()
        assert torch.equal(gradient(layer, m, dtype)[0], stock), m
        assert not ledger.hits(TARGET)
        nf4_patch.enable(matmul="auto")
        ledger.reset()
        got, _ = gradient(layer, m, dtype)
        assert ledger.hits(TARGET) == 1, (m, ledger.fallbacks)
        truth = dy.double() @ truth_weight
        assert error(got, truth) <= 1.01 * error(stock, truth), m


def test_backward_steps_aside_with_the_original_bits(auto):
    """Past 64 rows, and where a bias is trained: its own sum, its own product."""
    for layer, m, reason in ((linear(512, 1024), 200, Reason.ROWS), (linear(512, 1024, bias=True), 8, Reason.PRODUCT)):
        ledger.reset()
        got, _ = gradient(layer, m)
        assert ledger.fallbacks[TARGET, reason] == 1
        mine = None if layer.bias is None else layer.bias.grad.clone()
        nf4_patch.disable()
        layer.zero_grad()
        stock, _ = gradient(layer, m)
        assert torch.equal(got, stock)
        assert mine is None or torch.equal(mine, layer.bias.grad)
        nf4_patch.enable(matmul="auto")


def test_second_derivatives_stay_the_originals(auto):
    layer = linear(512, 1024)
    x = torch.randn(4, 1024, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for on in (True, False):
        if not on:
            nf4_patch.disable()
        (grad,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
        results += [grad.detach(), torch.autograd.grad(grad.float().square().sum(), x)[0]]
    # the forward is the product's or bitsandbytes': equal up to its rounding
    assert error(results[0], results[2].double()) < 0.01
    assert error(results[1], results[3].double()) < 0.01


def test_compiled_backward_is_bitsandbytes(auto):
    """Traced, the function is the library's own: nothing is counted, and the gradient is as good."""
    torch._dynamo.reset()
    layer = linear(512, 1024)
    want, _ = gradient(layer, 8)
    ledger.reset()
    x = torch.randn(2, 8, 1024, device=CUDA, generator=torch.Generator(device=CUDA).manual_seed(8)).bfloat16()[:1]
    x.requires_grad_()
    dy = torch.randn(1, 8, 512, device=CUDA, dtype=torch.bfloat16)
    torch.compile(layer, backend="aot_eager")(x).backward(dy)
    assert not ledger.hits(TARGET)
    assert x.grad.shape == want.shape
