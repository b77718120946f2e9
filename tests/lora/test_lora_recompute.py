"""A checkpoint's recompute repeats the forward's choice between fused LoRA and peft, even if hooks or modes changed since."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import test_lora as lora
import test_lora_table as table
import torch
from alternation import crossed, thinned
from target import fallbacks, linear, same
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import nf4_patch
from nf4_patch.libraries.peft import linear as linear_module
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

peft = lora.peft


class Layers(torch.nn.Module):
    """A checkpoint around three layers in sequence. The last layer is called twice."""

    def __init__(self, device):
        super().__init__()
        self.config, self.is_loaded_in_4bit = {"model_type": "custom"}, True
        self.names = ["q", "k", "v"]
        for index, name in enumerate(self.names):
            self.add_module(name, linear(device, lora.IN, lora.IN, lora.BF16, seed=index))
        self.reentrant, self.nested = False, False

    def run(self, x):
        h = torch.nn.functional.silu(self.q(x))
        h = checkpoint(self.k, h, use_reentrant=self.reentrant) if self.nested else self.k(h)
        return self.v(torch.nn.functional.silu(self.v(torch.nn.functional.silu(h))))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.fixture(params=table.ADAPTERS)
def model(request, device):
    model = Layers(device)
    config = {"lora_alpha": 12, "target_modules": model.names, "lora_dropout": 0.3}
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, **config))
    model.add_adapter("other", peft.LoraConfig(r=4, **config))
    lora.randomize(model, lora.BF16)
    for name in table.inner(model).names:
        getattr(table.inner(model), name).set_adapter(table.ADAPTERS[request.param])
    return model


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def hooked(module):
    handle = module.register_forward_hook(lambda module, args, result: result.clone())
    yield
    handle.remove()


# Circumstances that exist only in the forward or only in the backward, and the Reason of each outside of a recompute.
CIRCUMSTANCES = {
    "FlopCounterMode": (lambda model: FlopCounterMode(display=False), Reason.DISPATCH_MODE),
    "a dispatch mode": (lambda model: Watching(), Reason.DISPATCH_MODE),
    "a hook on every module": (
        lambda model: register_module_forward_hook(lambda module, args, result: None), Reason.LORA_HOOKED
    ),
    "a hook on A": (lambda model: hooked(model.k.lora_A["default"]), Reason.LORA_HOOKED),
    "a hook on the base layer": (lambda model: hooked(model.k.base_layer), Reason.LORA_HOOKED),
}  # fmt: skip

# TOLERANCE: relative difference of ours from peft, over three layers with two adapters each, in bf16. peft rounds after each adapter.
TOLERANCE = 5e-2
ON_ALL = ["FlopCounterMode", "a dispatch mode", "a hook on every module"]


def step(model, x, forward=contextlib.nullcontext, backward=contextlib.nullcontext, twice=False):
    """Return the output, and the gradients of x and of each factor. ``twice`` runs two backwards through one graph."""
    model.zero_grad()
    x.grad = None
    torch.manual_seed(3)
    with forward():
        y = model(x)
    with backward():
        for kept in (True, False) if twice else (False,):
            y.backward(lora.gradient_of(y), retain_graph=kept)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


AROUND = {
    "one": (False, False),
    "one, reentrant": (True, False),
    "nested": (False, True),
    "nested, reentrant": (True, True),
}


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("around", "when"), crossed(AROUND, itertools.product(("forward", "backward"), CIRCUMSTANCES)), ids=str
)
def test_what_is_there_in_one_of_both_only(model, device, around, when):
    """With nested checkpoints, the outer recompute runs the inner checkpoint's forward again, as a new forward."""
    (reentrant, nested), (where, circumstance) = AROUND[around], when
    x, inner = lora.inputs(device), table.inner(model)
    inner.reentrant, inner.nested = reentrant, nested
    make, reason = CIRCUMSTANCES[circumstance]
    want = step(model, x)
    nf4_patch.enable(lora="fused")
    got = step(model, x, **{where: lambda: make(inner)})
    lora.assert_close(got, want, TOLERANCE)
    assert set(fallbacks(lora.TARGET)) <= {reason}
    if not (reentrant or nested):
        if where == "backward":
            assert not fallbacks(lora.TARGET)  # ours throughout
        elif circumstance in ON_ALL:
            assert not counters.hits(lora.TARGET) and same(got, want)  # peft's throughout
    lora.assert_close(step(model, x), want, TOLERANCE)


@pytest.mark.every(2)
@pytest.mark.parametrize("circumstance", thinned(CIRCUMSTANCES, 2))
def test_each_forward_has_its_own_decision(model, device, circumstance):
    """Two forwards of the same layers before one backward, then two backwards through a retained graph."""
    make, (x, other), inner = (
        CIRCUMSTANCES[circumstance][0],
        (lora.inputs(device, seed=s) for s in (0, 1)),
        table.inner(model),
    )

    def both(around=contextlib.nullcontext):
        model.zero_grad()
        x.grad = other.grad = None
        torch.manual_seed(3)
        with around():
            first = model(x)
        loss = (first + model(other)).float().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, other.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    want = both()
    nf4_patch.enable(lora="fused")
    lora.assert_close(both(lambda: make(inner)), want, TOLERANCE)
    lora.assert_close(step(model, x, twice=True)[1:2], [2 * step(model, x)[1]], TOLERANCE)


def test_an_error_of_ours_in_the_forward_only(model, device, monkeypatch):
    """peft's forward ran after the error, so the recompute runs it again."""
    x, decided = lora.inputs(device), linear_module.dtypes_of
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("only once")
        return decided(*args)

    want = step(model, x)
    nf4_patch.enable(lora="fused")
    monkeypatch.setattr(linear_module, "dtypes_of", failing)
    lora.assert_close(step(model, x), want, TOLERANCE)
    assert fallbacks(lora.TARGET) == {Reason.INTERNAL_ERROR: 2}
