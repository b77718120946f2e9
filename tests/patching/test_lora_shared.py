"""Layers that take the same input share one product with their A; whatever comes between them, results are peft's."""

from __future__ import annotations

import copy
import gc

import peft
import pytest
import test_lora as lora
import torch
from target import fallbacks, linear
from threads import together
from torch.utils.checkpoint import checkpoint

import nf4_patch
from nf4_patch.lora import shared


class Block(torch.nn.Module):
    """q, k and v of the same x; ``between`` is called after q."""

    def __init__(self, device):
        super().__init__()
        self.config, self.is_loaded_in_4bit = {"model_type": "custom"}, True
        self.names = ["q", "k", "v"]
        for seed, name in enumerate(self.names):
            self.add_module(name, linear(device, lora.IN, lora.OUT, lora.BF16, seed=seed))
        self.between = self.reentrant = None

    def run(self, x):
        q = self.q(x)
        if self.between is not None:
            x = self.between(self, x)
        return q + 2 * self.k(x) + 3 * self.v(x)

    def forward(self, x):
        return self.run(x) if self.reentrant is None else checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.fixture
def block(device):
    shared.followers.clear()
    model = peft.get_peft_model(Block(device), peft.LoraConfig(r=8, lora_alpha=12, target_modules=["q", "k", "v"]))
    lora.randomize(model, lora.BF16)
    return model


@pytest.fixture
def products(monkeypatch):
    """How many layers each product was for that served more than one."""
    together, found = shared.together, []

    def counted(*args):
        own = together(*args)
        if own is not None:
            found.append(1 + len(shared.latest.products))
        return own

    monkeypatch.setattr(shared, "together", counted)
    return found


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("autocast", [None, lora.BF16], ids=["plain", "autocast"])
def test_one_product_from_the_second_step_on(block, products, device, reentrant, autocast):
    block.base_model.model.reentrant = reentrant
    x = lora.inputs(device)
    for seed in range(3):
        lora.randomize(block, lora.BF16, seed)
        lora.assert_close(*lora.beside(block, x, autocast))
    assert set(products) == {3} and len(products) == (2 if reentrant is None else 5)
    assert not shared.latest.products and not fallbacks(lora.TARGET)


def k(block):
    return block.k.lora_A["default"]


def kept(x, *_):
    return x


# What comes between q and k, and the x that k and v get.
CHANGES = {
    "x written": lambda block, x: x.mul_(2),
    "another x": lambda block, x: x * 2,
    "x of q again": lambda block, x: x + 0 * block.q(x)[..., :1].sum(),
    "A written": lambda block, x: kept(x, k(block).weight.mul_(2)),
    "A replaced": lambda block, x: kept(x, setattr(k(block), "weight", torch.nn.Parameter(k(block).weight * 2))),
    "k disabled": lambda block, x: kept(x, block.k.enable_adapters(False)),
    "k hooked": lambda block, x: kept(x, k(block).register_forward_hook(lambda module, args, result: result * 2)),
    "k scaled": lambda block, x: kept(x, block.k.scaling.update(default=3.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_between(block, products, device, change):
    """After two steps that share: what is waiting for k and v then is not of what they ask for."""
    x = lora.inputs(device)
    nf4_patch.enable(lora="fused")
    lora.step(block, x), lora.step(block, x)
    assert products == [3]
    nf4_patch.disable()
    theirs = copy.deepcopy(block)
    theirs.base_model.model.between = block.base_model.model.between = CHANGES[change]
    with torch.no_grad():
        want = theirs(x.detach().clone())
        nf4_patch.enable(lora="fused")
        got = block(x.detach().clone())
        assert lora.apart(got, want) < 1e-2 and products == [3, 3]
        block.base_model.model.between = None  # and once more, from what is left then
        theirs.base_model.model.between = None
        for _ in range(3):
            got = block(x.detach().clone())
        nf4_patch.disable()
        assert lora.apart(got, theirs(x.detach().clone())) < 1e-2


def test_layers_that_do_not_come_are_forgotten(block, products, device):
    x = lora.inputs(device)
    nf4_patch.enable(lora="fused")
    lora.step(block, x), lora.step(block, x)
    inner = block.base_model.model
    inner.q(x), inner.q(x.detach().clone()), inner.q(x.detach().clone())
    assert products == [3, 3]  # the first of the three alone
    lora.step(block, x), lora.step(block, x)
    assert products == [3, 3, 3]


def test_nothing_is_kept_alive(block, device):
    nf4_patch.enable(lora="fused")
    for _ in range(2):
        block(lora.inputs(device))
    gc.collect()
    assert shared.latest.x() is None and not shared.latest.products
    assert len(shared.followers) == 1
    shared.followers.clear()


def test_threads_share_nothing_with_each_other(block, device):
    nf4_patch.enable(lora="fused")
    x = lora.inputs(device).detach()
    with torch.no_grad():
        block(x)
        want, got = block(x), []

        def work():
            with torch.no_grad():
                got.extend(block(x) for _ in range(5))

        together(work, work)
    assert len(got) == 10 and all(lora.apart(each, want) < 1e-2 for each in got)


# --- one gradient of x ---


def q_k_v(block, x):
    inner = block.base_model.model
    return [inner.q(x), 2 * inner.k(x), 3 * inner.v(x)]


def all_at_once(outputs, x, _block):
    return torch.autograd.grad(sum(each.float().square().sum() for each in outputs), x)


def of_some(outputs, x, _block):
    """Each alone, of one graph: what a backward leaves behind is not the next one's."""
    return [torch.autograd.grad(each.float().square().sum(), x, retain_graph=True)[0] for each in outputs for _ in "12"]


def in_two_halves(outputs, x, _block):
    q, k, v = outputs
    return *torch.autograd.grad((q * k).float().sum(), x, retain_graph=True), *torch.autograd.grad(v.float().sum(), x)


def of_an_adapter_first(outputs, x, block):
    """The gradient of x is computed by nobody, or not needed."""
    loss = sum(each.float().square().sum() for each in outputs)
    a = block.base_model.model.k.lora_A["default"].weight
    return *torch.autograd.grad(loss, a, retain_graph=True), *torch.autograd.grad(loss, x)


def after_an_interruption(outputs, x, _block):
    loss = sum(each.float().square().sum() for each in outputs)

    def interrupt(_gradient):
        raise KeyboardInterrupt

    handle = outputs[0].register_hook(interrupt)  # k and v, which came later, have added to the sum by then
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, x, retain_graph=True)
    handle.remove()
    return torch.autograd.grad(loss, x)


def beside_another_use(outputs, x, _block):
    return torch.autograd.grad(sum(each.float().square().sum() for each in outputs) + x.float().pow(3).sum(), x)


@pytest.mark.parametrize(
    "backward",
    [all_at_once, of_some, in_two_halves, of_an_adapter_first, after_an_interruption, beside_another_use],
)
def test_one_gradient_of_x(block, products, device, backward):
    x = lora.inputs(device)
    want = backward(q_k_v(block, x), x, block)
    nf4_patch.enable(lora="fused")
    lora.step(block, x)
    outputs = q_k_v(block, x)
    assert products == [3]
    lora.assert_close(backward(outputs, x, block), want)


def test_each_layer_adds_to_the_sum(block, products, device):
    """No layer returns a gradient of its own, and nothing of the sum is left."""
    x = lora.inputs(device)
    nf4_patch.enable(lora="fused")
    lora.step(block, x)
    outputs, seen, aliases = q_k_v(block, x), [], set()
    for each in outputs:
        node = each.grad_fn
        while not node.name().startswith("LoraProduct"):
            node = node.next_functions[0][0]
        node.register_hook(lambda gradients, _: seen.append(gradients[0]))
        aliases.add(node.next_functions[0][0])
    all_at_once(outputs, x, block)
    assert seen == [None, None, None] and products == [3]
    assert len(aliases) == 1 and not aliases.pop().sums
