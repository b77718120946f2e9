"""The host path of an eager call without a GPU: the real Server and Launch, with a launcher that writes the formula."""

from __future__ import annotations

import ctypes

import bitsandbytes.functional as F
import pytest
import torch
from bitsandbytes.nn import Params4bit
from oracle import layout_of, quantized

from nf4_patch.nf4 import launch, reference
from nf4_patch.patching import guards, replacement
from nf4_patch.patching.replacement import Server
from nf4_patch.patching.stats import ledger

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_launch.py runs the launcher itself")


@pytest.fixture
def server(monkeypatch):
    """``server.resolved`` holds the layouts in the order in which launches were resolved, ``server.launched`` counts."""
    server = Server("test")
    server.resolved, server.launched = [], 0

    class Kernel:
        elements = 1 << 12

        def __init__(self, layout):
            def call(grid, one, another, stream, packed, *arguments):
                *_, out, n = arguments
                assert packed == layout.packed.data_ptr() and n == layout.numel() and stream == 0
                weight = reference.dequantize(layout._replace(packed=layout.bytes()))
                ctypes.memmove(out, weight.data_ptr(), weight.nbytes)
                server.launched += 1

            self.entry = launch.Entry(call, (), (), "test")

    def variant(layout, config):
        server.resolved.append(layout)
        return layout

    def buffer(n, dtype, device):
        return torch.full((n,), float("nan"), dtype=dtype)

    def empty(shape, strides, dtype):
        return torch.full((1,), float("nan"), dtype=dtype).expand(shape).clone().as_strided(shape, strides)

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch.Variant, "of", variant)
    monkeypatch.setattr(launch, "kernel_for", lambda layout, device: Kernel(layout))
    monkeypatch.setattr(launch, "current_device", lambda: None)  # what a CPU tensor's device.index is
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(launch, "empty_strided_cuda", empty)
    monkeypatch.setattr(launch, "shared_buffer", buffer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(guards, "GUARDS", [row for row in guards.GUARDS if row[0].name != "NOT_CUDA"])
    ledger.reset()
    yield server
    ledger.reset()


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("parameter", [False, True], ids=["Tensor", "Params4bit"])
def test_every_way_to_a_weight(server, nested, transposed, parameter):
    """A new tensor, out, the shared buffer, the fields by themselves: one launch resolved, four launched and counted."""
    packed, state = quantized((64, 96), torch.bfloat16, "cpu", nested=nested)
    want = reference.dequantize(layout_of(packed, state))
    want = want.t() if transposed else want
    weight = Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True) if parameter else packed
    weight = weight.t() if transposed else weight
    out = torch.full((64, 96), float("nan"), dtype=torch.bfloat16)
    with torch._C.DisableTorchFunctionSubclass():
        again = weight.data.as_subclass(torch.Tensor)
    results = [
        server.serve(weight, state),
        server.serve(weight, state, out),
        server.serve(weight, state, shared=True),
        server.serve_fields(again, replacement.fields_of(state), state.quant_type),
    ]
    for result in results:
        assert torch.equal(result, want) and result.stride() == want.stride()
    assert results[1].data_ptr() == out.data_ptr()
    assert len(server.resolved) == 1 and server.launched == 4
    assert ledger.hits("test") == 4


def test_what_a_remembered_launch_is_recognized_by(server):
    """Whatever changes it, the launch is resolved anew and the numbers are those of the changed state."""
    packed, state = quantized((64, 96), torch.float16, "cpu")
    other, state2 = quantized((64, 96), torch.float16, "cpu", seed=7)
    changes = (
        lambda: setattr(state, "absmax", state2.absmax),
        lambda: setattr(state.state2, "absmax", state2.state2.absmax.clone()),
        lambda: setattr(state.state2, "code", state2.state2.code.clone()),
        lambda: setattr(state, "offset", state.offset.half()),
        lambda: setattr(state, "dtype", torch.bfloat16),
        lambda: setattr(state, "shape", torch.Size((96, 64))),
        lambda: setattr(state, "quant_type", "fp4"),
        lambda: setattr(packed, "data", other.clone()),
    )
    for count, change in enumerate((lambda: None, *changes), 1):
        change()
        layout = layout_of(packed, state)
        code = F.get_4bit_type(state.quant_type, device="cpu")
        for _ in range(2):
            got = server.serve(packed, state)
            assert torch.equal(got, reference.dequantize(layout._replace(code=code)))
        assert len(server.resolved) == count


def test_refusals_by_the_short_way(server):
    """What is no 4-bit state, and a shape that is no key, go the long way round to the same answer as ever."""
    packed, state = quantized((64, 96), torch.float16, "cpu")
    for nothing in (None, [state.absmax, state.shape], object()):
        assert server.serve(packed, nothing) is guards.Reason.NOT_4BIT
    state.shape = [64, 96]
    assert torch.equal(server.serve(packed, state), reference.dequantize(layout_of(packed, state)))
    state.absmax = state.absmax[:-1]
    assert server.serve(packed, state) is guards.Reason.SIZES
