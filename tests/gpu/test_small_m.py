"""The fused matmul of up to 64 rows on the GPU: its bits, its error, the same at every run, and who reaches it."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from fused_matmul import error, exact, hits_by_shape, linear
from oracle import layout_of, quantized
from subprocess_python import python

import nf4_patch
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.matmul import launch
from nf4_patch.nf4.matmul import reference as matmul_reference
from nf4_patch.nf4.matmul.tuning import SMALL_M_ROWS, TILE_COUNTS
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.fused_matmul import FusedMatmul
from nf4_patch.patching.quant_state import fields_of
from nf4_patch.patching.reasons import Reason

CUDA = torch.device("cuda", 0)
MEASURED = torch.cuda.is_available() and any(
    row.capability == torch.cuda.get_device_capability(CUDA) for row in SMALL_M_ROWS
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not MEASURED, reason="the fused matmul's table has no row for this GPU"),
]
TARGETS = (
    "bitsandbytes.autograd._functions.matmul_4bit",
    "bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl",
    "bitsandbytes.backends.cuda.ops._dequant_linear_fallback",
)
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
    """Against fp64, over tails of M, N and K, with and without a bias; the same bits at a second call.

    theirs: cuBLAS or the plain twin, whichever is further off; in a matmul of few numbers either may be lucky.

    Both round the same weights to dtype, multiply them exactly and add in fp32; the order of the additions differs, and
    the last bit of a sum with it. Hence 1 %, of an error that is nearly all rounding of the weight and of the result.
    """
    missed = []
    torch.manual_seed(0)
    sizes, rows = (SIZES, ROWS) if nested else (SIZES[1:8:2], ROWS[::3])  # a flat weight differs in its scales only
    for seed, (n, k, blocksize) in enumerate(sizes):
        packed, state = quantized((n, k), dtype, CUDA, blocksize, nested, quant_type, seed=seed)
        layout = layout_of(packed, state)
        truth_weight, weight = exact(layout), reference.dequantize(layout)
        for m in rows:
            x = torch.randn(m, k, device=CUDA).to(dtype)
            bias = torch.randn(n, device=CUDA).to(dtype) if m % 2 else None
            truth = x.double() @ truth_weight.t() + (0 if bias is None else bias.double())
            poison((m, n), (4 * m, 2 * n), dtype=dtype)
            got = multiply(x, layout, bias)
            again = multiply(x, layout, bias, out=torch.full_like(got, float("nan")))
            theirs = max(
                error(torch.nn.functional.linear(x, weight, bias), truth),
                error(matmul_reference.matmul(x, layout, bias), truth),
            )
            if not (error(got, truth) <= 1.01 * theirs and torch.equal(got, again)):
                missed.append((n, k, blocksize, m, error(got, truth), theirs, torch.equal(got, again)))
    assert not missed, missed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accuracy_on_adversarial_numbers(dtype):
    """Heavy tails, cancelling rows, outlier columns of X, tiny and large weights: at most 1 % over dequantize + linear."""
    generator = torch.Generator(device=CUDA).manual_seed(1)
    n = k = 2048
    w = torch.randn(n, k, device=CUDA, generator=generator) * 0.02
    signs = 1 - 2 * (torch.arange(k, device=CUDA) % 2)
    weights = {
        "gaussian": w,
        "heavy tail": w * (1 + 8 * (torch.rand(n, k, device=CUDA, generator=generator) < 0.001)),
        "alternating": w.abs() * signs,
        "tiny": w * 1e-4,
        "large": w * 50,
    }
    x = torch.randn(64, k, device=CUDA, generator=generator)
    outliers = x.clone()
    outliers[:, ::257] *= 60
    inputs = {"gaussian": x, "outliers": outliers, "positive": x.abs(), "ones": torch.ones_like(x), "small": x * 1e-3}
    missed = []
    for (weight_name, weight), (input_name, values) in itertools.product(weights.items(), inputs.items()):
        packed, state = F.quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)
        layout = layout_of(packed, state)
        truth_weight, rounded = exact(layout), F.dequantize_4bit(packed, state)
        for m in (1, 8, 16, 64):
            rows = values[:m].to(dtype)
            truth = rows.double() @ truth_weight.t()
            ours, theirs = error(multiply(rows, layout), truth), error(torch.nn.functional.linear(rows, rounded), truth)
            if ours > 1.01 * theirs:
                missed.append((weight_name, input_name, m, ours, theirs))
    assert not missed, missed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_one_hot_rows_return_the_bits_of_dequantize(quant_type, nested, dtype):
    """What it multiplies by is what dequantize writes: 1 * w, plus zeros, in every lane and slice."""
    for n, k in ((1003, 4096), (4096, 1024), (520, 8192)):
        packed, state = quantized((n, k), dtype, CUDA, nested=nested, quant_type=quant_type)
        layout = layout_of(packed, state)
        want = F.dequantize_4bit(packed, state)
        for m in (1, 8, 16, 64):
            columns = torch.randperm(k, device=CUDA)[:m]
            x = torch.zeros(m, k, dtype=dtype, device=CUDA)
            x[torch.arange(m, device=CUDA), columns] = 1
            assert torch.equal(multiply(x, layout), want[:, columns].t()), (n, k, m)


def test_what_it_cannot_run():
    packed, state = quantized((128, 256), torch.bfloat16, CUDA)
    layout = layout_of(packed, state)
    x = torch.randn(4, 256, device=CUDA, dtype=torch.bfloat16)

    def why(x=x, bias=None, **changes):
        return launch.unsupported(x, layout._replace(**changes), bias)

    assert why() is None
    odd = torch.zeros(129, device=CUDA, dtype=x.dtype)[1:]  # starts on 2 bytes
    refused = [
        why(x=x.cpu()), why(x=x.float()), why(x=torch.zeros(65, 256, device=CUDA, dtype=x.dtype)),
        why(blocksize=32), why(blocksize=512), why(packed=packed[4:]), why(offset=layout.offset.half()),
        *(why(bias=bias) for bias in (torch.zeros(128, device=CUDA), torch.zeros(127, device=CUDA, dtype=x.dtype), odd)),
    ]  # fmt: skip
    assert None not in refused
    assert len(set(refused)) == len(refused)
    with pytest.raises(ValueError, match=re.escape(why(x=x.float()))):
        multiply(x.float(), layout)


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


def test_first_use_inside_a_capture_is_named():
    packed, state = quantized((1408, 640), torch.float16, CUDA, blocksize=128)
    layout = layout_of(packed, state)
    x = torch.randn(2, 640, device=CUDA, dtype=torch.float16)
    saved = dict(runtime._entries), dict(launch._kernels)
    runtime._entries.clear()
    launch._kernels.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(runtime.KernelUnavailable) as caught:
            multiply(x, layout)
        torch.zeros(1, device=CUDA)
    assert caught.value.reason == "GRAPH_CAPTURE"
    runtime._entries.update(saved[0])
    launch._kernels.update(saved[1])
    assert multiply(x, layout).isfinite().all()


def test_multiplier_reasons():
    packed, state = quantized((128, 256), torch.bfloat16, CUDA)
    fields = fields_of(state)
    server = Dequantizer("test")
    multiplier = FusedMatmul(server)
    one = torch.randn(4, 256, device=CUDA, dtype=torch.bfloat16)

    def serve(x=one, packed=packed, quant_type="nf4", **kwargs):
        return multiplier.run(x, packed, fields, quant_type, state=state, **kwargs)

    want = serve()
    assert not isinstance(want, Reason)
    for _ in range(2):  # refused again, and nothing remembered by it
        assert serve(one.cpu()) is Reason.NOT_CUDA
        assert serve(one[:0]) is Reason.NOT_FASTER
        assert serve(torch.cat([one] * 17)) is Reason.NOT_FASTER
        assert serve(one[:, :128]) is Reason.NOT_FASTER
        assert serve(bias=torch.zeros(128, device=CUDA)) is Reason.MATMUL_OPERANDS
        assert serve(packed=packed[:64]) is Reason.SIZE_MISMATCH
        assert serve(packed=packed.clone()[16:]) is Reason.SIZE_MISMATCH
        assert serve(quant_type="int4") is Reason.QUANT_TYPE
        for wrong in (torch.empty(4, 127, device=CUDA, dtype=one.dtype), torch.empty(4, 128, device=CUDA)):
            assert serve(out=wrong) is Reason.OUT_MISMATCH
    out = torch.full((4, 128), float("nan"), device=CUDA, dtype=one.dtype)
    assert serve(out=out) is out
    assert torch.equal(out, want)
    odd = torch.full((4 * 128 + 1,), float("nan"), device=CUDA, dtype=one.dtype)[1:].view(4, 128)
    assert torch.equal(serve(out=odd), want) and torch.equal(odd, want)
    assert len(multiplier.launches) == 1
    freed = packed.clone()
    freed.untyped_storage().resize_(0)
    assert serve(packed=freed) is Reason.NO_STORAGE
    assert counters.hits("test") == 3


def test_a_remembered_launch_follows_its_weight():
    """Another bias, x, weight at the same shape, or new numbers at the same address: the result is that of now."""
    packed, state = quantized((128, 256), torch.bfloat16, CUDA)
    other, _ = quantized((128, 256), torch.bfloat16, CUDA, seed=7)
    multiplier = FusedMatmul(Dequantizer("test"))
    x = torch.randn(4, 256, device=CUDA, dtype=torch.bfloat16)
    biases = [None, *torch.randn(2, 128, device=CUDA, dtype=torch.bfloat16)]

    def both(x, packed, bias):
        got = multiplier.run(x, packed, fields_of(state), "nf4", bias, state=state)
        return got, multiply(x.contiguous(), layout_of(packed, state), bias)

    for _ in range(2):
        for values in (x, x + 1, x.repeat(1, 2)[:, ::2], x[:1], x.view(2, 2, 256)):
            for weight in (packed, other):
                for bias in biases:
                    got, want = both(values, weight, bias)
                    assert torch.equal(got, want) and got.shape == want.shape
        packed.copy_(torch.randint_like(packed, 256))
    assert len(multiplier.launches) == 18  # 3 shapes of x, 2 weights, 3 biases


def hits():
    return {name: counters.hits(name) for name in TARGETS}


@pytest.mark.parametrize("bias", [False, True])
def test_linear4bit_hits_it_and_off_has_its_own_bits(auto, bias):
    """M = 1, 8, 32, 64 through the real layer: counted once each; off and disabled, the bits of bitsandbytes."""
    layer = linear(1024, 2048, bias=bias)
    for m in (1, 8, 32, 64):
        x = torch.randn(m, 2048, dtype=torch.bfloat16, device=CUDA)
        with torch.no_grad():
            nf4_patch.disable()
            stock = layer(x)
            nf4_patch.enable(matmul="off")
            counters.reset()
            assert torch.equal(layer(x), stock), m
            assert not hits_by_shape(), (m, hits_by_shape())
            nf4_patch.enable(matmul="auto")
            counters.reset()
            got = layer(x)
        assert sum(hits_by_shape().values()) == sum(hits().values()) == 1, (m, hits_by_shape(), hits())
        weight = F.dequantize_4bit(layer.weight, layer.weight.quant_state)
        want = torch.nn.functional.linear(x.float(), weight.float(), None if layer.bias is None else layer.bias.float())
        assert torch.allclose(got.float(), want, rtol=2**-7, atol=2**-7), m


def test_past_64_rows_it_steps_aside_with_the_original_bits(auto):
    layer = linear(1024, 2048)
    x = torch.randn(200, 2048, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        got = layer(x)
        nf4_patch.disable()
        assert torch.equal(got, layer(x))
    assert not hits_by_shape()


def test_dequant_linear_target_too(auto):
    """bitsandbytes chooses between two functions by M and GPU; both lead to the fused matmul."""
    from bitsandbytes.backends.cuda import ops

    packed, state = quantized((1024, 2048), torch.bfloat16, CUDA)
    for m in (1, 8, 64):
        x = torch.randn(m, 2048, dtype=torch.bfloat16, device=CUDA)
        arguments = (x, packed, [1024, 2048], state.state2.absmax, 64, "nf4", None)
        second = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code, "absmax_offset": state.offset}
        a = ops._dequant_linear_fallback(*arguments, **second)
        b = ops._gemm_4bit_kernel_impl(*arguments, *second.values())
        assert torch.equal(a, b)
    assert hits() == {TARGETS[0]: 0, TARGETS[1]: 3, TARGETS[2]: 3}


def test_losses_are_stock_with_matmul_off_and_training_is_untouched_with_it_on(auto):
    """A backward through 600 rows: the fused matmul steps aside, so every bit is the original's, "auto" or not."""
    layer = linear(512, 1024)
    results = []
    for mode in ("stock", "off", "auto"):
        nf4_patch.disable() if mode == "stock" else nf4_patch.enable(matmul=mode)
        torch.manual_seed(3)
        x = torch.randn(600, 1024, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
        loss = layer(x).float().square().mean()
        loss.backward()
        results.append((loss.detach(), x.grad))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_generation_loop_in_a_cuda_graph(auto):
    """Two layers, token after token, captured once: replays follow their input and have the bits of the eager calls."""
    up, down = linear(2048, 512), linear(512, 2048)
    start = torch.randn(8, 512, dtype=torch.bfloat16, device=CUDA)
    static = start.clone()

    def token(x):
        return torch.nn.functional.rms_norm(x + down(torch.nn.functional.silu(up(x))), (512,))

    with torch.no_grad():
        for _ in range(2):
            token(static)
        counters.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.copy_(token(static))
        assert sum(hits().values()) == 2
        static.copy_(start)
        x = start
        for _ in range(5):
            graph.replay()
            x = token(x)
            assert torch.equal(static, x)


def test_compiled_layer_reaches_it(auto):
    """The op is opaque to torch.compile, so the fused matmul runs inside a compiled graph as well."""
    torch._dynamo.reset()
    layer = linear(512, 1024)
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        want = layer(x)
        counters.reset()
        got = torch.compile(lambda x: layer(x) * 1)(x)
    assert torch.equal(got, want)
    assert sum(hits().values()) == 1


def test_gemv_4bit(auto):
    """What Linear4bit calls for one row before bitsandbytes 0.50."""
    name = "bitsandbytes.functional.gemv_4bit"
    packed, state = quantized((1000, 2048), torch.bfloat16, CUDA)
    x = torch.randn(1, 1, 2048, dtype=torch.bfloat16, device=CUDA)
    got = F.gemv_4bit(x, packed, state=state)
    assert counters.hits(name) == 1
    assert torch.equal(got, multiply(x, layout_of(packed, state)))
    out = torch.full_like(got, float("nan"))
    assert F.gemv_4bit(x, packed, out=out, state=state) is out
    assert torch.equal(out, got)
    nf4_patch.disable()
    stock = F.gemv_4bit(x, packed, state=state)
    assert stock.shape == got.shape
    # bitsandbytes' one-row kernel rounds its table to bf16: the measure is the truth, not each other
    truth = x.double() @ exact(layout_of(packed, state)).t()
    assert error(got, truth) <= 1.01 * error(stock, truth)
    nf4_patch.enable(matmul="off")
    assert torch.equal(F.gemv_4bit(x, packed, state=state), stock)
    nf4_patch.enable(matmul="auto")
    assert counters.hits(name) == 2


def test_unsloth_gemv():
    if importlib.util.find_spec("unsloth") is None:
        pytest.skip("unsloth is not installed")
    python(
        """
    import torch, nf4_patch
    nf4_patch.enable(matmul="auto")
    import unsloth
    from unsloth.kernels import utils
    from fused_matmul import error, exact
    from oracle import layout_of, quantized
    from nf4_patch.nf4.matmul import launch
    from nf4_patch.nf4.dequantize import reference

    attribute = "_fast_gemv_bnb" if hasattr(utils, "_fast_gemv_bnb") else "fast_gemv"
    def row():
        return next(t for t in nf4_patch.status().targets if t.name == f"unsloth.kernels.utils.{attribute}")
    packed, state = quantized((1000, 2048), torch.bfloat16, "cuda")
    layout = layout_of(packed, state)
    x = torch.randn(1, 1, 2048, dtype=torch.bfloat16, device="cuda")
    got = utils.fast_gemv(x, packed, state)
    assert row().hits == 1, nf4_patch.status()
    assert torch.equal(got, launch.matmul_4bit(x, layout))
    out = torch.full((1, 1, 1000), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert utils.fast_gemv(x, packed, state, out=out) is out
    assert torch.equal(out, got)
    nf4_patch.disable()
    stock = utils.fast_gemv(x, packed, state)
    assert stock.shape == got.shape
    # Unsloth's kernel never rounds a weight to 16 bits and is nearer to the truth than dequantize + matmul: that is ours'
    truth = x.double() @ exact(layout).t()
    linear = torch.nn.functional.linear(x, reference.dequantize(layout))
    assert error(got, truth) <= 1.01 * error(linear, truth)
    nf4_patch.enable(matmul="off")
    assert torch.equal(utils.fast_gemv(x, packed, state), stock)
    assert row().hits == 2, nf4_patch.status()
    if hasattr(utils, "_gemv_rows"):
        attribute = "_gemv_rows"
        nf4_patch.enable(matmul="auto")
        few = torch.randn(4, 1, 2048, dtype=torch.bfloat16, device="cuda")
        got = utils._gemv_rows(few, packed, state, None)
        assert row().hits == 1, nf4_patch.status()
        assert torch.equal(got, launch.matmul_4bit(few, layout))
        wide = torch.full((4, 1, 1008), float("nan"), dtype=torch.bfloat16, device="cuda")
        utils._gemv_rows(few, packed, state, wide[..., :1000])  # rows apart: for the original
        assert row().hits == 1 and row().fallbacks == {"OUT_MISMATCH": 1}, row()
    """,
        path=Path(__file__).parents[1] / "support",
    )


def test_matmul_4bit_is_the_op_without_the_op(auto):
    """A layer without a gradient goes past the op; with one, or compiled, the op's own targets serve: the same bits."""
    layer = linear(1024, 2048, bias=True)
    x = torch.randn(2, 3, 2048, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        got = layer(x)
        assert hits() == {TARGETS[0]: 1, TARGETS[1]: 0, TARGETS[2]: 0}
        out = torch.full_like(got, float("nan"))
        state = layer.weight.quant_state
        for weight in (layer.weight, layer.weight.t()):  # since 0.50 either way round
            assert bnb.matmul_4bit(x, weight, state, out, layer.bias) is out
            assert torch.equal(out, got)
    counters.reset()
    with_gradient = layer(x.clone().requires_grad_())
    assert torch.equal(with_gradient, got)
    assert hits()[TARGETS[0]] == 0 and sum(hits().values()) == 1
    with torch.inference_mode():
        assert torch.equal(layer(x), got)


def test_unsloth_matmul_lora():
    """Unsloth's own function against its dequantize + matmul, with and without an adapter; backward it is the original."""
    if importlib.util.find_spec("unsloth") is None:
        pytest.skip("unsloth is not installed")
    python(
        """
    import torch, nf4_patch
    nf4_patch.enable(matmul="auto")
    import unsloth
    from unsloth.kernels import fast_lora
    from unsloth.kernels.utils import matmul_lora
    from fused_matmul import error, exact
    from oracle import layout_of, quantized

    assert fast_lora.matmul_lora is matmul_lora
    def row():
        return next(t for t in nf4_patch.status().targets if t.name == "unsloth.kernels.utils.matmul_lora")
    packed, state = quantized((1024, 2048), torch.bfloat16, "cuda")
    truth = exact(layout_of(packed, state))
    generator = torch.Generator(device="cuda").manual_seed(0)
    def random(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()
    def original(*arguments):
        nf4_patch.disable()
        result = matmul_lora(*arguments)
        nf4_patch.enable(matmul="auto")
        return result

    hits = 0
    with torch.no_grad():
        for shape in ((1, 5, 2048), (4, 8, 2048), (7, 2048)):
            for adapter in ((None, None, None), (random(8, 2048).float(), random(1024, 8).float(), 0.5)):
                x = random(*shape)
                got = matmul_lora(x, packed, state, *adapter)
                hits += 1
                assert row().hits == hits, nf4_patch.status()
                stock = original(x, packed, state, *adapter)
                assert got.shape == stock.shape and got.dtype is stock.dtype
                want = x.double() @ truth.t()
                if adapter[0] is not None:
                    want = want + (x.double() @ adapter[0].double().t()) @ adapter[1].double().t() * 0.5
                assert error(got, want) <= 1.02 * error(stock, want), (shape, error(got, want), error(stock, want))
        for x, weight in ((random(100, 2048), packed), (random(7, 1024), packed.t())):  # past 64 rows; backward
            got = matmul_lora(x, weight, state, None, None, None)
            assert torch.equal(got, original(x, weight, state, None, None, None))
        assert row().hits == hits and {"NOT_FASTER", "MATMUL_OPERANDS"} <= row().fallbacks.keys(), row()
    """,
        path=Path(__file__).parents[1] / "support",
    )
