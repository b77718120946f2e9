"""peft's 4-bit linear layer with LoRA: what runs as one function (function.py), and what stays peft's own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cache.store import cache
from ..nf4 import runtime
from ..nf4.weight import OUTPUT_DTYPES
from ..patching import context
from ..patching.dequantizer import Dequantizer
from ..patching.module_hooks import HOOKS_ON_ALL, is_called_otherwise
from ..patching.quant_state import weight_of
from ..patching.reasons import Reason
from ..patching.replacement import Function, replacement_of
from ..patching.switch import switch
from ..patching.target import Target
from .function import Adapter, Factors, LoraProduct, WideFactors, cast
from .launch import is_used_for
from .shared import shared_input

# Without a gradient bitsandbytes multiplies up to so many rows straight from the packed weight, and enable(matmul="auto") does.
FEW_ROWS = 128
KINDS = (torch.nn.Linear,), (torch.nn.Linear,), (torch.nn.Identity, torch.nn.Dropout)  # of A, B and dropout
FACTORS = {torch.nn.Parameter, Tensor}  # FSDP1 makes views of parameters


def adapters_of(layer: Any, x: Tensor, args: Any, kwargs: Any) -> list[Any] | Reason:
    """Of the active adapters A, B, dropout and scaling, if peft adds their products to the base's in the plain way."""
    given = args or (kwargs and any(value is not None for value in kwargs.values()))
    modules = layer._modules  # which a module's own lookup, in Python, comes to last
    all_a, found = modules["lora_A"]._modules, []
    names = [name for name in layer.active_adapters if name in all_a]
    if given or not names or layer.disable_adapters or layer.merged:
        return Reason.LORA_INACTIVE
    as_x = torch.is_autocast_enabled(x.device.type)
    for name in names:
        if name in layer.lora_variant or layer.lora_bias.get(name):
            return Reason.LORA_VARIANT
        parts = all_a[name], modules["lora_B"]._modules[name], modules["lora_dropout"]._modules[name]
        for part, kinds in zip(parts, KINDS, strict=True):
            if type(part) not in kinds or is_called_otherwise(part):
                return Reason.LORA_HOOKED
        a, b, dropout = parts[0].weight, parts[1].weight, parts[2]
        if not {type(a), type(b)} <= FACTORS:
            return Reason.LORA_HOOKED
        # peft multiplies in the dtype of x, or in fp32 and rounds the result to it
        wide = a.dtype is torch.float32 and getattr(layer, "cast_input_dtype_enabled", True)
        if a.dtype is not b.dtype or not (as_x or a.dtype is x.dtype or wide):
            return Reason.LORA_DTYPES
        found.append((a, b, dropout, layer.scaling[name]))
    return found


def is_plain(layer: Any, base: Any) -> bool:
    """Whether layer and base are peft's and bitsandbytes' own classes, and nothing takes part in a call of the base."""
    library = sys.modules["bitsandbytes.nn.modules"]
    return (
        type(layer) is sys.modules["peft.tuners.lora.bnb"].Linear4bit  # type: ignore[attr-defined]
        and type(base) in (library.Linear4bit, library.LinearNF4, library.LinearFP4)
        and library.Linear4bit.forward.__module__ == library.__name__
        and not (any(HOOKS_ON_ALL) or is_called_otherwise(base))
    )


def product_dtype(base: Any, x: Tensor) -> torch.dtype | None:
    """That of the base's product, as its own forward decides, if all of the layer's are in it.

    Without autocast an fp32 sum of base and LoRA is rounded once by peft, and ours would be twice.
    """
    if not base.compute_type_is_set:
        base.set_compute_type(x)
        base.compute_type_is_set = True
    dtype: torch.dtype = base.compute_dtype or x.dtype
    if not torch.is_autocast_enabled(x.device.type):
        return dtype if x.dtype is dtype else None
    autocast = torch.get_autocast_dtype(x.device.type)
    return autocast if {dtype, x.dtype} <= {autocast, torch.float32} else None


def run(
    base: Any, adapters: list[Any], x: Tensor, dtype: torch.dtype, dense: Callable[[], Tensor], out_features: int
) -> Tensor:
    """The layer's result, [..., out].

    Args:
        adapters: see ``adapters_of``.
        x: the layer's input, [..., in].
        dtype: of the base's product.
        dense: gives the base's weight, [out, in].
    """
    rows, autocast = cast(x.reshape(-1, x.shape[-1]), dtype), torch.is_autocast_enabled(x.device.type)
    # then peft adds the base's part and LoRA's in fp32, of y and of the gradient of x
    is_cast, few = x.dtype is not dtype, not torch.is_grad_enabled() and len(rows) <= FEW_ROWS
    known = sums = None
    products: list[Adapter] = []
    tensors: list[Tensor] = []
    for a, b, dropout, scale in adapters:
        dropped = dropout.training and getattr(dropout, "p", 0)
        wide = not autocast and a.dtype is not dtype  # fp32, and so are the products
        if not (dropped or few) and len(adapters) == 1 and a.dtype is dtype:
            known, rows, sums = shared_input(a, x, rows)
        z = rows
        if dropped:  # as peft: what is dropped depends on the dtype
            z = dropout(x if autocast else x.to(a.dtype)).reshape(rows.shape)
        elif is_cast:
            z, sums = x.reshape(rows.shape), None
        z, a, b = (z, a, b) if wide else (cast(z, dtype), cast(a, dtype), cast(b, dtype))
        kind = WideFactors if wide and is_used_for(z, a, out_features) else Factors
        products.append((kind, scale, not (dropped or is_cast)))
        tensors += z, a, b
    later, bias = None, base.bias
    if bias is not None:
        later, bias = (bias.to(dtype), None) if is_cast and not bias.requires_grad else (None, bias.to(dtype))
    y = base(x).reshape(-1, out_features) if few else bias
    result = cast(LoraProduct.apply(rows, y, dense, products, known, sums, *tensors), x.dtype)
    if not few:
        with torch.no_grad():
            if is_cast:
                result.add_(torch.nn.functional.linear(rows, dense(), later))
            else:
                result.addmm_(rows, dense().t())
    return result.view(*x.shape[:-1], out_features)


# Where Dynamo skips the frame of a layer (bf16 on a T4) it would compile this piece by piece.
context.keep_dynamo_out(run)


def linear(target: Target, original: Function) -> Function:
    """For ``peft.tuners.lora.bnb.Linear4bit.forward``. What torch.compile traces stays peft's, which Inductor fuses."""
    dequantizer = Dequantizer(target.name)
    attempt: Any = dequantizer.fallbacks.attempt

    def decode(packed: Any, state: Any, dtype: torch.dtype) -> Tensor | Reason:
        weight = weight_of(packed, state)
        if type(weight) is Reason:
            return weight
        with context.plain_methods():
            return dequantizer.run(weight if weight.dtype is dtype else weight._replace(dtype=dtype), None, False, True)

    def dense(packed: Any, state: Any, dtype: torch.dtype) -> Tensor:
        result = attempt(decode, packed, state, dtype) if switch.on else None
        if isinstance(result, Tensor):
            return result
        whole: Tensor = sys.modules["bitsandbytes.functional"].dequantize_4bit(packed, state)
        return whole.to(dtype)

    def prepare(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``run`` and its arguments, or the Reason why the layer runs as peft's. It must say the same in a recompute."""
        adapters, base = adapters_of(self, x, args, kwargs), self.base_layer
        if isinstance(adapters, Reason):
            return adapters
        if not is_plain(self, base):
            return Reason.LORA_HOOKED
        packed = base.weight
        state = getattr(packed, "quant_state", None) or base.quant_state  # FSDP makes a plain parameter of the weight
        shape = tuple(getattr(state, "shape", ()))
        dtype: Any = product_dtype(base, x)
        own = context.own_dispatch
        refused = (
            (Reason.DISPATCH_MODE, context.modes_active()),
            (Reason.EXPORTING, context.is_jit_tracing()),
            (Reason.FUNCTORCH_TRANSFORM, context.transforms_active() is not None),
            (Reason.NOT_4BIT, len(shape) != 2),
            (Reason.CPU_PACKING, getattr(state, "packing_format_for_cpu", False)),
            (Reason.NOT_CUDA, not runtime.runs_on(x)),
            (Reason.MIXED_DEVICES, x.device != packed.device),
            (Reason.TENSOR_SUBCLASS, not type(x).__torch_dispatch__ is type(packed).__torch_dispatch__ is own),
            (Reason.LORA_DTYPES, dtype not in OUTPUT_DTYPES),
            (Reason.ARGUMENTS, x.shape[-1:] != shape[1:]),
        )
        for reason, holds in refused:
            if holds:
                return reason
        if cache.auto is not None:
            cache.auto.observe(x)
        # hooks on saved tensors run there, by which a checkpoint ends its recompute
        return run, base, adapters, x, dtype, functools.partial(dense, packed, state, dtype), shape[0]

    return replacement_of(target, original, dequantizer.fallbacks, prepare)
