"""Cached weights in layers that are compiled as a whole, and in modules under ``torch.compile``.

Without a GPU the kernel runs under the interpreter. The layers are entered as Unsloth's are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import sys
import threading

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from oracle import layout_of
from target import linear, same, step
from threads import together
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from unsloth_releases import with_unsloth

import nf4_patch
from nf4_patch import dequantize_nf4
from nf4_patch.cache.option import Uncached
from nf4_patch.cache.pinned import NAME, Layers, dense_of
from nf4_patch.cache.store import StaleWeightError, cache
from nf4_patch.nf4 import runtime
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDE = 64


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_every_change_of_a_weight_is_noticed_by_unsloths_layers(checkpointing, tmp_path):
    assert with_unsloth("2026.10.9", tmp_path, "pinned_unsloth", checkpointing).split()[-1] == "pinned"


def weight_layer(seed, inputs=SIDE):
    return linear(DEVICE, inputs, SIDE, seed=seed, weights=torch.bfloat16)


def activations():
    return torch.linspace(-1, 1, 8 * SIDE, device=DEVICE).view(8, SIDE).bfloat16().requires_grad_()


class Decode(torch.autograd.Function):
    """x @ weight.T, which dequantizes in both directions as Unsloth's functions do."""

    @staticmethod
    def forward(ctx, x, packed, state):
        ctx.state = state
        ctx.save_for_backward(packed)
        return x @ dense(packed, state).t()

    @staticmethod
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        return grad @ dense(packed, ctx.state), None, None


def dense(packed, state):
    found = dense_of(packed, state)
    return Dequantizer("a test").trace(packed, state) if found is None else found


class Layer(torch.nn.Module):
    def __init__(self, layers=2, first=0):
        super().__init__()
        self.parts = torch.nn.ModuleList(weight_layer(seed) for seed in range(first, first + layers))
        self.scale = torch.nn.Parameter(torch.rand(SIDE, device=DEVICE))

    def forward(self, x):
        for part in self.parts:
            x = torch.nn.functional.silu(Decode.apply(x, part.weight, part.weight.quant_state))
        return x * self.scale.to(x.dtype)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def enter():
    """Return a training step through a compiled layer, which returns the gradients of the input and of the parameter."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(Layer.forward, backend="aot_eager", fullgraph=True)
    entry = Layers("a test").entered(compiled)

    def step(layer, through=entry):
        layer.zero_grad()
        x = activations()
        through(layer, x).float().square().sum().backward()
        return x.grad, layer.scale.grad.clone()

    step.entry, step.plain = entry, functools.partial(step, through=compiled)
    return step


def test_a_layer_that_does_not_fit_as_a_whole_dequantizes_in_its_graph(enter):
    """It runs the same graph as without a cache, also while "auto" waits. A class of layers has at most two graphs."""
    layer = Layer()
    nf4_patch.enable(cache=f"{SIDE * SIDE * 2}B")
    first = enter(layer)
    assert cache.snapshot().compiled == cache.misses == 0 and cache.uncached == {Uncached.BUDGET_SPENT: 1}
    enter(layer)
    assert (
        cache.uncached == {Uncached.BUDGET_SPENT: 1} or DEVICE.type == "cuda"
    )  # the cache is asked again only when there may be room
    nf4_patch.enable(cache="auto")
    enter(layer)
    assert cache.uncached[Uncached.WAITING] == 1 and graphs() == 1
    nf4_patch.enable(cache=2**30)
    assert same(enter(layer), first) and cache.snapshot().compiled == 2
    assert same(enter.plain(layer), first) and graphs() == 2


def test_a_module_that_is_added_later_is_read_right(enter):
    layer = Layer()
    nf4_patch.enable(cache=2**30)
    enter(layer)
    layer.parts.append(weight_layer(9))
    for _ in range(2):
        assert same(enter(layer), enter.plain(layer))
        layer.parts[-1].weight.data.bitwise_xor_(255)


def test_modules_that_layers_share_or_use_twice(enter):
    """Each weight is cached and charged once."""
    first, second = Layer(), Layer(first=3)
    nf4_patch.enable(cache=2**30)
    enter(first)
    first.parts.append(first.parts[0])
    second.parts.append(first.parts[0])
    second.parts.append(weight_layer(9))
    for _ in range(2):
        for layer in (first, second):
            assert same(enter(layer), enter.plain(layer))
        assert cache.snapshot().compiled == 5
        with torch.no_grad():
            first.parts[0].weight.bitwise_xor_(255)
    size = next(iter(cache.weights.values())).size
    assert cache.taken.total() - sum(kept.size for kept in cache.dropped) == 5 * size


@pytest.mark.parametrize("thread", ["this", "another"])
def test_a_layer_is_entered_while_another_call_runs(thread):
    """A layer inside the first one, or the same layer in another thread, which waits. The first call still reads its cached weights."""
    outer, read, inside, left = Layer(1), [], threading.Event(), threading.Event()
    other = Layer(1, first=1) if thread == "this" else outer

    def forward(layer, x):
        weight = layer.parts[0].weight
        if not inside.is_set():
            inside.set()
            entry(other, x) if thread == "this" else left.wait(0.5)
        read.append(dense_of(weight, weight.quant_state))
        return x

    def enter_as_well():
        inside.wait()
        if thread == "another":
            entry(other, activations())
            left.set()

    entry = Layers("a test").entered(forward)
    nf4_patch.enable(cache=2**30)
    together(lambda: entry(outer, activations()), enter_as_well)
    held = {cached.views[0].data_ptr() for cached in cache.weights.values()}
    assert len(read) == 2 and all(dense is not None and dense.data_ptr() in held for dense in read)
    assert not any(NAME in vars(layer.parts[0].weight.quant_state) for layer in (outer, other))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="streams are made up here")
def test_an_entry_on_another_stream_decodes(enter, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)  # see is_captured
    layer = Layer()
    nf4_patch.enable(cache=2**30)
    for stream, pinned in ((7, 0), (0, 2)):
        monkeypatch.setattr(runtime, "current_stream", lambda device, stream=stream: stream)
        enter.entry(layer, activations())
        assert cache.snapshot().compiled == pinned and cache.uncached == {Uncached.OTHER_STREAM: 1}
        for each in layer.parts if stream else ():  # a copy that was decoded there is not read here
            Dequantizer("a test").of_state(each.weight, each.weight.quant_state, only_read=True)
    assert {kept.stream for kept in cache.weights.values()} == {0}


def test_a_layer_reads_from_the_cache_in_training_and_not_in_evaluation():
    """Hooks on saved tensors that belong to no checkpoint make no difference."""
    layer, entry = Layer(1), Layers("a test").entered(lambda layer, x: x)
    nf4_patch.enable(cache=2**30)
    for training in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            entry(layer.train(training), activations())
        assert cache.snapshot().compiled == training and not cache.uncached


def test_a_layer_that_is_freed_drops_cached_weights_whose_parameters_live_on():
    """A copy of a bitsandbytes parameter refers to the module of the original, and so keeps the original alive."""
    layer, entry = Layer(1), Layers("a test").entered(lambda layer, x: x)
    nf4_patch.enable(cache=2**30)
    entry(layer, activations())
    assert cache.snapshot().compiled == 1
    part = layer.parts[0]
    del layer
    gc.collect()
    assert cache.snapshot().compiled == 0 and part.weight is not None


def test_a_state_that_is_copied_while_its_layer_runs_keeps_no_dense_copy():
    """The copied state may belong to another parameter, and be read while another layer runs."""
    layer, copies, found = Layer(1), [], []
    weight = layer.parts[0].weight

    def copies_it(module, x):
        assert dense_of(weight, weight.quant_state) is not None
        copies.append(copy.copy(weight.quant_state))
        return x

    def reads_it(module, x):
        found.append(dense_of(weight, copies[0]))
        return x

    nf4_patch.enable(cache="1GiB")
    Layers("a test").entered(copies_it)(layer, activations())
    Layers("a test").entered(reads_it)(Layer(1, first=5), activations())
    assert found == [None]


def test_weights_made_under_inference_mode_are_refused_by_name(enter):
    with torch.inference_mode():
        layer = Layer()
    layer.scale = torch.nn.Parameter(torch.rand(SIDE, device=DEVICE))
    nf4_patch.enable(cache=2**30)
    with torch.no_grad():
        enter.entry(layer, activations())
    assert cache.uncached == {Uncached.INFERENCE_TENSOR: 1} and not counters.errors


def off_and_on():
    nf4_patch.disable()
    nf4_patch.enable(cache=2**30)


SWITCHED = nf4_patch.disable, off_and_on, lambda: cache.set_budget(0)


def test_what_changes_between_forward_and_backward(enter):
    layer = Layer(1)
    want = enter.plain(layer)
    for reentrant, between in itertools.product((None, True, False), (nf4_patch.release, *SWITCHED)):
        nf4_patch.disable()
        nf4_patch.enable(cache=2**30)
        cache.uncached.clear()
        enter(layer)
        layer.zero_grad()
        x = activations()
        y = enter.entry(layer, x) if reentrant is None else checkpoint(enter.entry, layer, x, use_reentrant=reentrant)
        assert reentrant is not False or cache.uncached[Uncached.CHECKPOINT]
        between()
        if reentrant is None:  # the backward graph still uses the dense copies
            assert cache.snapshot().taken
        y.float().square().sum().backward()
        assert same((x.grad, layer.scale.grad), want)
        del y
        assert reentrant is not None or not cache.snapshot().taken


def test_a_fake_tensor_never_stays(enter):
    layer = Layer()
    nf4_patch.enable(cache=2**30)
    # on a GPU PyTorch 2.11 itself raises
    with contextlib.suppress(TypeError), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        enter.entry(layer, activations())
    assert not cache.weights and same(enter(layer), enter.plain(layer))


def test_strict_mode_notices_a_write_that_no_version_counter_sees(enter, monkeypatch):
    layer = Layer()
    monkeypatch.setenv("NF4_PATCH_STRICT", "1")
    nf4_patch.enable(cache=2**30)
    enter(layer)
    layer.parts[0].weight.data.copy_(layer.parts[1].weight.data)
    with pytest.raises(StaleWeightError):
        enter(layer)


def test_a_layer_with_a_weight_that_cannot_be_cached_drops_all(enter):
    layer = Layer()
    nf4_patch.enable(cache=2**30)
    want = enter(layer)
    storage = layer.parts[1].weight.untyped_storage()
    storage.resize_(storage.nbytes())  # as FSDP frees and refills it
    assert same(enter(layer), want)
    assert cache.snapshot().compiled == 0 and cache.uncached == {Uncached.REFILLED: 1}


def test_compiled_layers_and_other_readers_share_one_budget(enter):
    layers = [Layer(), Layer(first=3)]
    nf4_patch.enable(cache=2**30)
    enter(layers[0])
    size = cache.taken.total()
    nf4_patch.enable(cache=f"{2 * size}B")
    enter(layers[0])
    part = layers[1].parts[0]
    others = [part, *(weight_layer(seed, inputs=32) for seed in range(20, 28))]

    def read(other):
        with torch._C.DisableTorchFunctionSubclass():
            weight = layout_of(other.weight, other.weight.quant_state)
            return cache.read(weight, lambda _: dequantize_nf4(other.weight.data, other.weight.quant_state))

    for other in others:
        read(other)
    kept = read(part)
    enter(layers[1])  # no room for one of its weights; the other one stays, because it was cached for another reader
    assert cache.snapshot().compiled == 2 and read(part) is kept is not None
    assert cache.uncached[Uncached.BUDGET_SPENT]
    del others[1:], other
    gc.collect()
    enter(layers[1])
    assert cache.snapshot().compiled == 4 and read(part) is kept
    assert cache.taken.total() <= cache.budget


# What torch.compile of a module does: the forward reads inside bitsandbytes' op, the traced backward dequantizes.


@pytest.fixture
def compiled(linear_op, fresh_dynamo):
    layer = weight_layer(0)
    return layer, torch.compile(layer, backend="aot_eager", fullgraph=True)


forward_and_backward = functools.partial(step, device=DEVICE, inputs=SIDE)


def test_a_compiled_layer_in_a_checkpoint_while_the_cache_changes(compiled):
    layer, module = compiled
    want = forward_and_backward(layer)
    for between in SWITCHED:
        nf4_patch.enable(cache=2**30)

        def checkpointed(x, between=between):
            y = checkpoint(module, x, use_reentrant=False)
            between()
            return y

        assert same(forward_and_backward(checkpointed), want)


def test_five_lengths_make_as_many_graphs_as_without_a_cache(compiled):
    """The compiled forward reads from the cache, and its traced backward dequantizes. Both eager passes read from the cache."""
    layer, module = compiled
    made = []
    for options in ({}, {"cache": 2**30}):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        nf4_patch.enable(**options)
        for rows in (600, 601, 602, 603, 604):
            assert same(forward_and_backward(module, rows=rows), forward_and_backward(layer, rows=rows))
        made.append(graphs())
    assert made[0] == made[1]
    assert (cache.misses, cache.hits, cache.snapshot().compiled) == (1, 5 * 3 - 1, 0)


def test_no_rows_and_another_librarys_wrapper_break_no_graph(compiled, monkeypatch):
    _, module = compiled
    nf4_patch.enable(cache=2**30)
    y, grad = forward_and_backward(module, rows=0)
    assert y.shape == (0, SIDE) and grad.shape == (0, SIDE)
    ours, want = F.dequantize_4bit, forward_and_backward(module)
    for theirs in (ours, ours.__wrapped__):  # over ours, and in its place
        torch._dynamo.reset()
        monkeypatch.setattr(F, "dequantize_4bit", lambda *args, theirs=theirs, **kwargs: theirs(*args, **kwargs) * 1)
        assert same(forward_and_backward(module), want)


def test_a_module_that_was_called_before_it_was_quantized(fresh_dynamo, linear_op):
    layer = bnb.nn.Linear4bit(SIDE, SIDE, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).bfloat16()
    module = torch.compile(layer, backend="aot_eager")
    nf4_patch.enable(cache=2**30)
    with pytest.raises(AssertionError):  # bitsandbytes' own
        forward_and_backward(module)
    layer.to(DEVICE)
    for _ in range(2):
        assert same(forward_and_backward(module), forward_and_backward(layer))
    assert (cache.misses, cache.hits) == (1, 5)  # the compiled forward, and both passes of the other


def test_a_hook_that_writes_into_the_weight(compiled):
    layer, _ = compiled
    nf4_patch.enable(cache=2**30)

    def flip(*_):
        with torch.no_grad():
            layer.weight.bitwise_xor_(255)

    forward_and_backward(layer)
    flip()
    want = forward_and_backward(layer)
    flip()
    layer.register_forward_pre_hook(flip)
    torch._dynamo.reset()
    assert same(forward_and_backward(torch.compile(layer, backend="aot_eager")), want)


def test_a_compiled_module_under_a_dispatch_mode_is_counted(compiled):
    layer, _ = compiled
    module = torch.compile(layer, backend="aot_eager")
    nf4_patch.enable()
    want = forward_and_backward(module)
    counters.reset()
    with FlopCounterMode(display=False):
        got = forward_and_backward(module)
    assert same(got, want)
    assert counters.hits("bitsandbytes.backends.cuda.ops._dequant_linear_fallback") == 1 and not counters.fallbacks
