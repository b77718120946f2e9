"""Matmul straight from the packed weight, where bitsandbytes and Unsloth multiply a few rows.

As accurate as dequantize + matmul and not the same bits (bitsandbytes' own fused kernels are not either): therefore a
switch of its own, ``enable(matmul="auto")`` or NF4_PATCH_MATMUL=auto, off by default.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize import compilation
from ..nf4.layout import Layout, identity
from ..nf4.matmul import launch as matmul
from . import calibrated
from .context import is_jit_tracing, modes_active, own_dispatch, transforms_active
from .counters import counters
from .dequantizer import supported
from .quant_state import Fields, fields_of
from .reasons import Reason
from .replacement import Fallbacks, Function, tried_first
from .switch import switch


@functools.lru_cache(maxsize=4096)
def is_measured(device: int, m: int, n: int, k: int) -> bool:
    """Whether a calibration or a shipped table has a config for this size: whether the fused matmul is faster."""
    return matmul.config_for(torch.cuda.get_device_capability(device), m, n, k, device=device) is not None


_in_use: weakref.WeakSet[FusedMatmul] = weakref.WeakSet()


def forget() -> None:
    """Ask the tables again: another calibration is in force."""
    matmul.forget()
    is_measured.cache_clear()
    for each in _in_use:
        each.launches.clear()


calibrated.on_change.append(forget)


class FusedMatmul:
    """Multiplies by the packed weights of one target."""

    def __init__(self, target: str, fallbacks: Fallbacks | None = None):
        self.target, self.fallbacks = target, fallbacks or Fallbacks(target)
        self.launches = runtime.Memo()
        _in_use.add(self)

    def run(
        self,
        x: Tensor,
        packed: Tensor,
        fields: Fields,
        quant_type: str,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        state: Any = None,
    ) -> Tensor | Reason:
        """x @ weight.T + bias, [..., N] in x's dtype, or the Reason why not. A remembered launch is found at once.

        Args:
            fields: their dtype is x's; the code is not read.
            out: filled and returned.
            state: the QuantState, where there is one to look at.
        """
        launch: matmul.MatmulLaunch | Reason | None
        key: Any
        try:
            known = None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, bias.is_contiguous())
            key = (x.shape, x.get_device(), known, identity(quant_type, packed, *fields))
            launch = self.launches.get(key)
        except (AttributeError, TypeError):  # a field is no tensor, or the shape a list: the guards decide
            key = launch = None
        if launch is None:
            launch = self.resolve(key, x, Layout(packed, *fields), quant_type, bias, state)
            if type(launch) is Reason:
                return launch
        if out is not None and not launch.accepts(x, out):
            return Reason.OUT_MISMATCH
        result = launch(x, out)
        launch.counter.hits += 1
        return result

    def resolve(
        self, key: Any, x: Tensor, layout: Layout, quant_type: str, bias: Any, state: Any
    ) -> matmul.MatmulLaunch | Reason:
        """A launch that passed the guards and is then remembered, or the Reason why there is none."""
        if is_jit_tracing():
            return Reason.EXPORTING
        device = x.get_device()
        if device < 0 or compilation.INTERPRETED:
            return Reason.NOT_CUDA
        if len(layout.shape) != 2:
            return Reason.MATMUL_OPERANDS
        n, k = layout.shape
        m = x.numel() // k
        if m == 0 or x.shape[-1] != k or not is_measured(device, m, n, k):
            return Reason.NOT_FASTER
        coded = supported(layout, quant_type, state)
        if type(coded) is Reason:
            return coded
        if not matmul.supports(x, coded, bias):
            return Reason.MATMUL_OPERANDS
        if not all(map(runtime.has_memory, coded.operands())):
            return Reason.NO_STORAGE
        try:
            launch = matmul.resolve(x, coded, bias)
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        dtype = str(x.dtype).removeprefix("torch.")
        launch.counter = counters.of(self.target, (n, k), f"{dtype} fused matmul")
        if key is not None:
            self.launches.remember(key, launch)
        return launch

    def run_state(
        self,
        x: Tensor,
        packed: Tensor,
        state: Any,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        transposed: bool | None = None,
    ) -> Tensor | Reason:
        """As ``run``, with the weight of a QuantState, where no gradient is asked for.

        Args:
            transposed: whether the packed weight has to come as [1, bytes]; None: it does not matter.
        """
        fields = fields_of(state)
        if type(fields) is Reason:
            return fields
        if modes_active():
            return Reason.DISPATCH_MODE
        if transforms_active() is not None:
            return Reason.FUNCTORCH_TRANSFORM
        if type(x).__torch_dispatch__ is not own_dispatch or type(packed).__torch_dispatch__ is not own_dispatch:
            return Reason.TENSOR_SUBCLASS
        if (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))) or (
            transposed is not None and (packed.shape[0] == 1) is not transposed
        ):
            return Reason.MATMUL_OPERANDS
        with torch._C.DisableTorchFunctionSubclass():  # Params4bit's methods as a Tensor's
            return self.run(x, packed, (*fields[:-1], x.dtype), state.quant_type, bias, out, state)

    def run_row(self, x: Tensor, packed: Tensor, state: Any, out: Tensor | None) -> Tensor | Reason:
        """As ``run_state``, of one row."""
        return self.run_state(x, packed, state, None, out) if x.numel() == x.shape[-1] else Reason.MATMUL_OPERANDS

    def before(self, original: Function, multiply: Callable[..., Tensor | Reason]) -> Function:
        """The original, with ``multiply``, which takes its arguments, tried first where the feature is switched on."""
        return tried_first(original, self.fallbacks, multiply, gate=switch.gates["matmul"])
