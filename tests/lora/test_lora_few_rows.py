"""Few rows with a LoRA adapter, without a gradient, with ``enable(matmul="auto")``: as accurate as peft, or peft's
forward for a named Reason.

Without a GPU, functions that read the operands at their addresses stand in for the compiled kernels.
"""

from __future__ import annotations

import contextlib

import pytest
import test_lora as lora
import torch
from alternation import crossed, thinned
from fused_matmul import MEASURED
from matmul_reference import tensor_at
from target import fallbacks, raising
from torch._dynamo.testing import CompileCounterWithBackend

import nf4_patch
from nf4_patch.matmul import adapter, launch, product, small_m
from nf4_patch.matmul.product import FusedMatmul
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import reference
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

peft = lora.peft
BF16, FP16, FP32, IN, OUT, TARGET = lora.BF16, lora.FP16, lora.FP32, lora.IN, lora.OUT, lora.TARGET
LORA = pytest.mark.parametrize("option", ["off", "fused"], ids=["peft", "fused"])
GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(GPU and not MEASURED, reason="the fused matmul's table has no row for this GPU")


def stand_in_for_the_kernels(monkeypatch):
    def inner_kernel(device, m, k, layout):
        @torch.autocast("cpu", enabled=False)
        def call(parts, one, another, stream, x, a, out, rows, scale):
            assert x % 16 == a % 16 == 0 and (parts, rows) == (layout.parts, m)
            x, a = (
                tensor_at(x, (m, k), BF16).float(),
                tensor_at(a, (layout.rank, k), FP32 if layout.wide else BF16).float(),
            )
            sums = tensor_at(out, (parts, m, 16 * layout.ranks), FP32).zero_()
            span = adapter.span_of(k)
            for i in range(parts):
                columns = slice(i * span, (i + 1) * span)
                sums[i, :, : layout.rank] = scale * x[:, columns] @ a[:, columns].t()

        return runtime.KernelEntry(call, (), (), "test")

    class Kernel:
        grid, sizes = 1, ()

        def __init__(self, device, dtype, weight, division, m, bias, layout):
            n = weight.shape[0]

            @torch.autocast("cpu", enabled=False)
            def call(grid, one, another, stream, x, packed, *rest):
                *_, out, spare, inner, b = rest
                u = tensor_at(inner, (layout.parts, m, 16 * layout.ranks), FP32).sum(0)[:, : layout.rank]
                u = u if layout.wide else u.to(dtype).float()
                read = weight._replace(packed=tensor_at(packed, weight.packed.shape, torch.uint8))
                y = tensor_at(x, (m, weight.shape[1]), dtype).float() @ reference.dequantize(read, False).float().t()
                y += u @ tensor_at(b, (n, layout.rank), FP32 if layout.wide else dtype).float().t()
                tensor_at(out, (m, n), dtype).copy_(y + tensor_at(spare, (n,), dtype).float() if bias else y)

            self.entry, self.sum = runtime.KernelEntry(call, (), (), "test"), None

    config = launch.config_for((9, 0), 64, 4096, 4096)
    monkeypatch.setattr(product, "config_for", lambda device, m, n, k, **_: config if m <= 64 else None)
    monkeypatch.setattr(FusedMatmul, "run", with_an_adapter)
    monkeypatch.setattr(runtime, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(adapter, "inner_kernel", inner_kernel)
    monkeypatch.setattr(small_m, "SmallMKernel", Kernel)


def with_an_adapter(self, x, weight, bias, out=None, adapter=None, run=FusedMatmul.run):
    """Run the launches. A product without an adapter is bitsandbytes' own on the CPU."""
    return Reason.NOT_CUDA if adapter is None else run(self, x, weight, bias, out, adapter)


@pytest.fixture
def few(monkeypatch, device):
    """Return the device. The launches with an adapter run there."""
    monkeypatch.setattr(adapter, "_kernels", {})
    if not GPU:
        stand_in_for_the_kernels(monkeypatch)
    yield device
    torch._dynamo.reset()


def rows_of(device, *shape, dtype=BF16, seed=0):
    return lora.inputs(device, dtype, seed, (*shape, IN)).detach()


def exact(model, x):
    """Return the result in fp64."""
    layer = lora.layer_of(model)
    weight, bias = layer.base_layer.weight, layer.base_layer.bias
    w = lora.bnb.functional.dequantize_4bit(weight.data, weight.quant_state).double()
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    y = x.double() @ w.T + layer.scaling["default"] * (x.double() @ a.T) @ b.T
    return y if bias is None else y + bias.double()


@torch.no_grad()
def stock_and_ours(model, x, option="off", autocast=None):
    """Return the results of peft and of the option, and how many layers ran in the launches."""
    results = []
    for on in (False, True):
        nf4_patch.enable(matmul="auto", lora=option) if on else nf4_patch.disable()
        counters.reset()
        with torch.autocast(x.device.type, autocast or BF16, enabled=autocast is not None):
            results.append(model(x))
    hits = sum(c.hits for key, c in counters.hit_counters.items() if key[0] == TARGET and key[3] == KERNEL)
    return *results, hits


KERNEL = "fused matmul with LoRA"
# dtype of the adapter, rank, size of B, autocast, bias
CASES = {
    "bf16": (BF16, 16, 1, None, False),
    "a small adapter": (BF16, 16, 0.01, None, True),
    "autocast": (BF16, 8, 1, BF16, True),
    "fp32": (FP32, 16, 1, None, True),
    "a small adapter in fp32": (FP32, 8, 0.01, None, False),
    "fp32, autocast": (FP32, 32, 1, BF16, False),
    "rank 4": (BF16, 4, 1, None, False),
    "rank 36": (BF16, 36, 1, None, True),
    "rank 64": (BF16, 64, 1, None, False),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("option", "case"), crossed(("off", "fused"), CASES, every=3))
def test_as_accurate_as_peft(few, case, option):
    dtype, rank, size, autocast, bias = CASES[case]
    model = lora.adapted(few, adapter=dtype, biased=bias, weights=BF16, r=rank)
    lora.layer_of(model).lora_B["default"].weight.data.mul_(size)
    for seed, shape in enumerate(((1, 1), (5,), (8, 1), (2, 16), (64,))):
        x = rows_of(few, *shape, seed=seed)
        stock, ours, hits = stock_and_ours(model, x, option, autocast)
        assert hits == 1 and not fallbacks() and ours.shape == stock.shape and ours.dtype is stock.dtype
        truth = exact(model, x)
        assert (ours.double() - truth).norm() <= 1.01 * (stock.double() - truth).norm(), shape


def trained(model):
    """Run an optimizer step in place."""
    parameters = [p for name, p in model.named_parameters() if "lora_" in name]
    for p in parameters:
        p.grad = torch.randn_like(p)
    torch.optim.SGD(parameters, lr=0.1).step()


def loaded(model):
    peft.set_peft_model_state_dict(model, {k: 2 * v for k, v in peft.get_peft_model_state_dict(model).items()})


def rescaled(model):
    lora.layer_of(model).set_scale("default", 3)


def resized(model):
    """Replace the adapter by another one of the same name and of another rank."""
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["fc0"]))
    model.set_adapter("other")
    model.delete_adapter("default")
    model.add_adapter("default", peft.LoraConfig(r=12, lora_alpha=5, target_modules=["fc0"]))
    model.set_adapter("default")
    lora.randomize(model, BF16, seed=9)


def other_memory(model):
    for factor in ("lora_A", "lora_B"):
        part = getattr(lora.layer_of(model), factor)["default"]
        part.weight = torch.nn.Parameter(part.weight.detach() * 2)


CHANGES = (trained, loaded, rescaled, resized, other_memory)


@pytest.mark.every(2)
@pytest.mark.parametrize(("option", "change"), crossed(("off", "fused"), CHANGES))
def test_a_changed_adapter_is_used_at_the_next_call(few, change, option):
    model, x = lora.adapted(few), rows_of(few, 8)
    before = stock_and_ours(model, x, option)[1]
    change(model)
    stock, ours, hits = stock_and_ours(model, x, option)
    assert hits == 1 and lora.apart(ours, stock) < 1e-2 < lora.apart(before, stock)


def several(model):
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["fc0"]))
    lora.randomize(model, BF16, seed=5)
    lora.layer_of(model).set_adapter(["default", "other"])


def unaligned(model):
    part = lora.layer_of(model).lora_A["default"]
    values = torch.empty(part.weight.numel() + 1, dtype=BF16, device=part.weight.device)[1:].view(part.weight.shape)
    part.weight = torch.nn.Parameter(values.copy_(part.weight.detach()))


def strided(model):
    part = lora.layer_of(model).lora_B["default"]
    part.weight = torch.nn.Parameter(part.weight.detach().t().contiguous().t())


def fp32_bias(model):
    base = lora.layer_of(model).base_layer
    base.compute_dtype, base.bias = FP32, torch.nn.Parameter(torch.randn(OUT, device=base.weight.device))


NO_CHANGE = lora.as_it_is
REFUSED = {  # options of the adapter and the input, a change, and the Reason
    "several adapters": ({}, several, Reason.LORA_OPERANDS),
    "dropout": ({"lora_dropout": 0.5}, NO_CHANGE, Reason.LORA_OPERANDS),
    "rank 6": ({"r": 6}, NO_CHANGE, Reason.LORA_OPERANDS),
    "rank 132": ({"r": 132}, NO_CHANGE, Reason.LORA_OPERANDS),
    "unaligned": ({}, unaligned, Reason.LORA_OPERANDS),
    "strided": ({}, strided, Reason.LORA_OPERANDS),
    "DoRA": ({"use_dora": True}, NO_CHANGE, Reason.LORA_VARIANT),
    "a hook": ({}, lora.with_hook("lora_B"), Reason.LORA_HOOKED),
    "x in fp32": ({"x": FP32}, NO_CHANGE, Reason.LORA_DTYPES),
    "x in fp16": ({"x": FP16}, NO_CHANGE, Reason.LORA_DTYPES),
    "computes in fp32": ({}, fp32_bias, Reason.LORA_DTYPES),
    "65 rows": ({"rows": 65}, NO_CHANGE, Reason.NOT_FASTER),
    "no rows": ({"rows": 0}, NO_CHANGE, Reason.NOT_FASTER),
    "merged": ({}, lambda model: model.merge_adapter(), Reason.LORA_INACTIVE),
    "disabled": ({}, lambda model: model.base_model.disable_adapter_layers(), Reason.LORA_INACTIVE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_pefts(few, case):
    """Results are bit-identical if bitsandbytes multiplies by the base weight."""
    options, change, reason = REFUSED[case]
    options = dict(options)
    x = rows_of(few, options.pop("rows", 8), dtype=options.pop("x", BF16))
    adapter_dtype = FP32 if x.dtype is FP16 else BF16
    model = lora.adapted(few, adapter=adapter_dtype, **options)
    change(model)
    results = []
    for on in (False, True):
        nf4_patch.enable(matmul="auto") if on else nf4_patch.disable()
        counters.reset()
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(model(x))
    assert fallbacks(TARGET) == {reason: 1}
    assert lora.apart(*results) < 1e-2 if GPU else torch.equal(*results)


@pytest.mark.parametrize(
    ("field", "value", "reason"), [("absmax", None, "STATE_FIELDS"), ("blocksize", 48, "BLOCKSIZE")]
)
def test_a_damaged_state_is_named(few, field, value, reason):
    model, x = lora.adapted(few), rows_of(few, 8)
    layer = lora.layer_of(model)
    setattr(layer.base_layer.weight.quant_state, field, value)
    nf4_patch.enable(matmul="auto")
    with torch.no_grad(), contextlib.suppress(Exception):  # bitsandbytes' own
        layer(x)
    assert fallbacks(TARGET) == {Reason[reason]: 1}


def test_a_shape_that_is_a_list(few):
    model, x = lora.adapted(few), rows_of(few, 8)
    state = lora.layer_of(model).base_layer.weight.quant_state
    want = stock_and_ours(model, x)[1]
    state.shape = list(state.shape)
    got, hits = stock_and_ours(model, x)[1:]
    assert hits == 1 and torch.equal(got, want)


def test_adapter_names_are_pefts(few):
    model, x = lora.adapted(few), rows_of(few, 2)
    nf4_patch.enable(matmul="auto")
    with torch.no_grad():
        lora.layer_of(model).eval()(x, adapter_names=["default", "__base__"])
    assert fallbacks(TARGET) == {Reason.LORA_INACTIVE: 1}


@LORA
def test_a_gradient_is_pefts_or_the_one_function(few, option):
    model, x = lora.adapted(few), rows_of(few, 8)
    nf4_patch.enable(matmul="auto", lora=option)
    y = model(x)
    assert y.requires_grad and not sum(
        c.hits for key, c in counters.hit_counters.items() if key[0] == TARGET and key[3] == KERNEL
    )
    assert fallbacks(TARGET) == ({Reason.MATMUL_OPERANDS: 1} if option == "off" else {})
    for p in model.parameters():
        p.requires_grad_(False)
    counters.reset()
    assert not model(x).requires_grad and counters.hits(TARGET) == 1


def test_kernels_that_are_not_compiled_before_a_capture(few, monkeypatch):
    """The first call inside a capture runs peft's forward and is counted. Later calls compile the kernels."""
    model, x = lora.adapted(few), rows_of(few, 8)
    resolve = adapter.resolve

    def in_capture(*arguments):
        raise runtime.KernelUnavailable("a capture", "GRAPH_CAPTURE")

    nf4_patch.enable(matmul="auto")
    with torch.no_grad():
        monkeypatch.setattr(adapter, "resolve", in_capture)
        model(x)
        assert fallbacks(TARGET) == {Reason.GRAPH_CAPTURE: 1} and not counters.hits(TARGET)
        monkeypatch.setattr(adapter, "resolve", resolve)
        model(x)
        assert counters.hits(TARGET) == 1


# --- torch.compile ---


def compiled(model):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if not GPU else "inductor")
    return torch.compile(model, backend=counter, fullgraph=True), counter


def ops(counter):
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if "nf4_patch" in name]


@pytest.mark.full
@pytest.mark.parametrize(("option", "dtype"), crossed(("off", "fused"), (BF16, FP32)), ids=str)
def test_compiled_it_is_one_op(few, dtype, option):
    """The compiled call makes one graph, with the bits of the eager call and the adapter of the latest optimizer step."""
    model, x = lora.adapted(few, adapter=dtype, layers=2), rows_of(few, 8)
    nf4_patch.enable(matmul="auto", lora=option)
    step, counter = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            assert lora.apart(step(x), model(x)) < 1e-2
            trained(model)
    assert counter.frame_count == 1 and ops(counter) == ["nf4_patch.matmul_lora_4bit"] * 2


@pytest.mark.full
@pytest.mark.parametrize("case", thinned(("65 rows", "rank 6", "x in fp32", "several adapters", "disabled"), 2))
def test_compiled_what_is_refused_is_pefts(few, case, monkeypatch):
    options, change, _ = REFUSED[case]
    options = dict(options)
    x = rows_of(few, options.pop("rows", 8), dtype=options.pop("x", BF16))
    model = lora.adapted(few, **options)
    change(model)
    with torch.no_grad():
        want = model(x)
        nf4_patch.enable(matmul="auto")
        step, counter = compiled(model)
        monkeypatch.setattr(FusedMatmul, "run", raising(AssertionError("the op runs")))
        assert lora.apart(step(x), want) < 1e-2
    assert counter.frame_count == 1


@pytest.mark.full
def test_compiled_with_any_number_of_rows(few):
    """A second number of rows compiles once more. Every further number runs in that graph."""
    model = lora.adapted(few)
    nf4_patch.enable(matmul="auto")
    step, counter = compiled(model)
    with torch.no_grad():
        for rows in (8, 5, 3, 64):
            x = rows_of(few, rows)
            assert lora.apart(step(x), model(x)) < 1e-2
    assert counter.frame_count == 2 and ops(counter) == ["nf4_patch.matmul_lora_4bit"] * 2


def test_compiled_training_is_pefts(few):
    model, x = lora.adapted(few), rows_of(few, 8)
    nf4_patch.enable(matmul="auto")
    step, counter = compiled(model)
    step(x).sum().backward()
    assert not [name for name in ops(counter) if "lora" in name]


def test_the_op_computes_without_the_kernels(few, monkeypatch):
    """A graph that was compiled on another machine cannot run the original."""
    model, x = lora.adapted(few, adapter=FP32, biased=True), rows_of(few, 8)
    nf4_patch.enable(matmul="auto")
    step, _ = compiled(model)
    with torch.no_grad():
        want = step(x)
        monkeypatch.setattr(FusedMatmul, "resolve", lambda *arguments: Reason.KERNEL_FAILED)
        assert lora.apart(step(x), want) < 1e-2
