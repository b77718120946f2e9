"""Matmul straight from the packed weight, where bitsandbytes and Unsloth multiply a few rows.

As accurate as dequantize + matmul and not the same bits (bitsandbytes' own fused kernels are not either): therefore a
switch of its own, ``enable(matmul="auto")`` or NF4_PATCH_MATMUL=auto, off by default.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ...nf4 import runtime
from ...nf4.matmul import launch as matmul
from ...nf4.weight import LIMIT, Weight
from .. import guards
from ..context import (
    function_mode_active,
    is_jit_tracing,
    modes_active,
    plain_methods,
    returns_tensors,
    transforms_active,
)
from ..counters import counters
from ..quant_state import weight_of
from ..reasons import Reason
from ..replacement import Fallbacks, Function, replacement_of
from . import calibrated


@functools.lru_cache(maxsize=4096)
def config_for(device: int, m: int, n: int, k: int) -> matmul.SmallMConfig | None:
    """What a calibration or a shipped table has for this size on this GPU; None where the fused matmul is not faster."""
    capability, processors = runtime.capability_of(device), runtime.multiprocessors(device)
    return matmul.config_for(capability, m, n, k, processors, calibrated.in_force(device).rows.get((n, k), ()))


_in_use: weakref.WeakSet[FusedMatmul] = weakref.WeakSet()


def forget() -> None:
    """Ask the tables again: another calibration is in force."""
    config_for.cache_clear()
    for each in _in_use:
        each.launches.clear()


calibrated.on_change.append(forget)


class FusedMatmul:
    """Multiplies by the packed weights of one target."""

    def __init__(self, target: str, fallbacks: Fallbacks | None = None):
        self.target, self.fallbacks = target, fallbacks or Fallbacks(target)
        self.launches: dict[Any, matmul.MatmulLaunch] = {}
        _in_use.add(self)

    def run(self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor | Reason:
        """x @ weight.T + bias, [..., N] in x's dtype, or the Reason why not. A remembered launch is found at once.

        Args:
            weight: its dtype is x's.
            out: filled and returned.
        """
        launch: matmul.MatmulLaunch | Reason | None
        key: Any
        try:
            known = (
                None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, bias.is_contiguous(), bias.is_neg())
            )
            key = (x.shape, x.get_device(), x.is_neg(), known, weight.known())
            launch = self.launches.get(key)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, one without memory, or with a list for a shape
            key = launch = None
        if launch is None:
            launch = self.resolve(x, weight, bias)
            if type(launch) is Reason:
                return launch
            if key is not None:
                if len(self.launches) >= LIMIT:
                    self.launches.clear()
                self.launches[key] = launch
        if out is not None and not launch.accepts(x, out):
            return Reason.OUT_MISMATCH
        result = launch(x, out)
        launch.counter.hits += 1
        return result

    def resolve(self, x: Tensor, weight: Weight, bias: Tensor | None) -> matmul.MatmulLaunch | Reason:
        """A launch that passed the guards, or the Reason why there is none."""
        if is_jit_tracing():
            return Reason.EXPORTING
        device = x.get_device()
        if device < 0:
            return Reason.NOT_CUDA
        if len(weight.shape) != 2:
            return Reason.MATMUL_OPERANDS
        n, k = weight.shape
        m = x.numel() // k if k else 0
        config = config_for(device, m, n, k) if m and x.shape[-1] == k else None
        if config is None:
            return Reason.NOT_FASTER
        reason = guards.why_not(weight)
        if reason is not None:
            return reason
        if not matmul.takes(x, weight, bias):
            return Reason.MATMUL_OPERANDS
        if not all(map(runtime.has_memory, weight.tensors())):
            return Reason.NO_STORAGE
        try:
            launch = matmul.resolve(x, weight, bias, config)
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        launch.counter = counters.of(self.target, (n, k), str(x.dtype), "fused matmul")
        return launch

    def of_state(
        self, x: Tensor, packed: Tensor, state: Any, bias: Tensor | None = None, out: Tensor | None = None,
        transposed: bool | None = None,
    ) -> Tensor | Reason:  # fmt: skip
        """As ``run``, with the weight of a QuantState, where no gradient is asked for.

        Args:
            transposed: whether the packed weight has to come as [1, bytes]; None: it does not matter.
        """
        weight = weight_of(packed, state)
        if type(weight) is Reason:
            # bitsandbytes multiplies by it on the CPU, for which it is packed
            return Reason.NOT_CUDA if weight is Reason.CPU_PACKING and x.get_device() < 0 else weight
        if modes_active():
            return Reason.DISPATCH_MODE
        if transforms_active() is not None:
            return Reason.FUNCTORCH_TRANSFORM
        if function_mode_active():
            return Reason.FUNCTION_MODE
        if not (
            returns_tensors(type(x)) and returns_tensors(type(packed)) and (bias is None or returns_tensors(type(bias)))
        ):
            return Reason.TENSOR_SUBCLASS
        if (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))) or (
            transposed is not None and weight.transposed() is not transposed
        ):
            return Reason.MATMUL_OPERANDS
        if weight.dtype is not x.dtype:
            weight = weight._replace(dtype=x.dtype)
        with plain_methods():
            return self.run(x, weight, bias, out)

    def one_row(self, x: Tensor, packed: Tensor, state: Any, out: Tensor | None) -> Tensor | Reason:
        """As ``of_state``, of one row."""
        return self.of_state(x, packed, state, None, out) if x.numel() == x.shape[-1] else Reason.MATMUL_OPERANDS


def multiplied_first(multiply: Callable[..., Tensor | Reason]) -> Function:
    """A maker of replacements, for a row to name: each tries ``multiply(fused, *arguments)``."""

    def make(target: Any, original: Function) -> Function:
        fused = FusedMatmul(target.name)
        return replacement_of(
            target, original, fused.fallbacks, MethodType(multiply, fused), is_body=True, refuses=True
        )

    return make
