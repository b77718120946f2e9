"""Weights held for compiled modules and Unsloth's compiled layers. Without a GPU the kernel is under the interpreter."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from target import linear, same
from torch._functorch.aot_autograd import aot_module_simplified
from unsloth_releases import with_unsloth

import nf4_patch
from nf4_patch.patching.cache.cache import StaleWeightError, cache
from nf4_patch.patching.cache.held import Held
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
