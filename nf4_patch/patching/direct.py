"""The direct API: a weight and its QuantState to the result, or an error that says what was found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.codes import code_of
from ..nf4.dequantize import compilation, reference
from ..nf4.layout import Layout
from . import guards
from .dequantizer import Dequantizer
from .quant_state import fields_of
from .reasons import Reason

_dequantizer = Dequantizer("nf4_patch.dequantize_nf4")


def dequantize_nf4(weight: Tensor, quant_state: Any, out: Tensor | None = None) -> Tensor:
    """See :func:`nf4_patch.dequantize_nf4`."""
    if torch.compiler.is_compiling():
        result = _dequantizer.trace(weight, quant_state, out)
    else:
        result = _dequantizer.run(weight, quant_state, out)
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
    fields = fields_of(quant_state)
    found = ""
    if type(fields) is not Reason:
        layout = Layout(weight, *fields)
        found = f": {guards.describe(layout)}"
        if result in (Reason.NOT_CUDA, Reason.EXPORTING):
            reason = guards.check_quant_state(quant_state)
            if reason is None:
                code = code_of(quant_state.quant_type, weight.device)
                layout = Layout(weight, fields[0], code, *fields[2:])  # before PyTorch 2.9 Dynamo traces no _replace
                # TENSOR_SUBCLASS: while a program is exported, a tensor is a FakeTensor
                reason = guards.check(layout, (Reason.NOT_CUDA, Reason.TENSOR_SUBCLASS))
            if reason is None and out is not None:
                reason = guards.check_out(out, layout)
            if reason is None:
                return by_formula(layout, out)
            result = reason
    advice = f"; {result.advice}" if result.advice else ""
    raise ValueError(f"{result.sentence}{advice}{found}")


def by_formula(layout: Layout, out: Tensor | None) -> Tensor:
    weight = reference.dequantize(layout)
    if out is None:
        return weight
    out.copy_(weight.t() if layout.transposed() else weight)
    return out.t() if layout.transposed() else out


def triton_dequantize_nf4(layer: Any) -> Tensor:
    """See :func:`nf4_patch.triton_dequantize_nf4`."""
    weight = getattr(layer, "weight", None)
    state = getattr(weight, "quant_state", None)
    if weight is None or state is None:
        raise ValueError(
            f"{type(layer).__name__} has no quantized weight; a bitsandbytes.nn.Linear4bit on the device is needed "
            '(it is quantized by .to("cuda"))'
        )
    return dequantize_nf4(weight, state)
