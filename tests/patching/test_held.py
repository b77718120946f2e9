"""Weights held for compiled modules and Unsloth's compiled layers. Without a GPU the kernel is under the interpreter."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from functorch.compile import make_boxed_func
from target import linear, same
from torch._functorch.aot_autograd import aot_module_simplified
from unsloth_releases import with_unsloth

import nf4_patch
from nf4_patch import dequantize_nf4
from nf4_patch.patching.cache.cache import StaleWeightError, cache
from nf4_patch.patching.cache.held import Held
from nf4_patch.patching.quant_state import fields_of
from nf4_patch.patching.reasons import Uncached
from nf4_patch.patching.switch import switch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

WAYS = ["none", *(pytest.param(way, marks=pytest.mark.full) for way in ("reentrant", "non-reentrant"))]


@pytest.mark.parametrize("checkpointing", WAYS)
def test_every_change_of_a_weight_is_noticed(checkpointing, tmp_path):
    assert with_unsloth("2026.10.9", tmp_path, "held_unsloth", checkpointing).split()[-1] == "held"


class Model(torch.nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(linear(DEVICE, 64, 64, seed=seed) for seed in range(layers))
        self.scale = torch.nn.Parameter(torch.rand(64, device=DEVICE))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.silu(layer(x)) * self.scale.to(x.dtype)
        return x


@pytest.fixture
def compiled():
    """A model that is compiled without a break, its step, and how often each backward graph dequantizes."""
    torch._dynamo.reset()
    model, backwards = Model(), []

    def keep(graph, inputs):
        backwards.append(graph.code.count("dequantize_nf4.default("))
        return make_boxed_func(graph.forward)

    backend = functools.partial(
        aot_module_simplified, fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep
    )
    module = torch.compile(model, backend=backend, fullgraph=True)

    def step():
        model.zero_grad()
        x = torch.linspace(-1, 1, 64 * 8, device=DEVICE).view(8, 64).half().requires_grad_()
        module(x).float().square().sum().backward()
        return x.grad, model.scale.grad.clone()

    return model, step, backwards


def test_the_backward_of_a_compiled_module_reads_what_is_held(compiled):
    model, step, backwards = compiled
    nf4_patch.enable(cache="off")
    step()
    assert backwards == [3]
    gate = switch.gates["cache"]

    def without():
        gate.on = False
        try:
            return step()
        finally:
            gate.on = True

    nf4_patch.enable(cache=2**30)
    backwards.clear()
    for change in (
        lambda: None,
        lambda: model.layers[0].load_state_dict({"weight": model.layers[0].weight.flip(0)}, strict=False),
        lambda: setattr(model.layers[1], "weight", linear(DEVICE, 64, 64, seed=7).weight),
        lambda: model.layers[2].weight.quant_state.offset.mul_(2),
        nf4_patch.release,
    ):
        change()
        for _ in range(2):
            got = step()
            assert cache.snapshot().compiled == 3
            assert same(got, without())
    assert sorted(backwards) == [0, 3]  # a graph each, whatever changed


def test_what_does_not_fit_as_a_whole_is_dequantized_in_the_graph(compiled):
    _, step, backwards = compiled
    nf4_patch.enable(cache=f"{2 * 64 * 64 * 2}B")
    first = step()
    assert backwards == [3]
    assert cache.snapshot().compiled == 0
    assert cache.uncached[Uncached.BUDGET_SPENT]
    nf4_patch.enable(cache=2**30)
    assert same(step(), first)
    assert backwards == [3, 0]


def test_a_copy_of_a_state_is_not_what_it_was_copied_from(compiled):
    model, step, _ = compiled
    nf4_patch.enable(cache=2**30)
    step()
    state = model.layers[0].weight.quant_state
    copied = copy.copy(state)
    assert Held.of(copied) is not Held.of(state)
    assert Held.of(copied).dense is None
    assert Held.of(state).dense is not None
    assert copy.deepcopy(Held.of(state)).dense is None


def test_strict_mode_notices_a_write_that_no_version_counter_sees(compiled, monkeypatch):
    model, step, _ = compiled
    monkeypatch.setenv("NF4_PATCH_STRICT", "1")
    nf4_patch.enable(cache=2**30)
    step()
    model.layers[0].weight.data.copy_(model.layers[1].weight.data)
    with pytest.raises(StaleWeightError):
        step()


def test_a_module_with_a_weight_that_cannot_be_held_lets_go_of_all(compiled):
    model, step, backwards = compiled
    nf4_patch.enable(cache=2**30)
    want = step()
    storage = model.layers[1].weight.untyped_storage()
    storage.resize_(storage.nbytes())  # as FSDP frees and refills it
    assert same(step(), want)
    assert cache.snapshot().compiled == 0
    assert not any(cache.never_evicted.values())
    assert cache.uncached[Uncached.REFILLED]
    assert backwards == [0, 3]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="memory at an address of one's choice")
@pytest.mark.parametrize(("nested", "name"), [(False, "absmax"), (False, "offset"), (True, "absmax"), (True, "code")])
def test_another_tensor_at_the_address_of_a_scale(compiled, nested, name):
    """With the version of the one that was there, which lives on elsewhere."""
    model, step, _ = compiled
    state = model.layers[0].weight.quant_state
    owner = state.state2 if nested else state
    known = getattr(owner, name)
    buffer = bytearray(known.numpy().tobytes())

    def over_the_buffer():
        return torch.frombuffer(buffer, dtype=known.dtype).view(known.shape)

    setattr(owner, name, over_the_buffer())
    nf4_patch.enable(cache=2**30)
    step()
    first = getattr(owner, name)
    first.data = first.clone()
    over_the_buffer().copy_(known.flip(0) if known.numel() > 1 else known * 2)
    setattr(owner, name, over_the_buffer())
    got = step()
    nf4_patch.enable(cache="off")
    assert same(got, step())


def forward_and_backward(module):
    x = torch.ones(8, 64, dtype=torch.float16, device=DEVICE, requires_grad=True)
    module(x).float().square().sum().backward()


@pytest.fixture
def modules():
    torch._dynamo.reset()
    models = [Model(), Model(), Model()]
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    nf4_patch.enable(cache="1GiB")
    forward_and_backward(compiled[0])
    size = sum(cache.held.values())
    nf4_patch.disable()
    return models, compiled, size


def test_a_module_that_had_no_room_has_it_when_another_is_gone(modules):
    models, compiled, size = modules
    nf4_patch.enable(cache=f"{size}B")
    for _ in range(3):
        forward_and_backward(compiled[0])
        forward_and_backward(compiled[1])
    assert cache.snapshot().compiled == 3
    assert (
        cache.uncached[Uncached.BUDGET_SPENT] == 1 or DEVICE.type == "cuda"
    )  # asked again only when there may be room
    del models[0], compiled[0]
    torch._dynamo.reset()
    gc.collect()
    assert cache.snapshot().compiled == 0
    forward_and_backward(compiled[0])
    assert cache.snapshot().compiled == 3


def eager_read(layer):
    """As the functions that only read: cached while there is room, the least recently used one gone."""
    state = layer.weight.quant_state
    weight, fields = layer.weight.data, fields_of(state)
    parameter = layer.weight
    with torch._C.DisableTorchFunctionSubclass():
        found = cache.find(parameter, fields, state.quant_type)
        if found is None:
            cache.insert(parameter, fields, state.quant_type, lambda: dequantize_nf4(weight, state))


def test_what_is_held_is_not_evicted_and_evicts_what_is_only_cached(modules):
    models, compiled, size = modules
    nf4_patch.enable(cache=f"{2 * size}B")
    forward_and_backward(compiled[0])
    others = [linear(DEVICE, 32, 64, seed=seed) for seed in range(20, 28)]  # of another size, which is not reused
    for layer in others:
        eager_read(layer)
    assert cache.snapshot().compiled == 3
    assert len(cache.entries) > 3
    forward_and_backward(compiled[1])
    assert cache.snapshot().compiled == 6
    assert sum(cache.held.values()) <= cache.budget
    forward_and_backward(compiled[2])  # no room, and nothing that may go
    assert cache.snapshot().compiled == 6
    assert [held.dense is not None for model in models for held in held_of(model)] == [True] * 6 + [False] * 3


def held_of(model):
    return [Held.of(layer.weight.quant_state) for layer in model.layers]


def test_no_budget_holds_nothing_and_a_decode_in_between_does_not_stay(modules):
    _, compiled, _ = modules
    nf4_patch.enable(cache="1GiB")
    forward_and_backward(compiled[0])
    cache.may_take(0)
    assert not cache.entries
    cache.may_take(2**30)
    layer = linear(DEVICE, 64, 64)
    state = layer.weight.quant_state

    def decode():
        cache.may_take(0)
        return dequantize_nf4(layer.weight.data, state)

    with torch._C.DisableTorchFunctionSubclass():
        assert cache.insert(layer.weight, fields_of(state), state.quant_type, decode) is not None
    assert not cache.entries
    assert not any(cache.held.values())


@pytest.mark.parametrize("mode", ["auto", 2**30])
def test_out_of_memory_is_raised_unless_the_size_was_found_here(mode):
    layer = linear(DEVICE, 64, 64)
    state = layer.weight.quant_state
    nf4_patch.enable(cache=mode)
    cache.may_take(2**30)

    def decode():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with torch._C.DisableTorchFunctionSubclass():
        if mode == "auto":
            assert cache.insert(layer.weight, fields_of(state), state.quant_type, decode) is None
            assert cache.budget == 0
        else:
            with pytest.raises(torch.OutOfMemoryError):
                cache.insert(layer.weight, fields_of(state), state.quant_type, decode)
    assert not any(cache.held.values())
