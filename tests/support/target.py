"""bitsandbytes' dequantize_4bit, the target of most tests: layers that call it, the current function, and its counts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types

import bitsandbytes as bnb
import bitsandbytes.functional as F
import torch
from torch.overrides import TorchFunctionMode

import nf4_patch
from nf4_patch.patching import placement
from nf4_patch.patching.counters import counters
from nf4_patch.patching.targets import TARGETS

TARGET = "bitsandbytes.functional.dequantize_4bit"
PACKAGE = os.path.join(os.path.dirname(nf4_patch.__file__), "")


def in_package(code):
    """Return whether a code object belongs to this package. A clone may have any name, and its environment may lie inside it."""
    return code.co_filename.startswith(PACKAGE)


def target_like(library: str, name: str = "test", option: str = ""):
    """Return a row with this name and option, for an adapter of the library that a test calls with its own original."""
    like = next(target for target in TARGETS if target.library == library)
    return dataclasses.replace(like, function=f"{library}.test:{name}", option=option)


def row(target=TARGET):
    """Return the target's row of status()."""
    return {t.name: t for t in nf4_patch.status().targets}[target]


def fallbacks(target=TARGET):
    return {reason: n for (name, reason), n in counters.fallbacks.items() if name == target}


@contextlib.contextmanager
def replaced_by(function, on=False):
    """Put ``function`` at the target's name, as another library would: while the patch is ``on``, or before it is enabled."""
    (nf4_patch.enable if on else nf4_patch.disable)()
    original = getattr(F.dequantize_4bit, "__wrapped__", F.dequantize_4bit)
    F.dequantize_4bit = function
    if not on:
        placement.installed.pop(TARGET, None)
        nf4_patch.enable()
    counters.reset()
    try:
        yield original
    finally:
        nf4_patch.disable()
        F.dequantize_4bit = original
        placement.installed.pop(TARGET, None)
        counters.reset()


class Object:
    """A callable object around a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Plain(torch.Tensor):
    """A subclass that defines nothing. PyTorch's functions return results of this class too."""


class Seen(TorchFunctionMode):
    """A mode that records the names of PyTorch's functions that are called, and lookups of ``Params4bit``."""

    def __init__(self):
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


def read_by_bitsandbytes(packed, state):
    """Call ``F.dequantize_4bit`` as ``MatMul4Bit.backward`` does, which only reads the result."""
    return _read(packed, state)


_read = types.FunctionType(
    (lambda packed, state: F.dequantize_4bit(packed, state)).__code__, vars(bnb.autograd._functions)
)


def linear(device, inputs=256, outputs=128, dtype=torch.bfloat16, seed=0, weights=torch.float32, **options):
    """Return a layer in training mode with random weights, quantized from the dtype ``weights``."""
    torch.manual_seed(seed)
    layer = bnb.nn.Linear4bit(inputs, outputs, bias=False, quant_type="nf4", compute_dtype=dtype, **options)
    return layer.to(weights).to(device).train()


def step(layer, device, inputs=256, dtype=torch.bfloat16, rows=600):
    """Return the output and the input's gradient. 600 rows are so many that no release multiplies in 4 bits on the CPU."""
    torch.manual_seed(1)
    x = torch.randn(rows, inputs, dtype=dtype).to(device).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad


def raising(error):
    """Return a function that raises the error."""

    def raises(*args, **kwargs):
        raise error

    return raises


def same(got, want):
    """Return whether two lists of tensors are bit-identical."""
    return len(got) == len(want) and all(map(torch.equal, got, want))
