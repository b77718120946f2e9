"""Layers with a shared input, in all combinations of grad modes, checkpoints, adapters, autocast and interrupts.

Gradients are compared with peft's. A layer's result must not depend on earlier calls, and this is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import weakref

import pytest
import test_lora as lora
import torch
from alternation import crossed
from target import fallbacks, linear, same
from threads import together
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import nf4_patch
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

peft = lora.peft
NAMES = ["q", "k", "v"]
SHAPE = 2, 80, lora.IN  # more rows than bitsandbytes multiplies from the packed weight


class Block(torch.nn.Module):
    """Layers q, k and v with one input h. ``modes`` are the grad modes of q and k. ``between`` is called after q."""

    def __init__(self, device, seed=0):
        super().__init__()
        self.config, self.is_loaded_in_4bit = {"model_type": "custom"}, True
        for index, name in enumerate(NAMES):
            self.add_module(name, linear(device, lora.IN, lora.OUT, lora.BF16, seed=seed + index))
        self.modes = contextlib.nullcontext, contextlib.nullcontext
        self.around, self.between = (lambda run, x: run(x)), (lambda block, h: h)

    def run(self, x):
        h = torch.nn.functional.silu(x)
        with self.modes[0]():
            q = self.q(h)
        h = self.between(self, h)
        with self.modes[1]():
            k = self.k(h)
        return 3 * self.v(h) + q + k * 2

    def forward(self, x):
        return self.around(self.run, x)


def adapted(device, seed=0):
    """Return a block whose layers have two adapters each, one of them active."""
    model = Block(device, seed)
    for name, options in {"default": {"r": 8, "lora_alpha": 12}, "other": {"r": 4, "lora_alpha": 9}}.items():
        config = peft.LoraConfig(target_modules=NAMES, **options)
        model = model.add_adapter(name, config) or model if name == "other" else peft.get_peft_model(model, config)
    lora.randomize(model, lora.BF16, seed)
    return model


def inner(model):
    return model.base_model.model


@pytest.fixture
def block(device):
    return adapted(device)


def step(model, x, autocast=None):
    """Return the output, the gradient of x and the gradient of each factor. A missing gradient is a zero."""
    model.zero_grad()
    x.grad = None
    with torch.autocast(x.device.type, lora.BF16, enabled=autocast is not None):
        y = model(x)
    y.backward(lora.gradient_of(y))
    grads = [x.grad, *(p.grad for name, p in model.named_parameters() if "lora_" in name)]
    return [y.detach(), *(y.new_zeros(()) if each is None else each for each in grads)]


def inputs(device, seed=0):
    return lora.inputs(device, seed=seed, shape=SHAPE)


def selective(run, x):
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.nf4_patch.dequantize_nf4.default]
    context = functools.partial(create_selective_checkpoint_contexts, saved)
    return checkpoint(run, x, use_reentrant=False, context_fn=context)


MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
CHECKPOINTS = {
    "kept": lambda run, x: run(x),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "recomputed": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "selective": selective,
}
ADAPTERS = {"one": "default", "two": ["default", "other"]}


def interrupted(_block, _h):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def models():
    """Return two models for all rows of the table, so that state that one row leaves behind would show in the next."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return [adapted(device, seed) for seed in (0, 10)]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("run", "how"),
    crossed(itertools.product(ADAPTERS, (None, lora.BF16)), itertools.product(CHECKPOINTS, MODES, MODES)),
    ids=str,
)
def test_table(device, models, run, how):
    """Run a step, a forward that is interrupted between q and k, the step again, and a step of the next model."""
    (adapters, autocast), (around, *modes) = run, how
    x, want, got = inputs(device), [], []
    for model in models:
        inner(model).modes, inner(model).around = [MODES[mode] for mode in modes], CHECKPOINTS[around]
        for name in NAMES:
            getattr(inner(model), name).set_adapter(ADAPTERS[adapters])
        want.append(step(model, x, autocast))
    nf4_patch.enable(lora="fused")
    got.append(step(models[0], x, autocast))
    inner(models[0]).between = interrupted
    with pytest.raises(KeyboardInterrupt):
        step(models[0], x, autocast)
    inner(models[0]).between = lambda block, h: h
    again = step(models[0], x, autocast)
    got.append(step(models[1], x, autocast))
    assert same(again, got[0])
    for ours, theirs in zip(got, want, strict=True):
        lora.assert_close(ours, theirs)
    if around == "selective":  # it is a dispatch mode, so peft's forward runs
        assert set(fallbacks(lora.TARGET)) == {Reason.DISPATCH_MODE} and same(got[0], want[0])
    else:
        assert counters.hits(lora.TARGET) and not fallbacks(lora.TARGET)


# --- what comes between q and k ---


def k_of(block):
    return block.k.lora_A["default"]


def kept(h, *_):
    return h


def written_through_data(_block, h):
    h.data.mul_(2)
    return h


# Changes after q that return the h of k and v.
CHANGES = {
    "h written": lambda block, h: h.mul_(2),
    "h written through data": written_through_data,
    "another h": lambda block, h: h * 2,
    "h of q again": lambda block, h: h + 0 * block.q(h)[..., :1].sum(),
    "k twice": lambda block, h: kept(h, block.k(h), block.k(h)),
    "A written": lambda block, h: kept(h, k_of(block).weight.data.mul_(2)),
    "A replaced": lambda block, h: kept(h, setattr(k_of(block), "weight", torch.nn.Parameter(k_of(block).weight * 2))),
    "k disabled": lambda block, h: kept(h, block.k.enable_adapters(False)),
    "k hooked": lambda block, h: kept(h, k_of(block).register_forward_hook(lambda module, args, result: result * 2)),
    "k scaled": lambda block, h: kept(h, block.k.scaling.update(default=3.0)),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_between(block, device, change):
    theirs, x = copy.deepcopy(block), inputs(device).detach()
    nf4_patch.enable(lora="fused")
    step(block, inputs(device)), step(block, inputs(device))
    with torch.no_grad():
        before = block(x)
        inner(theirs).between = inner(block).between = CHANGES[change]
        got = block(x)
        nf4_patch.disable()
        want = theirs(x)
    assert lora.apart(got, want) < 1e-2
    assert change in ("h of q again", "k twice") or lora.apart(got, before) > 1e-2


def test_h_gets_a_gradient_between(block, device):
    """q runs before h requires a gradient, and k and v run after, as with ``enable_input_require_grads``."""
    x, found = inputs(device).detach(), []
    inner(block).between = lambda block, h: found.append(h) or h.requires_grad_()
    for option in ("off", "fused", "fused"):
        nf4_patch.enable(lora=option)
        block(x).sum().backward()
    want, *got = [h.grad for h in found]
    assert all(lora.apart(each, want) < 1e-2 for each in got) and torch.equal(*got)


@pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed", "reentrant"])
def test_parallel_layers_of_which_one_is_checkpointed(block, device, reentrant):
    """After two forwards and one backward, each input has its own gradient."""

    def both(seeds=(0, 1)):
        found = [inputs(device, seed) for seed in seeds]
        sum(run(x).float().square().sum() for x in found).backward()
        return [x.grad for x in found]

    def run(x):
        h = x * 1
        q, k, v = (getattr(inner(block), name) for name in NAMES)
        return q(h) + checkpoint(lambda h: torch.nn.functional.silu(k(h)) * v(h), h, use_reentrant=reentrant)

    want = both()
    nf4_patch.enable(lora="fused")
    both()
    lora.assert_close(both(), want)
    assert not fallbacks(lora.TARGET)


def test_an_interrupted_forward_keeps_nothing_alive(device):
    model, x = adapted(device), inputs(device)
    nf4_patch.enable(lora="fused")
    step(model, x)
    inner(model).between = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(x)
    alive = [weakref.ref(each) for each in (x, inner(model).q.base_layer.weight, k_of(inner(model)).weight)]
    del x, model
    gc.collect()
    assert [each() for each in alive] == [None, None, None]
    step(adapted(device, seed=10), inputs(device))


def test_parameters_can_be_swapped(device):
    """``swap_tensors`` rejects tensors with weak references, so nothing may hold weak references to the factors."""
    model = adapted(device)
    nf4_patch.enable(lora="fused")
    with torch.no_grad():
        model(inputs(device)), model(inputs(device))
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        k_of(inner(model)).to(lora.FP32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)
    assert k_of(inner(model)).weight.dtype is lora.FP32


def test_training_does_not_depend_on_what_ran_before(device):
    """Ten steps give bit-identical losses and factors with and without earlier forwards of other shapes."""

    def train(before):
        model = adapted(device)
        nf4_patch.enable(lora="fused")
        for rows in before:
            model(lora.inputs(device, shape=(rows, lora.IN)))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses = []
        for seed in range(10):
            losses.append(model(inputs(device, seed)).float().square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *(p for p in model.parameters() if p.requires_grad)]

    assert same(train([]), train([3, 200, 160]))


def test_threads_share_nothing_with_each_other(block, device):
    nf4_patch.enable(lora="fused")
    x = inputs(device).detach()
    with torch.no_grad():
        want, got = block(x), []

        def work():
            with torch.no_grad():
                got.extend(block(x) for _ in range(5))

        together(work, work)
    assert len(got) == 10 and all(lora.apart(each, want) < 1e-2 for each in got)


# --- one gradient of x ---


def all_at_once(outputs, x, _block):
    return torch.autograd.grad(sum(each.float().square().sum() for each in outputs), x)


def of_some(outputs, x, _block):
    """Run one backward per output through one retained graph, and repeat this."""
    return [torch.autograd.grad(each.float().square().sum(), x, retain_graph=True)[0] for each in outputs for _ in "12"]


def in_two_halves(outputs, x, _block):
    q, k, v = outputs
    return *torch.autograd.grad((q * k).float().sum(), x, retain_graph=True), *torch.autograd.grad(v.float().sum(), x)


def of_an_adapter_first(outputs, x, block):
    """First compute only the gradient of a factor, which does not need the gradient of x."""
    loss = sum(each.float().square().sum() for each in outputs)
    return *torch.autograd.grad(loss, k_of(block).weight, retain_graph=True), *torch.autograd.grad(loss, x)


def after_an_interruption(outputs, x, _block):
    loss = sum(each.float().square().sum() for each in outputs)

    def interrupt(_gradient):
        raise KeyboardInterrupt

    handle = outputs[0].register_hook(interrupt)  # the backward of k and v, which came later, is over by then
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, x, retain_graph=True)
    handle.remove()
    return torch.autograd.grad(loss, x)


@pytest.mark.parametrize("backward", [all_at_once, of_some, in_two_halves, of_an_adapter_first, after_an_interruption])
def test_one_gradient_of_x(block, device, backward):
    x = inputs(device)

    def gradients():
        layers = [getattr(inner(block), name) for name in NAMES]
        return backward([scale * layer(x) for scale, layer in enumerate(layers, 1)], x, inner(block))

    want = gradients()
    nf4_patch.enable(lora="fused")
    step(block, x)
    lora.assert_close(gradients(), want)
    assert not fallbacks(lora.TARGET)
