"""torch.compile: no graph break, no recompile from step to step, the same numbers."""

from __future__ import annotations

import ast
from pathlib import Path

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
import torch._dynamo
from oracle import layout_of, quantized
from torch._dynamo.testing import CompileCounterWithBackend

import nf4_patch
from nf4_patch.nf4 import launch
from nf4_patch.nf4 import layout as layout_module
from nf4_patch.patching import guards

BACKEND = "inductor" if torch.cuda.is_available() else "aot_eager"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def linear(device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 128, bias=False, quant_type="nf4", compute_dtype=dtype)
    return layer.to(device).train()


def step(layer, device, rows=600):
    torch.manual_seed(1)
    x = torch.randn(rows, 256, dtype=torch.bfloat16).to(device).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad


def test_linear4bit_forward_and_backward_fullgraph(patched, device):
    layer = linear(device)
    patched.disable()
    try:
        step(torch.compile(layer, fullgraph=True, backend="eager"), device)
    except torch._dynamo.exc.Unsupported as error:  # PyTorch 2.6 cannot trace a Params4bit
        pytest.skip(f"stock bitsandbytes breaks the graph: {str(error).splitlines()[0]}")
    torch._dynamo.reset()
    patched.enable()
    eager = step(layer, device)
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(4):
        traced = step(compiled, device)
        assert torch.equal(traced[0], eager[0])
        assert torch.equal(traced[1], eager[1])
    assert counter.frame_count == 1  # one graph, no recompile from step to step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_dequantize_4bit_fullgraph(patched, device, dtype, nested, transposed):
    packed, state = quantized((64, 256), dtype, device, nested=nested)
    packed = packed.t() if transposed else packed
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(lambda w, s: F.dequantize_4bit(w, s) * 2, fullgraph=True, backend=counter)
    want = F.dequantize_4bit(packed, state) * 2
    for _ in range(3):
        assert torch.equal(compiled(packed, state), want)
    assert counter.frame_count == 1
    nodes = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert any("nf4_patch.dequantize_nf4" in name for name in nodes), nodes  # the op is in the graph: not bypassed


def test_toggling_recompiles_and_stays_right(device):
    packed, state = quantized((64, 256), torch.bfloat16, device)
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(lambda w, s: F.dequantize_4bit(w, s) + 1, backend=counter)
    want = F.dequantize_4bit(packed, state) + 1
    for _ in range(2):
        with nf4_patch.enabled():
            assert torch.equal(compiled(packed, state), want)
        assert torch.equal(compiled(packed, state), want)


def test_direct_api_fullgraph(device):
    packed, state = quantized((64, 256), torch.bfloat16, device)
    compiled = torch.compile(nf4_patch.dequantize_nf4, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(packed, state), nf4_patch.dequantize_nf4(packed, state))


def test_refused_state_traces_into_the_original(patched, device):
    """A guard that refuses while tracing leaves the original in the graph."""
    packed, state = quantized((64, 256), torch.bfloat16, device)
    state.state2.dtype = torch.float32
    state.blocksize = 64
    state.quant_type = "nf4"
    state.packing_format_for_cpu = True
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda w, s: F.dequantize_4bit(w, s), backend=counter)
    compiled(packed, state)
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert not any("nf4_patch" in name for name in names)


def test_fake_tensor_mode_goes_through_the_op(patched, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    packed, state = quantized((64, 256), torch.bfloat16, device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = F.dequantize_4bit(packed, state)
    assert type(fake).__name__ == "FakeTensor"
    assert fake.shape == (64, 256)
    assert fake.dtype is torch.bfloat16


def test_make_fx_records_the_op(patched, device):
    from torch.fx.experimental.proxy_tensor import make_fx

    packed, state = quantized((64, 256), torch.bfloat16, device)
    graph = make_fx(lambda w: F.dequantize_4bit(w, state) + 0)(packed)
    assert "nf4_patch.dequantize_nf4" in graph.code
    assert torch.equal(graph(packed), F.dequantize_4bit(packed, state))


def test_the_op_resolves_a_layout_once(monkeypatch, device):
    """A compiled graph calls the op at every step: the launch is remembered by everything it depends on."""
    packed, state = quantized((64, 256), torch.bfloat16, device)
    layout = layout_of(packed, state)
    resolved = []

    class Resolved:  # a launch cannot be resolved without a GPU
        def __init__(self, layout):
            resolved.append(layout)

        def new(self):
            return len(resolved)

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "Launch", Resolved)
    monkeypatch.setattr(launch, "_memo", launch.Memo())
    assert [launch.dequantize(layout) for _ in range(3)] == [1, 1, 1]
    for other in (
        layout._replace(code=layout.code.clone()),
        layout._replace(shape=(128, 128)),
        layout._replace(dtype=torch.float16),
        layout._replace(packed=packed.clone()),
    ):
        before = len(resolved)
        launch.dequantize(other)
        assert len(resolved) == before + 1


def test_the_guards_hold_no_generator():
    """What Dynamo of PyTorch 2.8 to 2.10 cannot inline in a backward: any() and all() of one broke the graph there."""
    for module in (guards, layout_module):
        tree = ast.parse(Path(module.__file__).read_text())
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.GeneratorExp)], module.__name__
