"""Programs around a layer with fused LoRA, in all dtypes.

They compute what peft's code computes, and fail only if peft's code fails.
"""

from __future__ import annotations

import functools
import itertools

import numpy
import pytest
import test_lora as lora
import torch
from alternation import crossed
from target import fallbacks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import nf4_patch
from nf4_patch.libraries.peft import linear as linear_module
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# dtypes of the adapters, of x, and of autocast
DTYPES = list(itertools.product((BF16, FP32), (BF16, FP32), (None, BF16)))
NAME = "base_model.model.fc0.lora_A.default.weight"


def around_kept(run, x):
    return run(x)


CHECKPOINTS = {
    "kept": around_kept,
    "recomputed": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
}


def factors(model):
    layer = lora.layer_of(model)
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def backward(model, x, y, *others):
    y.backward(lora.gradient_of(y))
    return [y.detach(), *(each.grad for each in (x, *factors(model), *others) if each.grad is not None)]


def plain(model, x, around):
    return backward(model, x, around(model, x))


def x_written(write, model, x, around):
    """Write into the layer's input after the call, as a residual connection does in place."""

    def run(x):
        h = x * 1
        y = model(h)
        write(h)
        return y + 0 * h[..., :1]

    return backward(model, x, around(run, x))


def y_written(model, x, around):
    def run(x):
        y = model(x)
        y += 1
        return y

    return backward(model, x, around(run, x))


def of_inference_mode(model, x, around):
    with torch.inference_mode():
        x = x.detach() * 1
    return backward(model, x, around(model, x))


def scaled(make, model, x, around):
    """Give the adapter a scaling that is not a number, such as a learned scaling."""
    layer = lora.layer_of(model)
    before, scale = layer.scaling["default"], make(x)
    layer.scaling["default"] = scale
    try:
        y = around(model, x)
    finally:
        if around is around_kept:
            layer.scaling["default"] = before
    try:
        return backward(model, x, y, *([scale] if isinstance(scale, torch.Tensor) else ()))
    finally:
        layer.scaling["default"] = before


def wanted(model, x):
    return [x, *(each for each in factors(model) if each.requires_grad)]


def batched(model, x, around):
    """Run three backwards as one, with ``is_grads_batched``."""
    y = around(model, x)
    gradients = torch.stack([lora.gradient_of(y) * factor for factor in (1, 2, -3)])
    return torch.autograd.grad(y, wanted(model, x), gradients, is_grads_batched=True)


def vmapped(model, x, around):
    """Run three backwards as one, with ``torch.func.vmap``."""
    y = around(model, x)
    gradients = torch.stack([lora.gradient_of(y) * factor for factor in (1, 2, -3)])
    return torch.func.vmap(lambda g: torch.autograd.grad(y, wanted(model, x), g, retain_graph=True))(gradients)


def jacobian(model, x, around):
    """Compute the Jacobian of a few outputs for x and for A."""
    (a, _), x = factors(model), x[:2]

    def few(x, a):
        return around(lambda x: torch.func.functional_call(model, {NAME: a}, (x,)), x)[:, :3]

    return torch.autograd.functional.jacobian(few, (x.detach(), a.detach()), vectorize=True)


def subclassed(model, x, around):
    """Run a backward whose gradient has no memory of its own."""
    y = around(model, x)
    found = torch.autograd.grad(y, wanted(model, x), TwoTensor(lora.gradient_of(y), -3 * lora.gradient_of(y)))
    return [part for each in found for part in (each.a, each.b)]


def under(mode, model, x, around):
    with mode():
        return plain(model, x, around)


def one_less(h):
    with torch.no_grad():
        h.sub_(1)


PROGRAMS = {
    "plain": plain,
    "x += 1": functools.partial(x_written, lambda h: h.add_(1)),
    "x -= 1 without a gradient": functools.partial(x_written, one_less),
    "x.data *= 2": functools.partial(x_written, lambda h: h.data.mul_(2)),
    "y += 1": y_written,
    "x of inference_mode": of_inference_mode,
    "learned scaling": functools.partial(scaled, lambda x: torch.tensor(1.5, device=x.device, requires_grad=True)),
    "scaling per output": functools.partial(scaled, lambda x: torch.linspace(1, 2, lora.OUT, device=x.device)),
    "scaling of numpy": functools.partial(scaled, lambda x: numpy.float64(1.25)),
    "is_grads_batched": batched,
    "vmap": vmapped,
    "jacobian": jacobian,
    "gradient of a subclass": subclassed,
    "default device": functools.partial(under, lambda: torch.device("cpu")),
    "anomaly detection": functools.partial(under, torch.autograd.detect_anomaly),
}  # fmt: skip
WRITING = {"x += 1", "x -= 1 without a gradient", "x.data *= 2", "x of inference_mode"}
# A reentrant checkpoint supports only ``backward``.
WITHOUT_GRAD = {"is_grads_batched", "vmap", "jacobian", "gradient of a subclass"}


def outcome(program, model, x, around, autocast):
    """Return the tensors of a program, or the class of its error."""
    model.zero_grad()
    x.grad = None
    with torch.autocast(x.device.type, autocast or BF16, enabled=autocast is not None):
        try:
            return list(torch.utils._pytree.tree_leaves(program(model, x, CHECKPOINTS[around])))
        except Exception as error:
            return type(error)


@pytest.mark.every(4)
@pytest.mark.parametrize(("program", "case"), crossed(PROGRAMS, itertools.product(DTYPES, CHECKPOINTS)), ids=str)
@pytest.mark.parametrize("multiplied_by", ["kernels", "PyTorch"])
def test_a_program_computes_what_peft_computes(device, program, case, multiplied_by, monkeypatch):
    (adapter, of_x, autocast), around = case
    if around == "reentrant" and program in WITHOUT_GRAD:
        pytest.skip("a reentrant checkpoint supports only backward()")
    if multiplied_by == "kernels" and (adapter, of_x, autocast) != (FP32, BF16, None):
        pytest.skip("the kernels multiply only bf16 by fp32")
    if program in WRITING and (adapter, of_x, autocast) == (FP32, BF16, BF16) and device.type == "cpu":
        pytest.skip("peft casts x under autocast of the CPU, but not under autocast of a GPU")
    monkeypatch.setattr(linear_module, "supports", lambda z, *_: multiplied_by == "kernels" and z.dtype is BF16)
    model, x = lora.adapted(device, weights=BF16), lora.inputs(device, of_x)
    lora.randomize(model, adapter)
    want = outcome(PROGRAMS[program], model, x, around, autocast)
    nf4_patch.enable(lora="fused")
    got = outcome(PROGRAMS[program], model, x, around, autocast)
    if isinstance(want, type):
        assert got is want
        return
    assert not isinstance(got, type), got
    lora.assert_close(got, want)
    missed = set(fallbacks(lora.TARGET)) - {Reason.FUNCTORCH_TRANSFORM}  # under vmap, the backward decodes in PyTorch
    if program in ("learned scaling", "scaling per output"):
        assert missed == {Reason.LORA_VARIANT}
    elif of_x is FP32 and autocast is None:
        assert missed == {Reason.LORA_DTYPES}
    else:
        assert not missed and counters.hits(lora.TARGET)


@pytest.mark.parametrize("multiplied_by", ["kernels", "PyTorch"])
def test_one_copy_of_x_for_all_adapters(device, multiplied_by, monkeypatch):
    """With fp32 adapters, the forward saves one copy of a bf16 x. peft saves one in fp32, which is twice as large."""
    monkeypatch.setattr(linear_module, "supports", lambda z, *_: multiplied_by == "kernels" and z.dtype is BF16)
    model, x = lora.adapted(device), lora.inputs(device)
    model.add_adapter("other", lora.peft.LoraConfig(r=4, target_modules=["fc0"]))
    lora.randomize(model, FP32)
    lora.layer_of(model).set_adapter(["default", "other"])
    sizes = []
    for option in ("off", "fused"):
        nf4_patch.enable(lora=option)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            model(x)
        sizes.append(sum({each.data_ptr(): each.nbytes for each in saved if each.shape == x.shape}.values()))
    assert sizes == [4 * x.numel(), 2 * x.numel()]
