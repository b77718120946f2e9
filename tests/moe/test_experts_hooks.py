"""Hooks, offloading and patched functions that take part in reading a packed stack still run."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from bitsandbytes.nn.parametrize import Bnb4bitParametrization
from tiny_experts import DEVICE, LAYERS, STACKS, Layer, experts_of, hits, ids_of, model_of, reasons, same, step
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from nf4_patch.libraries.bitsandbytes.stacks import stacks_of
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason

ON = {"experts": "4bit"}


def doubled(module, args, output):
    return output * 2


def flipped(module, args):
    return (args[0] ^ 255,)


def doubled_chains(module, args, output):
    return output * 2 if isinstance(module, parametrize.ParametrizationList) else None


def flip(module, args):
    module.original.data = module.original.data ^ 255


class Doubling(Bnb4bitParametrization):
    def forward(self, packed):
        return 2 * super().forward(packed)


class DoublingChain(parametrize.ParametrizationList):
    def forward(self):
        return 2 * super().forward()


def gathered(layer):
    """Load the weight only for each use, and leave another tensor in its place between uses, as DeepSpeed's ZeRO-3 does."""
    packed = layer.chain().original
    held = packed.data
    packed.data = held.new_empty(0)
    return layer.experts.register_forward_pre_hook(lambda *_: setattr(packed, "data", held ^ 255))


def own_forward(module, times=2):
    stock = module.forward
    module.forward = lambda *args: times * stock(*args)


def hooked(layer):
    dispatch_model(layer.experts, {"": DEVICE}, force_hooks=True)


def patch_class(monkeypatch, owner):
    stock = owner.forward
    monkeypatch.setattr(owner, "forward", lambda self, *args: 2 * stock(self, *args))


def patch_property(layer, monkeypatch):
    stock = getattr(type(layer.experts), STACKS[0])
    monkeypatch.setattr(type(layer.experts), STACKS[0], property(lambda self: 2 * stock.fget(self)))


# What takes part in reading a stack, or runs around the experts: each changes the numbers where it is not passed by.
TAKING_PART = {
    "a hook on the chain": lambda layer, _: layer.chain().register_forward_hook(doubled),
    "a pre-hook on the chain": lambda layer, _: layer.chain().register_forward_pre_hook(flip),
    "a hook on the parametrization": lambda layer, _: layer.chain()[0].register_forward_hook(doubled),
    "a pre-hook on the parametrization": lambda layer, _: layer.chain()[0].register_forward_pre_hook(flipped),
    "a hook on the other stack": lambda layer, _: layer.chain(STACKS[1]).register_forward_hook(doubled),
    "a hook on every module": lambda layer, _: torch_module.register_module_forward_hook(doubled_chains),
    "a pre-hook on the experts, which gathers a weight": lambda layer, _: gathered(layer),
    "a hook on the experts": lambda layer, _: layer.experts.register_forward_hook(doubled),
    "a forward of the chain's own": lambda layer, _: own_forward(layer.chain()),
    "a forward of the parametrization's own": lambda layer, _: own_forward(layer.chain()[0]),
    "a forward of the experts' own": lambda layer, _: own_forward(layer.experts),
    "a forward of the experts' own, under accelerate's hook": lambda layer, _: (
        own_forward(layer.experts),
        hooked(layer),
    ),
    "a forward of the experts' own, over accelerate's hook": lambda layer, _: (
        hooked(layer),
        own_forward(layer.experts),
    ),
    "another class of parametrization": lambda layer, _: setattr(layer.chain()[0], "__class__", Doubling),
    "another class of chain": lambda layer, _: setattr(layer.chain(), "__class__", DoublingChain),
    "bitsandbytes' class patched": lambda layer, patch: patch_class(patch, Bnb4bitParametrization),
    "torch's class patched": lambda layer, patch: patch_class(patch, parametrize.ParametrizationList),
    "another property": patch_property,
}
# Of these nothing is seen in the numbers: they are called, or not.
WATCHING = {
    "a pre-hook on every module": lambda layer, hook: torch_module.register_module_forward_pre_hook(hook),
    "a backward hook on every module": lambda layer, hook: torch_module.register_module_full_backward_hook(hook),
    "a backward pre-hook on every module": lambda layer, hook: torch_module.register_module_full_backward_pre_hook(
        hook
    ),
    "a backward hook on the experts": lambda layer, hook: layer.experts.register_full_backward_hook(hook),
    "a backward pre-hook on the chain": lambda layer, hook: layer.chain().register_full_backward_pre_hook(hook),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("way", "implementation"),
    [
        pytest.param(*each, marks=() if number % 3 == 0 else pytest.mark.full)
        for number, each in enumerate(zip(TAKING_PART, itertools.cycle(["grouped_mm", "batched_mm"]), strict=False))
    ],
)
def test_nobody_is_passed_by(way, implementation, patched, monkeypatch):
    layer = Layer()
    layer.experts.config._experts_implementation = implementation
    grad = implementation == "grouped_mm"
    with torch.set_grad_enabled(grad):
        run = layer.step if grad else lambda: [layer.forward()]
        plain = run()
        handle = TAKING_PART[way](layer, monkeypatch)
        before = hits(implementation)
        try:
            ours = run()
            if way == "a pre-hook on the chain":  # which flips the bytes at every read
                layer.chain().original.data = layer.chain().original.data ^ 255
            stock = layer.stock(run)
        finally:
            if hasattr(handle, "remove"):
                handle.remove()
    assert all(map(torch.equal, ours, stock)) and not torch.equal(ours[0], plain[0])
    assert reasons(implementation) == {Reason.HOOKED: 1} and hits(implementation) == before > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("way", WATCHING)
def test_watching_hooks_are_called_as_often(way, patched):
    layer, calls = Layer(), []
    handle = WATCHING[way](layer, lambda module, *args: calls.append(type(module).__name__))
    try:
        ours = layer.step()
        seen = Counter(calls)
        calls.clear()
        stock = layer.stock()
    finally:
        handle.remove()
    assert all(map(torch.equal, ours, stock)) and seen == Counter(calls)
    assert reasons() == {Reason.HOOKED: 1} and hits() == 0


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_offloaded_by_accelerate(implementation, patched):
    model = model_of("qwen3", lora=False).eval()
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        plain = model(input_ids=ids_of(1)).logits
        packed = {name: tensor.clone() for name, tensor in model.named_parameters()}
        cpu_offload(model, DEVICE, state_dict=packed)
        chain = experts_of(model)[0].parametrizations[STACKS[0]]
        assert chain.original.is_meta
        hit = hits(implementation)
        ours = model(input_ids=ids_of(1)).logits
    assert torch.equal(ours, plain)
    assert reasons(implementation)[Reason.HOOKED] == LAYERS and hits(implementation) == hit
    patched.disable()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids_of(1)).logits, plain)


@pytest.mark.parametrize("removed", [False, True], ids=["hooked", "removed"])
def test_accelerates_hooks_that_only_move_inputs(removed, patched):
    """accelerate puts such hooks on every module of a model that is spread over several GPUs."""
    model = model_of("qwen3", lora=False)
    stock = step(model)
    dispatch_model(model, {"": DEVICE}, force_hooks=True)
    assert hasattr(experts_of(model)[0], "_hf_hook")
    if removed:
        remove_hook_from_module(model, recurse=True)
        assert "forward" in vars(experts_of(model)[0])
    before = hits()
    assert same(step(model), stock) and hits() == 2 * before == 8 * LAYERS and not reasons()


def test_inside_cached_of_torch(patched):
    """Inside ``parametrize.cached()`` the cached dense stack is used, even if the packed weight changes."""
    layer = Layer()

    def twice():
        with parametrize.cached():
            first = layer.forward()
            layer.chain().original.data.bitwise_xor_(255)
            second = layer.forward()
        layer.chain().original.data.bitwise_xor_(255)
        return first.detach(), second.detach()

    ours = twice()
    assert reasons() == {Reason.HOOKED: 2} and torch.equal(*ours)
    assert all(map(torch.equal, ours, layer.stock(twice)))
    layer.step()
    assert reasons() == {Reason.HOOKED: 2} and hits() == 4


def test_two_names_with_bitsandbytes_hooks_only(patched):
    layer = Layer()
    assert len(layer.experts._forward_pre_hooks) == len(STACKS) and layer.step()
    assert not reasons() and hits() == 4
    with torch.no_grad():  # called past the module, where bitsandbytes' hooks do not run
        layer.experts.forward(layer.hidden, layer.ids, layer.weights)
    assert not reasons() and hits() == 6


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("not to be asked")


def meta(layer):
    layer.chain().original = torch.nn.Parameter(layer.chain().original.to("meta"), requires_grad=False)


def freed(layer):
    layer.chain().original.untyped_storage().resize_(0)


def wrapped(layer):
    chain = layer.chain()
    del chain._parameters["original"]
    chain.original = Wrapper(torch.empty(4, 1, dtype=torch.uint8))


UNREADABLE = {meta: Reason.NO_STORAGE, freed: Reason.NO_STORAGE, wrapped: Reason.TENSOR_SUBCLASS}


@pytest.mark.parametrize("change", UNREADABLE)
def test_what_cannot_be_read(change):
    layer = Layer()
    change(layer)
    assert stacks_of(layer.experts, Dequantizer("a test")) is UNREADABLE[change]


def test_a_parametrization_of_16_bit_experts_is_no_hook():
    linear = torch.nn.Linear(2, 2)
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", torch.nn.Identity())
    for module in (linear, torch.nn.Linear(2, 2)):
        assert stacks_of(module, Dequantizer("a test")) is Reason.EXPERTS_NOT_PACKED
