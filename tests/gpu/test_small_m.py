"""The fused matmul of up to 64 rows on the GPU: its bits, its error, and the same result at every run."""

from __future__ import annotations

import bitsandbytes.functional as F
import pytest
import torch
from fused_matmul import CUDA, MEASURED, NOT_MEASURED, adversarial, error, exact, one_hot, unfused_error
from oracle import layout_of, quantized

from nf4_patch.nf4 import runtime
from nf4_patch.nf4.matmul import launch
from nf4_patch.nf4.matmul.tuning import TILE_COUNTS
from nf4_patch.patching.counters import counters
from nf4_patch.patching.fused_matmul import FusedMatmul
from nf4_patch.patching.quant_state import fields_of
from nf4_patch.patching.reasons import Reason

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not MEASURED, reason=NOT_MEASURED)]
ROWS = (1, 2, 5, 8, 9, 16, 17, 31, 40, 64)

# (N, K, blocksize): every row of SMALL_M_ROWS, tails of N in a tile, of K in a chunk and in a warp's share.
SIZES = (
    (256, 1024, 64), (250, 320, 64), (1003, 4096, 64), (777, 4160, 64), (5001, 2048, 128), (130, 4096, 4096),
    (4003, 4416, 64), (12003, 320, 64), (96, 64, 64), (8, 512, 256), (1, 128, 64),
)  # fmt: skip


def multiply(x, layout, bias=None, **kwargs):
    return launch.matmul_4bit(x, layout, bias, **kwargs)


def poison(*shapes, dtype):
    """Memory that the next results are likely to get holds NaN."""
    for shape in shapes:
        torch.full(shape, float("nan"), dtype=dtype, device=CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_as_accurate_as_dequantize_and_linear(quant_type, nested, dtype):
    """Against fp64, over tails of M, N and K, with and without a bias; the same bits at a second call."""
    missed = []
    torch.manual_seed(0)
    sizes, rows = (SIZES, ROWS) if nested else (SIZES[1:8:2], ROWS[::3])  # a flat weight differs in its scales only
    for seed, (n, k, blocksize) in enumerate(sizes):
        packed, state = quantized((n, k), dtype, CUDA, blocksize, nested, quant_type, seed=seed)
        layout = layout_of(packed, state)
        truth_weight = exact(layout)
        for m in rows:
            x = torch.randn(m, k, device=CUDA).to(dtype)
            bias = torch.randn(n, device=CUDA).to(dtype) if m % 2 else None
            truth = x.double() @ truth_weight.t() + (0 if bias is None else bias.double())
            poison((m, n), (4 * m, 2 * n), dtype=dtype)
            got = multiply(x, layout, bias)
            again = multiply(x, layout, bias, out=torch.full_like(got, float("nan")))
            theirs = unfused_error(x, layout, truth, bias)
            if not (error(got, truth) <= 1.01 * theirs and torch.equal(got, again)):
                missed.append((n, k, blocksize, m, error(got, truth), theirs, torch.equal(got, again)))
    assert not missed, missed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accuracy_on_adversarial_numbers(dtype):
    missed = []
    for name, weight, values in adversarial(2048, 2048, 64):
        packed, state = F.quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)
        layout = layout_of(packed, state)
        truth_weight, rounded = exact(layout), F.dequantize_4bit(packed, state)
        for m in (1, 8, 16, 64):
            x = values[:m].to(dtype)
            truth = x.double() @ truth_weight.t()
            ours, theirs = error(multiply(x, layout), truth), error(torch.nn.functional.linear(x, rounded), truth)
            if ours > 1.01 * theirs:
                missed.append((name, m, ours, theirs))
    assert not missed, missed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_one_hot_rows_return_the_bits_of_dequantize(quant_type, nested, dtype):
    """What it multiplies by is what dequantize writes."""
    for n, k in ((1003, 4096), (4096, 1024), (520, 8192)):
        packed, state = quantized((n, k), dtype, CUDA, nested=nested, quant_type=quant_type)
        layout = layout_of(packed, state)
        want = F.dequantize_4bit(packed, state)
        for m in (1, 8, 16, 64):
            columns = torch.randperm(k, device=CUDA)[:m]
            assert torch.equal(multiply(one_hot(columns, k, dtype), layout), want[:, columns].t()), (n, k, m)


def test_every_unsupported_operand_is_refused():
    packed, state = quantized((128, 256), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    x = torch.randn(4, 256, device=CUDA, dtype=torch.bfloat16)

    def supported(x=x, bias=None, **changes):
        return launch.supports(x, layout._replace(**changes), bias)

    assert supported() and supported(bias=torch.zeros(128, device=CUDA, dtype=x.dtype))
    for changes in ({"blocksize": 32}, {"blocksize": 512}, {"packed": packed[4:]}, {"offset": layout.offset.half()}):
        assert not supported(**changes), changes
    for unsupported in (x.cpu(), x.float(), torch.zeros(65, 256, device=CUDA, dtype=x.dtype)):
        assert not supported(x=unsupported), unsupported.dtype
        with pytest.raises(ValueError, match="does not support"):
            multiply(unsupported, layout)
    odd = torch.zeros(129, device=CUDA, dtype=x.dtype)[1:]  # starts on 2 bytes
    for bias in (torch.zeros(128, device=CUDA), torch.zeros(127, device=CUDA, dtype=x.dtype), odd):
        assert not supported(bias=bias), bias


def test_every_number_of_rows_shares_the_compiled_kernels():
    """A prompt of any length up to 64 compiles nothing once its tile count was met."""
    packed, state = quantized((1280, 1024), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    x = torch.randn(64, 1024, device=CUDA, dtype=torch.bfloat16)
    for count in TILE_COUNTS:
        multiply(x[: 8 * count], layout)
    compiled = len(runtime._entries)
    weight = F.dequantize_4bit(packed, state).double()
    for m in range(1, 65):
        assert error(multiply(x[:m], layout), x[:m].double() @ weight.t()) < 0.01
    assert len(runtime._entries) == compiled


def test_out_stride_and_empty_rows():
    packed, state = quantized((320, 512), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    x = torch.randn(3, 1, 512, device=CUDA, dtype=torch.bfloat16)
    want = multiply(x, layout)
    assert want.shape == (3, 1, 320)
    out = torch.full((4, 1, 320), float("nan"), device=CUDA, dtype=torch.bfloat16)
    assert torch.equal(multiply(x, layout, out=out[:3]), want)
    assert out[3].isnan().all()
    wide = torch.randn(3, 1, 1024, device=CUDA, dtype=torch.bfloat16)
    wide[..., ::2] = x
    assert torch.equal(multiply(wide[..., ::2], layout), want)
    odd = torch.empty(3 * 512 + 1, device=CUDA, dtype=torch.bfloat16)[1:].view(3, 1, 512).copy_(x)
    assert torch.equal(multiply(odd, layout), want)
    assert multiply(x[:0], layout).shape == (0, 1, 320)


def test_first_use_inside_a_capture_is_named(monkeypatch):
    packed, state = quantized((1408, 640), torch.float16, CUDA, blocksize=128)
    layout = layout_of(packed, state)
    x = torch.randn(2, 640, device=CUDA, dtype=torch.float16)
    monkeypatch.setattr(runtime, "_entries", {})
    monkeypatch.setattr(launch, "_kernels", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(runtime.KernelUnavailable) as caught:
            multiply(x, layout)
        torch.zeros(1, device=CUDA)
    assert caught.value.reason == "GRAPH_CAPTURE"
    assert multiply(x, layout).isfinite().all()


def test_reasons_of_fused_matmul():
    packed, state = quantized((128, 256), torch.bfloat16, CUDA)
    fields = fields_of(state)
    matmul = FusedMatmul("test")
    one = torch.randn(4, 256, device=CUDA, dtype=torch.bfloat16)

    def run(x=one, packed=packed, quant_type="nf4", **kwargs):
        return matmul.run(x, packed, fields, quant_type, state=state, **kwargs)

    want = run()
    assert not isinstance(want, Reason)
    for _ in range(2):  # refused again, and nothing remembered by it
        assert run(one.cpu()) is Reason.NOT_CUDA
        assert run(one[:0]) is Reason.NOT_FASTER
        assert run(torch.cat([one] * 17)) is Reason.NOT_FASTER
        assert run(one[:, :128]) is Reason.NOT_FASTER
        assert run(bias=torch.zeros(128, device=CUDA)) is Reason.MATMUL_OPERANDS
        assert run(packed=packed[:64]) is Reason.SIZE_MISMATCH
        assert run(packed=packed.clone()[16:]) is Reason.SIZE_MISMATCH
        assert run(quant_type="int4") is Reason.QUANT_TYPE
        for wrong in (torch.empty(4, 127, device=CUDA, dtype=one.dtype), torch.empty(4, 128, device=CUDA)):
            assert run(out=wrong) is Reason.OUT_MISMATCH
    out = torch.full((4, 128), float("nan"), device=CUDA, dtype=one.dtype)
    assert run(out=out) is out
    assert torch.equal(out, want)
    odd = torch.full((4 * 128 + 1,), float("nan"), device=CUDA, dtype=one.dtype)[1:].view(4, 128)
    assert torch.equal(run(out=odd), want) and torch.equal(odd, want)
    assert len(matmul.launches) == 1
    freed = packed.clone()
    freed.untyped_storage().resize_(0)
    assert run(packed=freed) is Reason.NO_STORAGE
    assert counters.hits("test") == 3


def test_a_remembered_launch_follows_its_weight():
    """Another bias, x, weight at the same shape, or new numbers at the same address: the result is that of now."""
    packed, state = quantized((128, 256), torch.bfloat16, CUDA)
    other, _ = quantized((128, 256), torch.bfloat16, CUDA, seed=7)
    matmul = FusedMatmul("test")
    x = torch.randn(4, 256, device=CUDA, dtype=torch.bfloat16)
    biases = [None, *torch.randn(2, 128, device=CUDA, dtype=torch.bfloat16)]

    def both(x, packed, bias):
        got = matmul.run(x, packed, fields_of(state), "nf4", bias, state=state)
        return got, multiply(x.contiguous(), layout_of(packed, state), bias)

    for _ in range(2):
        for values in (x, x + 1, x.repeat(1, 2)[:, ::2], x[:1], x.view(2, 2, 256)):
            for weight in (packed, other):
                for bias in biases:
                    got, want = both(values, weight, bias)
                    assert torch.equal(got, want) and got.shape == want.shape
        packed.copy_(torch.randint_like(packed, 256))
    assert len(matmul.launches) == 18  # 3 shapes of x, 2 weights, 3 biases
