"""Faults put into LoRA's function on purpose: the tests of test_lora.py notice each of them."""

from __future__ import annotations

import functools
import inspect
import types

import peft.tuners.lora.bnb  # noqa: F401 (which peft imports with the first 4-bit model)
import pytest
import test_lora as checks

import nf4_patch
from nf4_patch.patching.lora import function, linear

small = functools.partial(checks.test_as_accurate_as_peft, precision="norms in fp32", size=0.01, tensors=2)
accuracy = functools.partial(checks.test_as_accurate_as_peft, precision="bf16", size=1, tensors=4)
plain = functools.partial(checks.test_a_step_is_peft_s, config="plain", reentrant=None)
dropout = functools.partial(checks.test_a_step_is_peft_s, config="dropout", reentrant=None)
several = checks.test_several_adapters_and_switching
switched = functools.partial(checks.test_an_adapter_switched_before_the_backward, reentrant=None)
NOW = "getattr(run.layer, f'lora_{part}')[run.layer.active_adapters[0]].weight for part in 'AB'"

# The test that fails, the module, and what stands in it in place of what.
FAULTS = {
    "no scaling in y": (accuracy, function, {"self.b.t(), self.scale, y": "self.b.t(), 1, y"}),
    "no scaling in dA and dx": (accuracy, function, {"self.b.dtype), self.b, self.scale": "self.b.dtype), self.b, 1"}),
    "no scaling in dB": (accuracy, function, {".t(), inner, self.scale": ".t(), inner, 1"}),
    "scaling twice": (accuracy, linear, {"layer.scaling[name]": "layer.scaling[name] ** 2"}),
    "another adapter's scaling": (several, linear, {"layer.scaling[name]": "layer.scaling['default']"}),
    "A transposed in x·A": (accuracy, function, {"@ self.a.t()": "@ self.a.view(self.a.shape[::-1])"}),
    "B transposed in y": (accuracy, function, {"(inner, self.b.t(),": "(inner, self.b.view(self.b.shape[::-1]),"}),
    "B transposed in dA and dx": (
        accuracy, function, {"self.b.dtype), self.b, self": "self.b.dtype), self.b.t().reshape(self.b.shape), self"}
    ),
    "A transposed in dx": (
        accuracy, function, {"product(inner_gradient, self.a,": "product(inner_gradient, self.a.t().reshape(self.a.shape),"}
    ),
    "dA transposed": (
        accuracy, function,
        {"product(inner_gradient.t(), cast(z, self.a.dtype))":
         "product(inner_gradient.t(), cast(z, self.a.dtype)).t().reshape(self.a.shape)"},
    ),
    "no dropout": (dropout, linear, {'dropped = dropout.training and getattr(dropout, "p", 0)': "dropped = 0"}),
    "dropout's mask not in dx": (dropout, linear, {"not (dropped or is_cast)": "not is_cast"}),
    "dropout's mask not in dA": (dropout, function, {"saved += (z if of_a": "saved += (x if of_a"}),
    "another mask in dA": (
        dropout, function, {"saved += (z if of_a": "saved += (torch.nn.functional.dropout(x, 0.3) if of_a"}
    ),
    "other random numbers": (dropout, linear, {" z = dropout(x": " dropout(x); z = dropout(x"}),
    "x·A of the latest call": (
        plain, function,
        {"ctx.save_for_backward(": "LoraProduct.latest = saved; ctx.save_for_backward(",
         "(a, b, scale)\n                t: Any =": "(a, b, scale); inner = LoraProduct.latest[1]\n                t: Any ="},
    ),
    "the adapter of now in the backward": (
        switched, linear,
        {"found.append(": "run.layer = layer; found.append(",
         "append((kind, ": f"append((lambda a, b, scale: kind(*({NOW}), scale), "},
    ),
    "no bias": (plain, linear, {"later, bias = None, base.bias": "later, bias = None, None"}),
    "the base's product not added": (accuracy, linear, {"rows, dense().t())": "rows, dense().t(), alpha=0)"}),
    "the base's weight transposed in dx": (
        accuracy, function, {"product(gradient, ctx.dense(), 1": "product(gradient, ctx.dense().t().reshape(ctx.dense().shape), 1"}
    ),
    "dx of the base alone": (accuracy, function, {"ctx.dense(), 1, x_gradient)": "ctx.dense())"}),
    "dx of the last adapter alone": (several, function, {"gradient_of_z(t, x_gradient)": "gradient_of_z(t, None)"}),
    "y rounded twice": (
        small, linear,
        {"result.add_(torch.nn.functional.linear(rows, dense(), later))": "result.copy_((result + rows @ dense().t()).to(dtype))"},
    ),
}  # fmt: skip


def replaced(monkeypatch, module, texts):
    """Everything that the module defines, in both modules, from its source with other text in it."""
    nf4_patch.enable(lora="fused"), nf4_patch.disable()  # the replacement is made once: of the real module
    source = inspect.getsource(module)
    for text, instead in texts.items():
        assert source.count(text) == 1, text
        source = source.replace(text, instead)
    mutant = types.ModuleType(module.__name__)
    mutant.__package__ = module.__package__
    exec(compile(source, module.__file__, "exec"), vars(mutant))
    for name, value in vars(mutant).items():
        if getattr(value, "__module__", None) == module.__name__:
            for owner in (function, linear):
                if name in vars(owner):
                    monkeypatch.setattr(owner, name, value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault, device, monkeypatch):
    check, module, texts = FAULTS[fault]
    replaced(monkeypatch, module, texts)
    with pytest.raises((AssertionError, RuntimeError)):
        check(device)


@pytest.mark.parametrize("check", [accuracy, small, plain, dropout, several, switched])
def test_without_a_fault_nothing_is(check, device, monkeypatch):
    for module in (function, linear):
        replaced(monkeypatch, module, {})
    check(device)
