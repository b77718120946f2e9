"""The public function ``dequantize_nf4``. It raises an error where a replacement would fall back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.dequantize import compilation, reference
from ..nf4.weight import PackedWeight
from . import guards
from .dequantizer import Dequantizer
from .quant_state import fields_of
from .reasons import Reason

_dequantizer = Dequantizer("nf4_patch.dequantize_nf4")


def dequantize_nf4(weight: Tensor, quant_state: Any, out: Tensor | None = None) -> Tensor:
    """Dequantize a packed 4-bit weight. See :func:`nf4_patch.dequantize_nf4`."""
    if torch.compiler.is_compiling():
        result = _dequantizer.trace(weight, quant_state, out)
    else:
        result = _dequantizer.of_state(weight, quant_state, out)
    if type(result) is not Reason:
        return result
    for name, given in (("weight", weight), ("out", weight if out is None else out)):
        if not isinstance(given, Tensor):
            raise ValueError(f"{name} is a {type(given).__name__}; a torch.Tensor is needed")
    if result is Reason.NOT_4BIT:
        raise ValueError(
            f"quant_state is a {type(quant_state).__name__}; a bitsandbytes.functional.QuantState is needed "
            "(layer.weight.quant_state of a quantized Linear4bit)"
        )
    if result is Reason.KERNEL_FAILED:
        kernels = compilation.compiled_kernels().values()
        failures = [str(kernel) for kernel in kernels if isinstance(kernel, runtime.KernelUnavailable)]
        raise RuntimeError("; ".join(failures) or result.sentence)
    fields = fields_of(weight, quant_state)
    found = ""
    if not isinstance(fields, Reason):
        packed = PackedWeight(*fields)
        found = f": {guards.describe(packed)}"
        if result in (Reason.NOT_CUDA, Reason.EXPORTING, Reason.FUNCTION_MODE):
            # During an export all tensors are FakeTensors, so the guard TENSOR_SUBCLASS must not refuse subclasses.
            reason = guards.why_not(packed, out=out, ignore=(Reason.NOT_CUDA, Reason.TENSOR_SUBCLASS))
            if reason is None:
                return by_formula(packed, out)
            result = reason
    advice = f"; {result.advice}" if result.advice else ""
    raise ValueError(f"{result.sentence} ({result.name}){advice}{found}")


def by_formula(weight: PackedWeight, out: Tensor | None) -> Tensor:
    """Dequantize with PyTorch operators instead of the kernel."""
    dense = reference.dense(weight)
    result = dense if out is None else out.copy_(dense)
    return result.t() if weight.transposed() else result
