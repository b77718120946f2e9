"""Faults with packed experts: an error in nf4_patch's forward or in the original, or a stack that changes before the backward."""

from __future__ import annotations

import contextlib
import functools
import re

import pytest
import torch
from alternation import crossed
from changes import CHANGES, UNSEEN
from target import raising
from tiny_experts import DEVICE, STACKS, Layer, adapters_of, hits, ids_of, model_of, reasons, step, with_lora
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.parametrize import remove_parametrizations

from nf4_patch.cache.store import cache
from nf4_patch.libraries.bitsandbytes.stacks import stacks_of
from nf4_patch.libraries.transformers import experts as adapter
from nf4_patch.moe import launch
from nf4_patch.moe.read import PackedExperts
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason

ON = {"experts": "4bit"}


# One of each kind of what runs in the forward, by the implementation that it serves; how often in a step.
OURS = {
    "stacks_of": (adapter, "grouped_mm", 1),  # before the original
    "of_state": (Dequantizer, "grouped_mm", 4),  # where a stack is read
    "select": (PackedExperts, "batched_mm", 2),
}


def run_of(layer: Layer, implementation: str):
    """Return the layer's method that the implementation supports: a training step, or a forward without gradients."""
    layer.experts.config._experts_implementation = implementation
    if implementation == "grouped_mm":
        return layer.step

    def forward():
        with torch.no_grad():
            return [layer.forward()]

    return forward


@pytest.mark.parametrize("name", OURS)
def test_an_error_of_ours_stops_no_training(name, on, monkeypatch):
    owner, implementation, times = OURS[name]
    layer, used = Layer(), []
    run = run_of(layer, implementation)
    layer.experts.act_fn.register_forward_hook(lambda *_: used.append(1))
    stock = layer.stock(run)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(AssertionError("a bug")))
        ours = run()
    assert all(map(torch.equal, ours, stock)) and len(used) == 2
    assert reasons(implementation) == {Reason.INTERNAL_ERROR: times} and "AssertionError: a bug" in counters.errors


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_what_the_original_raises_is_its_own(implementation, patched):
    layer, used = Layer(), []
    run = run_of(layer, implementation)

    def fail(*_):
        used.append(1)
        raise LookupError("the user's")

    handle = layer.experts.act_fn.register_forward_hook(fail)
    with pytest.raises(LookupError, match="the user's"):
        run()
    assert len(used) == 1 and not reasons(implementation)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    handle.remove()
    assert all(map(torch.equal, run(), layer.stock(run)))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU stops at it, with or without the patch")
def test_an_expert_that_does_not_exist(on):
    layer = Layer()
    run = run_of(layer, "batched_mm")
    layer.ids = layer.ids + 6
    with pytest.raises(IndexError):
        run()


# --- between forward and backward ---


class Holder:
    """The tensors of one packed stack that the table of changes modifies."""

    def __init__(self, layer):
        self.layer, self.chain = layer, layer.chain()

    packed = property(lambda self: self.chain.original, lambda self, packed: setattr(self.chain, "original", packed))
    state = property(
        lambda self: self.chain[0].quant_state, lambda self, state: setattr(self.chain[0], "quant_state", state)
    )


WRITING = [name for name in CHANGES if re.search("in place|through|copied|out=|set_", name)]
REPLACING = {name: change for name, change in CHANGES.items() if name not in (*WRITING, *UNSEEN)} | {
    "moved away": lambda at: setattr(at.packed, "data", at.packed.data.new_empty(0)),
    "unpacked": lambda at: remove_parametrizations(at.layer.experts, STACKS[0], leave_parametrized=False),
}


@functools.cache
def stock():
    return Layer().stock()


@pytest.mark.every(2)
@pytest.mark.parametrize(("size", "change"), crossed(("off", "1GiB"), REPLACING, every=3))
def test_what_is_replaced_before_the_backward_is_not_what_it_reads(change, size, patched):
    _, want = stock()
    layer = Layer()
    patched.enable(cache=size)
    output = layer.forward()
    REPLACING[change](Holder(layer))
    assert torch.equal(layer.gradient(output), want) and not reasons() and (size != "off" or hits() == 4)


@pytest.mark.parametrize(("hooks", "change"), crossed((contextlib.nullcontext, save_on_cpu), WRITING, every=3))
def test_what_is_written_before_the_backward_is_refused(change, hooks, patched):
    """Autograd refuses the backward. If hooks copied the saved tensors, autograd does not check, and nf4_patch refuses it."""
    layer = Layer()
    with hooks():
        output = layer.forward()
    CHANGES[change](Holder(layer))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        layer.gradient(output)
    assert not reasons()


FREED = {
    "packed": lambda layer: layer.chain().original,
    "absmax": lambda layer: layer.chain()[0].quant_state.absmax,
    "absmax2": lambda layer: layer.chain()[0].quant_state.state2.absmax,
    "code2": lambda layer: layer.chain()[0].quant_state.state2.code,
    "offset": lambda layer: layer.chain()[0].quant_state.offset,
}


@pytest.mark.parametrize("name", FREED)
def test_what_is_freed_before_the_backward_is_refused(name, patched):
    layer = Layer()
    output = layer.forward()
    FREED[name](layer).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed between forward and backward"):
        layer.gradient(output)


def test_what_is_freed_and_filled_again(patched):
    """FSDP frees a layer's memory after the forward and fills it again before the backward."""
    layer = Layer()
    stock, output = layer.stock(), layer.forward()
    storage = layer.chain().original.untyped_storage()
    kept = storage.clone()
    storage.resize_(0)
    storage.resize_(kept.nbytes())
    storage.copy_(kept)
    assert torch.equal(layer.gradient(output), stock[1])


def test_a_packed_weight_that_requires_a_gradient(patched):
    """Only packed bytes that are stored as floating point can require a gradient."""
    layer = Layer()
    for name in STACKS:
        chain = layer.chain(name)
        chain.original = torch.nn.Parameter(chain.original.view(-1).view(torch.bfloat16).view(-1, 1))
        assert chain.original.requires_grad

    def step():
        result = layer.step()
        assert all(layer.chain(name).original.grad is None for name in STACKS)
        assert not getattr(layer.experts, STACKS[0]).requires_grad
        return result

    ours = step()
    assert all(map(torch.equal, ours, layer.stock(step))) and hits() == 4 and not reasons()
    patched.disable()  # bitsandbytes itself gives a dense weight that requires one, where nobody says no_grad
    assert not any(stack.dense().requires_grad for stack in stacks_of(layer.experts, Dequantizer("a test")).values())


def test_double_backward(patched):
    """The products with the stacks are linear, so only the operations between them have a second derivative."""
    layer = Layer()

    def second():
        (first,) = torch.autograd.grad(layer.forward().float().square().sum(), layer.hidden, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), layer.hidden)

    assert all(map(torch.equal, second(), layer.stock(second))) and not reasons()


# --- compiled autograd ---


@pytest.mark.full
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("around", "backend"), [pytest.param("the step", "aot_eager", marks=pytest.mark.full), ("the backward", "eager")]
)
def test_compiled_autograd_traces_the_backward_as_without_the_patch(around, backend, patched):
    compiled = torch._dynamo.compiled_autograd._enable
    layer = Layer()
    want = layer.stock()

    def two_steps() -> tuple[list[torch.Tensor], int]:
        torch._dynamo.reset()
        graphs, results = CompileCounterWithBackend(backend), []
        for _ in range(2):
            with compiled(torch.compile(backend=graphs)) if around == "the step" else contextlib.nullcontext():
                output = layer.forward()
            layer.hidden.grad = None
            with compiled(torch.compile(backend=graphs)):
                output.float().square().sum().backward()
            results += [output.detach(), layer.hidden.grad]
        return results, graphs.frame_count

    ours, graphs = two_steps()
    stock, stock_graphs = layer.stock(two_steps)
    assert graphs == stock_graphs == 1 and not reasons()
    assert all(map(torch.equal, ours, stock)) and all(map(torch.equal, ours, want * 2))
    assert hits() == 4  # of the forwards: what is traced is not counted


@pytest.mark.full
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_autograd_around_the_backward_of_the_kernels(patched, monkeypatch):
    """With LoRA on both stacks, gradients equal those of the kernels' own backward, up to rounding in bf16."""
    monkeypatch.setattr(launch, "supports", lambda tensor: True)
    model = with_lora(model_of("qwen3", torch.bfloat16, lora=False))
    model.enable_input_require_grads()
    want = step(model, tokens=4)
    model.zero_grad()
    loss = model(input_ids=ids_of(4), labels=ids_of(4)).loss
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    found = {name: each.grad for name, each in adapters_of(model).items()}
    assert found.keys() <= want.keys() and not reasons()
    for name, gradient in found.items():
        assert (gradient - want[name]).norm() <= 2**-6 * want[name].norm(), name


def test_cached_experts_without_a_gradient(patched):
    layer = Layer()
    patched.enable(experts="4bit", cache="1GiB")
    with torch.no_grad():
        ours = [layer.forward(), layer.forward()]
    assert not reasons() and hits() == 2 and len(cache.weights) == 2 == cache.hits
    assert all(torch.equal(output, layer.stock()[0]) for output in ours)


def test_where_hooks_are_forbidden(patched):
    layer = Layer()
    want = layer.stock()[0]
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert torch.equal(layer.forward(), want)
    assert not reasons() and hits() == 2
