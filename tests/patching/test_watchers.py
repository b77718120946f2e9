"""Modes, transforms and traces: each has one Reason, whatever runs inside it."""

from __future__ import annotations

import contextlib
import itertools

import lora_layers as lora
import pytest
import torch
from alternation import crossed
from oracle import quantized
from target import Seen, fallbacks
from torch.utils._python_dispatch import TorchDispatchMode

import nf4_patch
from nf4_patch.graphs import calls
from nf4_patch.matmul.product import FusedMatmul
from nf4_patch.patching import context
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def inside(mode):
    def call(function):
        with mode():
            return function()

    return call


def transformed(transform):
    """Call a function while a functorch transform is active, but with no tensor of the transform."""

    def call(function):
        found = []
        transform(lambda x: found.append(function()) or x.sum())(torch.ones(2))
        return found[0]

    return call


def traced(function):
    found = []
    torch.jit.trace(lambda x: found.append(function()) or x * 1, torch.ones(2), check_trace=False)
    return found[0]


WATCHERS = {
    "nothing": (inside(contextlib.nullcontext), None),
    "a default device": (inside(lambda: torch.device("cpu")), None),
    "autocast": (inside(lambda: torch.autocast("cpu", torch.bfloat16)), None),
    "inference mode": (inside(torch.inference_mode), None),
    "a function mode": (inside(Seen), Reason.FUNCTION_MODE),
    "a dispatch mode": (inside(Watching), Reason.DISPATCH_MODE),
    "both modes": (lambda function: inside(Seen)(lambda: inside(Watching)(function)), Reason.FUNCTION_MODE),
    "grad": (transformed(torch.func.grad), Reason.FUNCTORCH_TRANSFORM),
    "vmap": (transformed(torch.func.vmap), Reason.FUNCTORCH_TRANSFORM),
    "vmap in a function mode": (
        lambda function: inside(Seen)(lambda: transformed(torch.func.vmap)(function)), Reason.FUNCTORCH_TRANSFORM
    ),
    "jit.trace": (traced, Reason.EXPORTING),
}  # fmt: skip


@pytest.mark.parametrize("watcher", WATCHERS)
def test_every_part_of_the_package_names_the_same_watcher(device, watcher):
    """Dequantization under a dispatch mode calls an op, which the mode sees. So it has no Reason there."""
    around, reason = WATCHERS[watcher]
    packed, state = quantized((96, 64), torch.bfloat16, device)
    x = torch.randn(4, state.shape[1], device=device, dtype=state.dtype)
    dequantizer, fused = Dequantizer("test"), FusedMatmul("test")
    with torch.no_grad():
        assert around(context.watched) is reason
        assert around(lambda: calls.why_not(None, (x,), calls.NOT_CHECKPOINTED, generates=True)) is reason
        product = around(lambda: fused.of_state(x, packed, state))
        assert (
            product is reason
            or (reason is None and product in (Reason.NOT_FASTER, Reason.NOT_CUDA))
            or type(product) is torch.Tensor
        )
        dense = around(lambda: dequantizer.of_state(packed, state))
        assert dense is reason or (reason in (None, Reason.DISPATCH_MODE) and type(dense) is torch.Tensor)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("how", "watcher"),
    crossed(itertools.product((torch.bfloat16, torch.float32), (None, torch.bfloat16)), WATCHERS),
    ids=str,
)
def test_fused_lora_names_the_watcher_and_peft_s_code_runs(device, watcher, how):
    adapter, autocast = how
    (around, reason), model, x = WATCHERS[watcher], lora.adapted(device, adapter=adapter), lora.inputs(device).detach()
    model.requires_grad_(False)
    results = []
    for option in ("off", "fused"):
        nf4_patch.enable(lora=option)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast is not None):
            results.append(around(lambda: model(x)))
    assert set(fallbacks(lora.TARGET)) == ({reason} if reason else set())
    assert torch.equal(*results) if reason else lora.apart(*results) < 1e-2


def test_a_batched_gradient_is_a_transform(device):
    found = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.append((context.watched(), context.watched(gradient)))
            return gradient

    x = torch.ones(2, device=device, requires_grad=True)
    gradients = torch.eye(2, device=device)
    assert torch.equal(torch.autograd.grad(Identity.apply(x), x, gradients, is_grads_batched=True)[0], gradients)
    assert found == [(None, Reason.FUNCTORCH_TRANSFORM)]
