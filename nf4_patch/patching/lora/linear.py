"""peft's 4-bit linear layer with LoRA: what runs as one function (function.py), and what stays peft's own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...nf4.dequantize import compilation
from ...nf4.low_rank.launch import is_used_for
from ...nf4.weight import OUTPUT_DTYPES
from ..cache.store import cache
from ..context import is_compiling, is_jit_tracing, modes_active, own_dispatch, plain_methods, transforms_active
from ..dequantizer import Dequantizer
from ..experts.read import HOOKS_ON_ALL, is_called_otherwise
from ..quant_state import weight_of
from ..reasons import Reason
from ..replacement import Function
from ..switch import switch
from ..targets import Target
from .function import Adapter, Factors, FusedFactors, LoraProduct, WideFactors
from .shared import shared_inner

# Without a gradient bitsandbytes multiplies up to so many rows straight from the packed weight, and enable(matmul="auto") does.
FEW_ROWS = 128
LINEAR, DROPOUT = (torch.nn.Linear,), (torch.nn.Identity, torch.nn.Dropout)


def active(layer: Any, args: Any, kwargs: Any) -> list[str] | Reason:
    """The adapters whose products are to be added to the base's, if peft adds them in the plain way."""
    given = args or any(value is not None for value in kwargs.values())
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if given or not names or layer.disable_adapters or layer.merged:
        return Reason.LORA_INACTIVE
    for name in names:
        if name in layer.lora_variant or layer.lora_bias.get(name):
            return Reason.LORA_VARIANT
        for parts, kinds in ((layer.lora_A, LINEAR), (layer.lora_B, LINEAR), (layer.lora_dropout, DROPOUT)):
            if type(parts[name]) not in kinds or is_called_otherwise(parts[name]):
                return Reason.LORA_HOOKED
    return names


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
    """That of the base's product, as its own forward decides; None where autocast has another 16-bit dtype."""
    if not base.compute_type_is_set:
        base.set_compute_type(x)
        base.compute_type_is_set = True
    dtype: torch.dtype = base.compute_dtype or x.dtype
    if not torch.is_autocast_enabled(x.device.type):
        return dtype
    autocast = torch.get_autocast_dtype(x.device.type)
    return autocast if dtype in (autocast, torch.float32) else None


def is_multiplied_as(layer: Any, name: str, x: Tensor) -> bool:
    """Whether peft multiplies by an adapter's factors in the dtype of x, or in fp32 and rounds the result to it."""
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    if a.dtype is not b.dtype or not {type(a), type(b)} <= {Tensor, torch.nn.Parameter}:  # FSDP1 makes views
        return False
    if torch.is_autocast_enabled(x.device.type) or a.dtype is x.dtype:
        return True
    return a.dtype is torch.float32 and getattr(layer, "cast_input_dtype_enabled", True)


def inputs_of(layer: Any, name: str, x: Tensor, rows: Tensor) -> tuple[Adapter, tuple[Tensor, Tensor, Tensor]]:
    """How an adapter's products are computed, and z, A and B.

    Args:
        x: the layer's input.
        rows: the same, [rows, in].
    """
    a, b, dropout = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_dropout[name]
    dtype, autocast = rows.dtype, torch.is_autocast_enabled(x.device.type)
    wide = not autocast and a.dtype is not dtype  # fp32, and so are the products
    factors = (a, b) if wide else (a.to(dtype), b.to(dtype))
    is_x = not (dropout.training and getattr(dropout, "p", 0))
    if is_x:
        z = rows
    else:  # as peft: what is dropped depends on the dtype
        z = dropout(x if autocast else x.to(a.dtype)).reshape(rows.shape).to(factors[0].dtype)
    kind: type[Factors] = Factors
    if (is_x or not wide) and is_used_for(z, factors[0], b.shape[0]):
        kind = WideFactors if wide else FusedFactors
    return (kind, layer.scaling[name], is_x), (z, *factors)


def run(
    layer: Any, names: list[str], x: Tensor, rows: Tensor, dense: Callable[[], Tensor], out_features: int
) -> Tensor:
    """The layer's result, [..., out].

    Args:
        names: of the adapters.
        x, rows: see ``inputs_of``.
        dense: gives the base's weight, [out, in].
    """
    adapters: list[Adapter] = []
    tensors: list[Tensor] = []
    inners: list[Tensor | None] = []
    for name in names:
        adapter, its_tensors = inputs_of(layer, name, x, rows)
        adapters.append(adapter)
        tensors += its_tensors
        plain = adapter[2] and its_tensors[1] is layer.lora_A[name].weight and its_tensors[1].dtype is rows.dtype
        inners.append(shared_inner(layer, name, x, rows) if plain and names == [name] else None)
    base = layer.base_layer
    if not torch.is_grad_enabled() and len(rows) <= FEW_ROWS:
        y: Tensor = base(x)
        total = y.reshape(-1, out_features)
        for index, (kind, scale, _) in enumerate(adapters):
            z, a, b = tensors[3 * index : 3 * index + 3]
            factors = kind(a, b, scale)
            total = factors.outer(factors.inner(z), total)
        return total.view(y.shape)
    bias = None if base.bias is None else base.bias.to(rows.dtype)
    result: Tensor = LoraProduct.apply(rows, bias, dense, adapters, inners, *tensors)
    with torch.no_grad():
        result.addmm_(rows, dense().t())
    return result.view(*x.shape[:-1], out_features)


def linear(target: Target, original: Function) -> Function:
    """For ``peft.tuners.lora.bnb.Linear4bit.forward``. What torch.compile traces stays peft's, which Inductor fuses."""
    dequantizer, gate = Dequantizer(target.name), switch.gates["lora"]
    attempt: Any = dequantizer.fallbacks.attempt

    def decode(packed: Any, state: Any, dtype: torch.dtype) -> Tensor | Reason:
        weight = weight_of(packed, state)
        if type(weight) is Reason:
            return weight
        with plain_methods():
            return dequantizer.run(weight._replace(dtype=dtype), None, False, True)

    def dense(packed: Any, state: Any, dtype: torch.dtype) -> Tensor:
        result = attempt(decode, packed, state, dtype) if switch.on else None
        if isinstance(result, Tensor):
            return result
        from bitsandbytes.functional import dequantize_4bit

        whole: Tensor = dequantize_4bit(packed, state)
        return whole.to(dtype)

    def prepare(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The arguments of ``run``, or the Reason why the layer runs as peft's. It must say the same in a recompute."""
        names, base = active(self, args, kwargs), self.base_layer
        if isinstance(names, Reason):
            return names
        if not is_plain(self, base):
            return Reason.LORA_HOOKED
        if modes_active():
            return Reason.DISPATCH_MODE
        if is_jit_tracing():
            return Reason.EXPORTING
        if transforms_active() is not None:
            return Reason.FUNCTORCH_TRANSFORM
        packed = base.weight
        state = getattr(packed, "quant_state", None) or base.quant_state  # FSDP makes a plain parameter of the weight
        if state is None or len(state.shape) != 2:
            return Reason.NOT_4BIT
        if state.__dict__.get("packing_format_for_cpu"):
            return Reason.CPU_PACKING
        if not (x.is_cuda or compilation.INTERPRETED):
            return Reason.NOT_CUDA
        if x.device != packed.device:
            return Reason.MIXED_DEVICES
        if type(x).__torch_dispatch__ is not own_dispatch or type(packed).__torch_dispatch__ is not own_dispatch:
            return Reason.TENSOR_SUBCLASS
        # of an input in fp32 peft's sum of base and LoRA is in fp32, and ours would be rounded to 16 bits
        dtype: torch.dtype = x.dtype
        if dtype not in OUTPUT_DTYPES or product_dtype(base, x) is not dtype:
            return Reason.LORA_DTYPES
        if not all(is_multiplied_as(self, name, x) for name in names):
            return Reason.LORA_DTYPES
        out_features, in_features = state.shape
        if x.shape[-1] != in_features:
            return Reason.ARGUMENTS
        rows = x.reshape(-1, in_features)
        return self, names, x, rows, functools.partial(dense, packed, state, dtype), out_features

    @functools.wraps(original)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling() and gate.on:
            prepared = attempt(prepare, self, x, *args, **kwargs)
            # not under ``attempt``: hooks on saved tensors run here, by which a checkpoint ends its recompute
            if type(prepared) is not Reason:
                if cache.auto is not None:
                    cache.auto.observe(x)
                return run(*prepared)
        return original(self, x, *args, **kwargs)

    return forward
