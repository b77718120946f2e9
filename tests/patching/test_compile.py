"""torch.compile with the patch: no graph break, no recompile between steps, and the same numbers."""

from __future__ import annotations

import itertools

import bitsandbytes.functional as F
import pytest
import torch
import torch._dynamo
from alternation import crossed
from oracle import expected, layout_of, quantized
from subprocess_python import python
from target import fallbacks, linear, same, step
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nf4_patch
from nf4_patch.nf4 import codes, runtime
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.weight import PackedWeight
from nf4_patch.patching import guards, op
from nf4_patch.patching.counters import warn_once
from nf4_patch.patching.reasons import Reason

BACKEND = "inductor" if torch.cuda.is_available() else "aot_eager"


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def ours(counter):
    """Return nf4_patch's nodes in the compiled graphs."""
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert not any("triton" in name for name in names), names  # a kernel that Inductor would compile again
    return [name.removesuffix(".default") for name in names if "nf4_patch" in name]


def strided(tensor):
    return torch.stack([tensor, tensor], 1)[:, 0]


@pytest.mark.full
def test_linear4bit_forward_and_backward_fullgraph(patched, device):
    """There is one graph, and no recompile between steps.

    PyTorch before 2.8 cannot trace a Params4bit, so the graphs are those without the patch.
    """
    layer = linear(device)
    fullgraph = torch.__version__ >= (2, 8)
    patched.disable()
    stock = CompileCounterWithBackend(BACKEND)
    if not fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            step(torch.compile(layer, fullgraph=True, backend="eager"), device)
        torch._dynamo.reset()
    eager = step(layer, device)
    assert same(step(torch.compile(layer, fullgraph=fullgraph, backend=stock), device), eager)
    torch._dynamo.reset()
    patched.enable()
    assert same(step(layer, device), eager)
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(layer, fullgraph=fullgraph, backend=counter)
    for _ in range(4):
        assert same(step(compiled, device), eager)
    assert counter.frame_count == (1 if fullgraph else stock.frame_count)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("dtype", "form"),
    crossed((torch.float16, torch.bfloat16, torch.float32), itertools.product((True, False), (True, False))),
    ids=str,
)
def test_dequantize_4bit_fullgraph(patched, device, dtype, form):
    nested, transposed = form
    packed, state = quantized((64, 256), dtype, device, nested=nested)
    packed = packed.t() if transposed else packed
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(lambda w, s: F.dequantize_4bit(w, s) * 2, fullgraph=True, backend=counter)
    want = F.dequantize_4bit(packed, state) * 2
    for _ in range(3):
        assert torch.equal(compiled(packed, state), want)
    assert counter.frame_count == 1
    assert ours(counter) == ["nf4_patch.dequantize_nf4"]  # the op is in the graph: not bypassed


def test_toggling_recompiles_and_stays_right(device):
    packed, state = quantized((64, 256), torch.bfloat16, device)
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(lambda w, s: F.dequantize_4bit(w, s) + 1, backend=counter)
    want = F.dequantize_4bit(packed, state) + 1
    for _ in range(2):
        with nf4_patch.enabled():
            assert torch.equal(compiled(packed, state), want)
        assert torch.equal(compiled(packed, state), want)


def test_a_replacement_that_somebody_holds_is_traced_as_the_original_while_it_is_off(device):
    packed, state = quantized((64, 128), torch.float16, device)
    with nf4_patch.enabled():
        held = F.dequantize_4bit
    for turn_on, name in ((False, []), (True, ["nf4_patch.dequantize_nf4"]), (False, [])):
        (nf4_patch.enable if turn_on else nf4_patch.disable)()
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        got = torch.compile(lambda w, s: held(w, s) * 2, fullgraph=True, backend=counter)(packed, state)
        assert ours(counter) == name and torch.equal(got, expected(packed, state) * 2)


def test_direct_api_fullgraph(device):
    packed, state = quantized((64, 256), torch.bfloat16, device)
    compiled = torch.compile(nf4_patch.dequantize_nf4, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(packed, state), nf4_patch.dequantize_nf4(packed, state))


def test_what_is_unsupported_while_tracing_leaves_the_original_in_the_graph(patched, device):
    packed, state = quantized((64, 256), torch.bfloat16, device, storage=torch.bfloat16)
    packed.requires_grad_()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile(lambda w, s: F.dequantize_4bit(w, s), backend=counter)(packed, state)
    assert not ours(counter)


@pytest.mark.every(2)
@pytest.mark.parametrize("field", ["dtype", "blocksize", "shape", "absmax", "quant_type"])
def test_a_field_that_is_none_gets_the_originals_error_while_tracing(device, field):
    packed, state = quantized((64, 256), torch.bfloat16, device)
    setattr(state, field, None)
    said = []
    for switch_it in (nf4_patch.disable, nf4_patch.enable):
        switch_it()
        torch._dynamo.reset()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            torch.compile(lambda w, s: F.dequantize_4bit(w, s), backend="eager")(packed, state)
        said.append((caught.type, str(caught.value).splitlines()[0], "dequantize_nf4" in str(caught.value)))
    assert said[0] == said[1] and not said[1][2]


def test_fake_tensors_and_make_fx_meet_the_op(patched, device):
    from torch.fx.experimental.proxy_tensor import make_fx

    packed, state = quantized((64, 256), torch.bfloat16, device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = F.dequantize_4bit(packed, state)
    assert (type(fake).__name__, fake.shape, fake.dtype) == ("FakeTensor", (64, 256), torch.bfloat16)
    graph = make_fx(lambda w: F.dequantize_4bit(w, state) + 0)(packed)
    assert "nf4_patch.dequantize_nf4" in graph.code
    assert torch.equal(graph(packed), F.dequantize_4bit(packed, state))


@pytest.mark.full
def test_what_the_schema_or_a_guard_does_not_support_runs_the_original(patched, device):
    """While Dynamo traces, a weight that only bitsandbytes supports gets the original's numbers, in one graph without a break."""
    unsupported = {
        "a table that bitsandbytes never reads": lambda state: setattr(state, "code", None),
        "an offset that is a number": lambda state: setattr(state, "offset", state.offset.item()),
        "an absmax with strides": lambda state: setattr(state, "absmax", strided(state.absmax)),
    }
    for what, change in unsupported.items():
        packed, state = quantized((64, 256), torch.bfloat16, device)
        change(state)
        patched.disable()
        want = F.dequantize_4bit(packed, state)
        patched.enable()
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            compiled = torch.compile(lambda w, s: F.dequantize_4bit(w, s) * 1, fullgraph=True, backend=backend)
            assert torch.equal(compiled(packed, state), want), (what, backend)


def test_the_op_says_why_not_to_a_trace(device):
    """The fake gives the same Reason as the guards."""
    packed, state = quantized((64, 256), torch.bfloat16, device)
    layout = layout_of(packed, state)
    for changed in (
        layout,
        layout._replace(absmax=layout.absmax[:-1]),
        layout._replace(blocksize=96),
        layout._replace(quant_type="int4"),
        layout._replace(absmax=strided(layout.absmax)),
    ):
        reason = guards.why_not(changed)
        assert (reason is None) is (changed is layout)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op.dequantize(
                *(mode.from_tensor(field) if isinstance(field, torch.Tensor) else field for field in changed)
            )
        if reason is None:
            real = op.dequantize(*changed)
            assert (real.dtype, real.shape) == (fake.dtype, fake.shape)
        else:
            assert fake is reason


@pytest.mark.skipif(
    not hasattr(torch._dynamo.exc, "UnknownPropertiesDuringBackwardTrace"), reason="PyTorch 2.6 knows no second trace"
)
def test_the_backward_is_traced_once(patched, device, monkeypatch):
    """If the replacement reads strides, for example with is_contiguous(), Dynamo traces the backward again, with copies
    of the gradients.
    """
    again = []
    monkeypatch.setattr(
        torch._dynamo.exc.UnknownPropertiesDuringBackwardTrace, "__init__", lambda self, *a: again.append(a)
    )
    layer = linear(device)
    step(torch.compile(layer, backend=BACKEND), device)
    assert not again


class Exportable(torch.nn.Module):
    """A module whose forward decodes its weight. Its tensors are buffers, which a strict export requires."""

    def __init__(self, dequantize, device):
        super().__init__()
        self.dequantize = dequantize
        packed, state = quantized((64, 256), torch.float32, device)
        for name, tensor in zip(op.PackedWeight._fields[:5], layout_of(packed, state), strict=False):
            self.register_buffer(f"a_{name}", tensor)

    def forward(self, x):
        second = F.QuantState(self.a_absmax2, code=self.a_code2, blocksize=256, dtype=torch.float32)
        shape, code = torch.Size((64, 256)), F.get_4bit_type("nf4", self.a_absmax.device)
        state = F.QuantState(self.a_absmax, shape, code, 64, "nf4", torch.float32, self.a_offset, second)
        return x * self.dequantize(self.a_packed, state)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)], ids=["non-strict", "strict"])
def test_an_exported_program_needs_no_nf4_patch(patched, device, tmp_path, strict):
    """The program runs in a process that never imported nf4_patch, with the same numbers."""
    modules = {
        "original": Exportable(F.dequantize_4bit, device),
        "direct": Exportable(nf4_patch.dequantize_nf4, device),
    }
    x = torch.randn(64, 256, device=device)
    want = modules["original"](x)
    torch.save((x, want), tmp_path / "want.pt")
    for name, module in modules.items():
        program = torch.export.export(module, (x,), strict=strict)
        assert "nf4_patch" not in str(program.graph)
        assert torch.equal(program.module()(x), want)
        torch.export.save(program, tmp_path / f"{name}.pt2")
    python(f"""
    import sys
    import bitsandbytes, torch
    x, want = torch.load({str(tmp_path / "want.pt")!r})
    for name in ("original", "direct"):
        got = torch.export.load({str(tmp_path)!r} + f"/{{name}}.pt2").module()(x)
        assert torch.equal(got, want), (name, got - want)
    assert "nf4_patch.patching.op" not in sys.modules
    """)


def test_a_jit_trace_records_the_original(patched, device):
    """The trace stores no constant: if the weight gets other bytes, the numbers change."""
    packed, state = quantized((64, 256), torch.float32, device)
    other, _ = quantized((64, 256), torch.float32, device, seed=1)
    F.dequantize_4bit(packed, state)  # remembered before the trace
    traced = torch.jit.trace(lambda w: F.dequantize_4bit(w, state) * 2, (packed,), check_trace=False)
    assert fallbacks() == {Reason.EXPORTING: 1}
    for each in (packed, other):
        assert torch.equal(traced(each), F.dequantize_4bit(each, state) * 2)


class NoCopyFromTheHost(TorchDispatchMode):
    """A mode that forbids copies from the host, as a CUDA graph capture does. "meta" stands for the GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        places = {each.device.type for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
        assert places <= {"meta"}, function
        return result


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_first_use_inside_a_capture_runs_the_formula_without_a_copy_from_the_host(
    quant_type, nested, device, monkeypatch, caplog
):
    packed, state = quantized((64, 256), torch.bfloat16, device, nested=nested, quant_type=quant_type)
    weight = layout_of(packed, state)
    monkeypatch.setattr(runtime, "is_capturing", lambda: True)
    monkeypatch.setattr(op.launch, "dequantize", lambda weight: runtime.built_once({}, "kernel", lambda: 1 / 0))
    warn_once.cache_clear()
    assert torch.equal(torch.ops.nf4_patch.dequantize_nf4(*weight), reference.dense(weight))
    assert [r for r in caplog.records if op.FORMULA in r.getMessage() and "CUDA graph" in r.getMessage()]
    elsewhere = PackedWeight(*[each.to("meta") if isinstance(each, torch.Tensor) else each for each in weight])
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: 1 / 0)  # which copies past a dispatch mode
    with NoCopyFromTheHost():
        assert reference.dense(elsewhere, flush_subnormals=True).shape == weight.shape


@pytest.mark.parametrize("quant_type", codes.CODES)
def test_the_code_is_rounded_once_whatever_the_default_dtype(quant_type):
    want = torch.tensor(codes.CODES[quant_type], dtype=torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        got = codes.code_of(quant_type, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert runtime.same_bits(got, want)


def test_the_op_computes_where_the_kernel_cannot(device, monkeypatch, caplog):
    """A graph may run on another machine than it was traced on.

    There it uses the formula or raises an error, and never returns unwritten memory.
    """
    packed, state = quantized((64, 256), torch.bfloat16, device)
    layout = layout_of(packed, state)
    want = torch.ops.nf4_patch.dequantize_nf4(*layout)
    assert torch.equal(torch.ops.nf4_patch.dequantize_nf4(*layout._replace(absmax=strided(layout.absmax))), want)
    for changed in (layout._replace(absmax=layout.absmax[:-1]), layout._replace(blocksize=96)):
        with pytest.raises(ValueError, match=guards.why_not(changed).sentence[:20]):
            torch.ops.nf4_patch.dequantize_nf4(*changed)
    monkeypatch.setattr(runtime, "DEVICE", "cuda")
    warn_once.cache_clear()
    on_the_cpu = [field.to("cpu", copy=True) if isinstance(field, torch.Tensor) else field for field in layout]
    for _ in range(2):
        assert torch.equal(torch.ops.nf4_patch.dequantize_nf4(*on_the_cpu), want.cpu())
    assert len([r for r in caplog.records if Reason.NOT_CUDA.sentence in r.getMessage()]) == 1
