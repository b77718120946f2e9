"""Launches on a GPU: streams, graphs, sizes beyond 2^31, and a result that overlaps its input."""

from __future__ import annotations

import math

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from oracle import DTYPES, layout_of, quantized

import nf4_patch
from nf4_patch.nf4 import codes, runtime, weight
from nf4_patch.nf4.dequantize import compilation, launch, reference
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_than_2_31_elements(dtype):
    """Offsets need 64 bits.

    Compare blocks at both ends of a weight with 2^31 + 32768 elements (8 GiB in fp32), and blocks around 2^31.
    """
    n = 2**31 + 32768
    packed = torch.randint(0, 256, (n // 2, 1), dtype=torch.uint8, device=CUDA)
    absmax = torch.randint(0, 256, (n // 64,), dtype=torch.uint8, device=CUDA)
    _, state = quantized((256, 256), dtype, CUDA)
    second = torch.rand(-(-n // 64 // 256), device=CUDA)
    layout = layout_of(packed, state)._replace(absmax=absmax, absmax2=second, shape=(n // 1024, 1024))
    got = launch.dequantize(layout).view(-1)
    for start in (0, 2**30, 2**31 - 16384, 2**31, n - 16384):
        part = layout._replace(
            packed=packed[start // 2 : start // 2 + 8192],
            absmax=absmax[start // 64 : start // 64 + 256],
            absmax2=second[start // 16384 : start // 16384 + 1],
            shape=(16384,),
        )
        assert runtime.same_bits(got[start : start + 16384], reference.dequantize(part)), start


def serve(server: Dequantizer, packed, state, **kwargs):
    result = server.of_state(packed, state, **kwargs)
    assert not isinstance(result, Reason), result
    return result


def test_side_stream_and_event_order():
    packed, state = quantized((2048, 2048), torch.bfloat16, CUDA)
    want = F.dequantize_4bit(packed, state)
    server = Dequantizer("test")
    serve(server, packed, state)
    stream = torch.cuda.Stream()
    for into_buffer in (False, True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            later = packed.clone()
            got = serve(server, later, state, into_buffer=into_buffer)
        stream.synchronize()
        assert torch.equal(got, want)


def test_cuda_graph():
    packed, state = quantized((1024, 1024), torch.float16, CUDA)
    other, state2 = quantized((1024, 1024), torch.float16, CUDA, seed=9)
    server = Dequantizer("test")
    serve(server, packed, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = serve(server, packed, state)
    packed.copy_(other)
    for name in ("absmax", "code"):
        getattr(state, name).copy_(getattr(state2, name))
    state.state2.absmax.copy_(state2.state2.absmax)
    state.offset.copy_(state2.offset)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, F.dequantize_4bit(other, state2))


@pytest.mark.parametrize(("owner", "name"), [(compilation, "_kernels"), (codes, "_remembered")], ids=["kernel", "code"])
def test_first_use_inside_a_capture_is_refused_by_name(owner, name, monkeypatch):
    """The first use is refused, and the capture succeeds."""
    packed, state = quantized((96, 64), torch.float16, CUDA, blocksize=2048)
    monkeypatch.setattr(owner, name, {})
    server = Dequantizer("test")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reason = server.of_state(packed, state)
        torch.zeros(1, device=CUDA)
    assert reason is Reason.GRAPH_CAPTURE
    graph.replay()
    assert torch.equal(serve(server, packed, state), F.dequantize_4bit(packed, state))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_first_use_of_compiled_code_inside_a_capture(quant_type, nested, monkeypatch):
    """The code was compiled before, but no kernel is ready. The graph has the plain formula, with the bits of bitsandbytes."""
    packed, state = quantized((96, 64), torch.bfloat16, CUDA, nested=nested, quant_type=quant_type)
    want = F.dequantize_4bit(packed, state)
    nf4_patch.enable()
    torch._dynamo.reset()
    compiled = torch.compile(lambda w: F.dequantize_4bit(w, state), dynamic=False)
    assert torch.equal(compiled(packed), want)
    for owner, name in ((compilation, "_kernels"), (codes, "_remembered"), (weight, "_memos"), (weight, "_checked")):
        monkeypatch.setattr(owner, name, type(getattr(owner, name))())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compiled(packed)
    for _ in range(2):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
    assert torch.equal(compiled(packed), want)
    nf4_patch.disable()


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_result_over_its_own_input_is_the_originals(rows):
    packed, state = quantized((4096, 4096), torch.bfloat16, CUDA)
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        want = x.clone()
        bnb.matmul_4bit(want, packed, state, out=want)
        nf4_patch.enable(matmul="auto")
        got = x.clone()
        assert bnb.matmul_4bit(got, packed, state, out=got) is got
    reasons = (Reason.OUT_MISMATCH, Reason.NOT_FASTER)
    assert sum(counters.fallbacks["bitsandbytes.autograd._functions.matmul_4bit", reason] for reason in reasons) == 1
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.05 * want.float().std().item())
