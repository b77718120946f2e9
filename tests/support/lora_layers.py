"""A model of 4-bit linear layers with peft's LoRA, and how far the results of two of its steps are apart."""

from __future__ import annotations

import pytest
import torch
from target import linear
from torch.utils.checkpoint import checkpoint as checkpointed

peft = pytest.importorskip("peft")

TARGET = "peft.tuners.lora.bnb.Linear4bit.forward"
IN, OUT, ROWS = (2048, 1024, 512) if torch.cuda.is_available() else (128, 192, 160)  # on a GPU the sizes of layers
RANK, ALPHA = 8, 12  # a scaling of 1.5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Model(torch.nn.Module):
    """A sequence of 4-bit linear layers ``fc0``, ``fc1``, ..."""

    def __init__(self, device, dtype=BF16, layers=1, bias=False, weights=FP32):
        super().__init__()
        self.config = {"model_type": "custom"}
        self.is_loaded_in_4bit = True  # peft reads it
        sizes = [IN, *[OUT] * layers]
        for index in range(layers):
            layer = linear(device, sizes[index], OUT, dtype, seed=index, weights=weights)
            layer.bias = torch.nn.Parameter(torch.randn(OUT, device=device).to(dtype)) if bias else None
            self.add_module(f"fc{index}", layer)
        self.names = [f"fc{index}" for index in range(layers)]
        self.reentrant = None

    def forward(self, x):
        for name in self.names:
            layer = getattr(self, name)
            x = layer(x) if self.reentrant is None else checkpointed(layer, x, use_reentrant=self.reentrant)
            x = torch.nn.functional.silu(x) if len(self.names) > 1 else x
        return x


def adapted(device, dtype=BF16, adapter=BF16, layers=1, biased=False, seed=0, weights=FP32, **config):
    model = Model(device, dtype, layers, biased, weights)
    options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": model.names} | config
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    randomize(model, adapter, seed)
    return model


def randomize(model, dtype, seed=0):
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape).mul_(0.1).to(parameter.device, dtype)


def layer_of(model, name="fc0"):
    return getattr(model.base_model.model, name)


def inputs(device, dtype=BF16, seed=0, shape=(ROWS, IN)):
    torch.manual_seed(100 + seed)
    return torch.randn(shape).to(device, dtype).requires_grad_()


def step(model, x, autocast=None, gradient=None):
    """Return y, the gradient of x, and the gradient of every trained parameter."""
    model.zero_grad()
    x.grad = None
    with torch.autocast(x.device.type, autocast or BF16, enabled=autocast is not None):
        y = model(x)
    y.backward(gradient_of(y) if gradient is None else gradient)
    return [y.detach(), *(each.grad for each in (x, *model.parameters()) if each.grad is not None)]


def gradient_of(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)


def apart(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def assert_close(got, want, tolerance=2e-2):
    assert [each.shape for each in got] == [each.shape for each in want]
    assert [each.dtype for each in got] == [each.dtype for each in want]
    assert max(map(apart, got, want)) < tolerance
