"""The fused matmul on the GPU, called through the layers and functions of bitsandbytes and Unsloth."""

from __future__ import annotations

import importlib.util

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from fused_matmul import CUDA, error, exact, hits_by_shape, linear, measured, multiply, stock_and_fused
from oracle import layout_of, quantized
from subprocess_python import program
from target import same, step

import nf4_patch
from nf4_patch.patching.counters import counters

pytestmark = [pytest.mark.gpu, measured]
unsloth = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="unsloth is not installed")
TARGETS = (
    "bitsandbytes.autograd._functions.matmul_4bit",
    "bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl",
    "bitsandbytes.backends.cuda.ops._dequant_linear_fallback",
)


def hits():
    return {name: counters.hits(name) for name in TARGETS}


@pytest.mark.parametrize("bias", [False, True])
def test_linear4bit_hits_it_and_off_has_its_own_bits(auto, bias):
    """Real layers with 1, 8, 32 and 64 rows count one hit each.

    With the option off, the patch off or more rows, results have bitsandbytes' bits.
    """
    layer = linear(1024, 2048, bias=bias)
    for m in (1, 8, 32, 64, 200):
        x = torch.randn(m, 2048, dtype=torch.bfloat16, device=CUDA)
        stock, got = stock_and_fused(layer, x)
        if m == 200:
            assert torch.equal(got, stock) and not hits_by_shape()
            continue
        assert sum(hits_by_shape().values()) == sum(hits().values()) == 1, (m, hits_by_shape(), hits())
        weight = F.dequantize_4bit(layer.weight, layer.weight.quant_state)
        want = torch.nn.functional.linear(x.float(), weight.float(), None if layer.bias is None else layer.bias.float())
        assert torch.allclose(got.float(), want, rtol=2**-7, atol=2**-7), m


def test_dequant_linear_target_too(auto):
    """bitsandbytes chooses between two functions by M and the GPU. Both run the fused matmul."""
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


def test_a_training_step_has_the_bits_of_bitsandbytes_off_or_auto(auto):
    """A step has 600 rows, so the fused matmul does not run, and every bit is the original's, also with "auto"."""
    layer = linear(512, 1024)
    nf4_patch.disable()
    stock = step(layer, CUDA, 1024)
    for mode in ("off", "auto"):
        nf4_patch.enable(matmul=mode)
        assert same(step(layer, CUDA, 1024), stock), mode


def test_generation_loop_in_a_cuda_graph(auto):
    """Capture two layers once. Replays follow new inputs and have the bits of eager calls."""
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
    """torch.compile does not trace into the op, so the fused matmul also runs inside a compiled graph."""
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
    """Linear4bit calls this function for one row before bitsandbytes 0.50."""
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


@unsloth
@pytest.mark.parametrize("function", ["gemv", "matmul_lora"])
def test_unsloth(function):
    program("unsloth_fused_matmul", function)


def test_matmul_4bit_is_the_op_without_the_op(auto):
    """Without a gradient, a layer skips the op. With a gradient, or compiled, it calls the op. The bits are equal."""
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
