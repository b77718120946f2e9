"""The replacement for the forward of peft's 4-bit linear layers with LoRA.

A call runs as one autograd function (lora/function.py), as two kernel launches for few rows without a gradient
(matmul/lora.py), or in peft's own forward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...lora.function import Adapter, Factors, LoraProduct, WideFactors, cast
from ...lora.launch import supports
from ...matmul import lora as few_rows
from ...matmul.choice import LARGEST_M
from ...matmul.product import FusedMatmul, unsupported
from ...memory.spare import spare
from ...nf4 import runtime
from ...nf4.weight import OUTPUT_DTYPES
from ...patching import context
from ...patching.context import PLAIN, returns_tensors
from ...patching.counters import counters
from ...patching.decisions import decisions_of
from ...patching.dequantizer import Dequantizer
from ...patching.module_hooks import HOOKS_ON_ALL, is_called_otherwise
from ...patching.quant_state import fields_of, weight_of
from ...patching.reasons import Reason
from ...patching.replacement import Function, replacement_of
from ...patching.switch import switch
from ...patching.target import Target
from ..bitsandbytes import FUNCTIONS, LAYERS
from . import LINEAR_LAYERS
from .computed import Computed, say

# Without a gradient and for up to this many rows, ``run`` calls the base layer, which might multiply directly by the packed
# weight, with bitsandbytes' kernel or with enable(matmul="auto").
FEW_ROWS = 128
# The supported classes of A, B and dropout.
KINDS = (torch.nn.Linear,), (torch.nn.Linear,), (torch.nn.Identity, torch.nn.Dropout)
BF16, FP32 = torch.bfloat16, torch.float32
lora_gate, matmul_gate = switch.gates["lora"], switch.gates["matmul"]
# Reshapes a tensor that nobody else holds, as in F.linear. An ordinary view as the result of ``run`` could not be written
# to after a change of the grad mode.
unsafe_view: Any = torch.ops.aten._unsafe_view.default


def adapters_of(layer: Any, x: Tensor, args: Any, kwargs: Any, hooked: bool) -> list[Any] | Reason:
    """Return (A, B, dropout, scaling) of each active adapter, or the Reason why peft's forward has to run.

    Hooks count only if ``hooked``.
    """
    given = args or (kwargs and any(value is not None for value in kwargs.values()))
    modules = layer._modules  # this lookup is faster than the module's __getattr__
    all_a, found = modules["lora_A"]._modules, []
    names = [name for name in layer.active_adapters if name in all_a]
    if given or not names or layer.disable_adapters or layer.merged:
        return Reason.LORA_INACTIVE
    as_x = torch.is_autocast_enabled(x.device.type)
    for name in names:
        scale = layer.scaling[name]
        if name in layer.lora_variant or layer.lora_bias.get(name) or not isinstance(scale, (int, float)):
            return Reason.LORA_VARIANT
        parts = all_a[name], modules["lora_B"]._modules[name], modules["lora_dropout"]._modules[name]
        for part, kinds in zip(parts, KINDS, strict=True):
            if type(part) not in kinds or (hooked and is_called_otherwise(part)):
                return Reason.LORA_HOOKED
        a, b, dropout = parts[0].weight, parts[1].weight, parts[2]
        # PLAIN contains Tensor besides Parameter, because FSDP1 replaces parameters by views, which are Tensors.
        if not {type(a), type(b)} <= PLAIN:
            return Reason.LORA_HOOKED
        # Without autocast, A and B must have the dtype of x, or they must be in fp32 and peft must cast x to fp32.
        wide = a.dtype is torch.float32 and getattr(layer, "cast_input_dtype_enabled", True)
        if a.dtype is not b.dtype or not (as_x or a.dtype is x.dtype or wide):
            return Reason.LORA_DTYPES
        found.append((a, b, dropout, scale))
    return found


def is_plain(layer: Any, base: Any, hooked: bool) -> bool:
    """Return whether ``layer`` has peft's own class, and ``base`` is a 4-bit layer of bitsandbytes.

    With ``hooked``, ``base`` must also have no hooks.
    """
    library = sys.modules[LAYERS]
    return (
        type(layer) is sys.modules[LINEAR_LAYERS].Linear4bit  # type: ignore[attr-defined]
        and type(base) in (library.Linear4bit, library.LinearNF4, library.LinearFP4)
        and not (hooked and (any(HOOKS_ON_ALL) or is_called_otherwise(base)))
    )


def dtypes_of(base: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype] | None:
    """Return the dtypes of the base product and of the decoded weight, or None if they are not supported.

    The product has the dtype of autocast, or of x without autocast. The weight has the layer's compute dtype, or the
    product's if the compute dtype is fp32.
    """
    if not base.compute_type_is_set:
        base.set_compute_type(x)
        base.compute_type_is_set = True
    dtype = x.dtype
    compute: torch.dtype = base.compute_dtype or dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    elif (compute is FP32) is not (dtype is FP32):  # peft rounds the sum differently in this case
        return None
    # A 4-bit checkpoint stores the compute dtype, so it can differ from the product's dtype.
    known = compute in OUTPUT_DTYPES and x.dtype in OUTPUT_DTYPES and dtype in OUTPUT_DTYPES
    return (dtype, dtype if compute is FP32 else compute) if known else None


def only_adapter(adapters: list[Any], base: Any, x: Tensor, dtypes: Any) -> tuple[Tensor, Tensor, float] | Reason:
    """Return A, B and the scaling of the only adapter, or the Reason why the fused matmul cannot add its product."""
    if len(adapters) != 1:
        return Reason.LORA_OPERANDS
    a, b, dropout, scale = adapters[0]
    if dropout.training and getattr(dropout, "p", 0):
        return Reason.LORA_OPERANDS
    if dtypes != (x.dtype, x.dtype) or (base.compute_dtype or x.dtype) is not x.dtype:
        return Reason.LORA_DTYPES
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, a, b, base.bias)):
        return unsupported(x)
    return a, b, float(scale)


def run(
    base: Any, adapters: list[Any], x: Tensor, dtype: torch.dtype, dense: Callable[[], Tensor], out_features: int
) -> Tensor:
    """Compute the layer's result [..., out] for x [..., in].

    ``dtype`` is that of the product with the base weight [out, in], which ``dense`` returns.
    """
    rows, autocast = cast(x.reshape(-1, x.shape[-1]), dtype), torch.is_autocast_enabled(x.device.type)
    few = not torch.is_grad_enabled() and len(rows) <= FEW_ROWS
    is_cast = x.dtype is not dtype  # True if autocast casts x, and peft therefore adds LoRA in fp32
    summed = FP32 if is_cast else dtype
    products: list[Adapter] = []
    tensors: list[Any] = []
    for a, b, dropout, scale in adapters:
        dropped = dropout.training and getattr(dropout, "p", 0)
        wide = not autocast and a.dtype is not dtype  # True if A, B and the products with them are in fp32
        z = rows
        if dropped:  # dropout runs in the dtype that peft uses, because the dropout mask depends on the dtype
            z = dropout(x if autocast else x.to(a.dtype)).reshape(rows.shape)
        elif is_cast:
            z = x.reshape(rows.shape)
        z, a, b = (z, a, b) if wide else (cast(z, dtype), cast(a, dtype), cast(b, dtype))
        kind = WideFactors if wide and supports(z, a, out_features) else Factors
        is_x = not (dropped or is_cast)
        products.append((kind, scale, is_x))
        # Pass None for a z that is x. With x passed twice, compiled autograd would add a gradient to None.
        tensors += None if is_x else z, a, b
    later, bias = None, base.bias
    if bias is not None:
        later, bias = (bias.to(dtype), None) if is_cast and not bias.requires_grad else (None, bias.to(dtype))
    y = cast(base(x).reshape(-1, out_features), summed) if few else bias
    result: Tensor = cast(LoraProduct.apply(rows, y, dense, products, *tensors), summed)
    if not few:
        with torch.no_grad():
            if is_cast:
                result.add_(torch.nn.functional.linear(rows, dense(), later))
            else:
                result.addmm_(rows, dense().t())
    result = unsafe_view(result, (*x.shape[:-1], out_features))
    return result


# On a T4, Dynamo skips the frame of a layer that uses bf16, and would compile the functions that the layer calls, such as
# ``run``.
context.keep_dynamo_out(run)


def linear(target: Target, original: Function) -> Function:
    """Replace ``peft.tuners.lora.bnb.Linear4bit.forward``.

    Dynamo traces peft's forward, whose operations Inductor fuses, or nf4_patch's op for few rows with ``matmul="auto"``.
    """
    dequantizer = Dequantizer(target.name)
    fused = FusedMatmul(target.name, dequantizer.fallbacks)
    replaced = Computed(original).replaced
    # Dynamo calls this function during the trace, and treats the result as a constant.
    replaced_in_trace: Any = lambda: replaced() != ""  # noqa: E731
    replaced_in_trace._dynamo_marked_constant = True
    attempt: Any = dequantizer.fallbacks.attempt
    uses = counters.uses_of("lora")

    def decode(packed: Any, state: Any, dtype: torch.dtype) -> Tensor | Reason:
        weight = weight_of(packed, state)
        if type(weight) is Reason:
            return weight
        with context.plain_methods():
            return dequantizer.run(weight if weight.dtype is dtype else weight._replace(dtype=dtype), None, False, True)

    def dense(packed: Any, state: Any, decoded: torch.dtype, dtype: torch.dtype) -> Tensor:
        traced = context.is_compiling()  # if True, compiled autograd traces the patched dequantize_4bit as one op
        result = attempt(decode, packed, state, decoded) if switch.on and not traced else None
        if not isinstance(result, Tensor):
            result = sys.modules[FUNCTIONS].dequantize_4bit(packed, state)
        return cast(result, dtype)

    def add(packed: Any, state: Any, x: Tensor, bias: Any, adapter: Any) -> Tensor | Reason:
        weight = weight_of(packed, state)
        if type(weight) is Reason:
            return weight
        with context.plain_methods():
            weight = weight if weight.dtype is x.dtype else weight._replace(dtype=x.dtype)
            return fused.run(x, weight, bias, None, adapter)

    def traced(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the op's result for few rows without a gradient, or the Reason why Dynamo has to trace peft's forward."""
        if not matmul_gate.on or torch.is_grad_enabled():
            return Reason.MATMUL_OPERANDS
        if (watcher := context.watched_trace()) is not None:
            return watcher
        if type(x) not in PLAIN:
            return Reason.TENSOR_SUBCLASS
        adapters, base = adapters_of(self, x, args, kwargs, True), self.base_layer
        if isinstance(adapters, Reason):
            return adapters
        if not is_plain(self, base, True):
            return Reason.LORA_HOOKED
        if replaced_in_trace():
            return Reason.LORA_REPLACED
        only = only_adapter(adapters, base, x, dtypes_of(base, x))
        if isinstance(only, Reason):
            return only
        packed = base.weight
        fields = fields_of(packed, getattr(packed, "quant_state", None) or base.quant_state)
        if isinstance(fields, Reason):
            return fields
        *others, shape, _, quant_type = fields
        return few_rows.traced(x, (*others, shape, x.dtype, quant_type), base.bias, *only)

    def prepare(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's result, or (``run``, *arguments), or a Reason. A recompute repeats the forward's decision."""
        if not lora_gate.on:
            # Without lora="fused", only calls that require no gradient are handled. They save no tensors, so their
            # recompute need not run the same code.
            return decide(self, x, args, kwargs, False)
        found = decisions_of("lora")
        if found is None:
            return decide(self, x, args, kwargs, False)
        decisions, earlier = found
        if isinstance(earlier, Reason):
            return earlier
        decisions.append(Reason.INTERNAL_ERROR)  # this decision stays recorded if ``decide`` raises an error
        result = decide(self, x, args, kwargs, earlier is True)
        decisions[-1] = result if isinstance(result, Reason) else True
        return result

    def decide(self: Any, x: Any, args: Any, kwargs: Any, again: bool) -> Any:
        """Check whether nf4_patch can run this call, and return the result of ``prepare``.

        With ``again``, this is the recompute of a forward that used ``run``. It has to use ``run`` too, so it ignores
        hooks, modes and replaced functions, which are newer than the forward.
        """
        few = matmul_gate.on and x.numel() <= LARGEST_M * x.shape[-1]
        if not (few or lora_gate.on):
            return Reason.NOT_FASTER if runtime.runs_on(x) else Reason.NOT_CUDA
        watcher = context.watched()
        if watcher is not None and not (again and watcher in context.MODES):
            return watcher
        adapters, base = adapters_of(self, x, args, kwargs, not again), self.base_layer
        if isinstance(adapters, Reason):
            return adapters
        if not is_plain(self, base, not again):
            return Reason.LORA_HOOKED
        if not again and (name := replaced()):
            say(name)
            return Reason.LORA_REPLACED
        packed, bias = base.weight, base.bias
        state = getattr(packed, "quant_state", None) or base.quant_state  # FSDP's weight has no quant_state
        shape = tuple(getattr(state, "shape", ()))
        dtypes = dtypes_of(base, x)
        plain = type(x) in PLAIN and (bias is None or type(bias) in PLAIN)
        refused = (
            (Reason.NOT_4BIT, len(shape) != 2),
            (Reason.NOT_CUDA, not runtime.runs_on(x)),
            (Reason.CPU_PACKING, getattr(state, "packing_format_for_cpu", False)),  # a layout for CPU kernels only
            (Reason.MIXED_DEVICES, x.device != packed.device),
            (Reason.TENSOR_SUBCLASS, not (plain and (type(packed) in PLAIN or returns_tensors(type(packed))))),
            (Reason.LORA_DTYPES, dtypes is None),
            (Reason.ARGUMENTS, x.shape[-1:] != shape[1:]),
        )
        for reason, holds in refused:
            if holds:
                return reason
        if few:
            only = only_adapter(adapters, base, x, dtypes)
            result = only if isinstance(only, Reason) else add(packed, state, x, bias, only)
            if not (isinstance(result, Reason) and lora_gate.on):
                return result
        if spare.users:
            spare.observe(x)
        uses.hits += 1
        dtype, decoded = dtypes  # type: ignore[misc]
        # Return ``run`` instead of calling it, so that ``replacement_of`` calls it outside of its error handling. A
        # checkpoint can end its recompute with an exception inside ``run``, which is not an error.
        return run, base, adapters, x, dtype, functools.partial(dense, packed, state, decoded, dtype), shape[0]

    return replacement_of(target, original, dequantizer.fallbacks, prepare, traced)
