"""Multiply a few rows by a packed weight and add a LoRA adapter, in one fused matmul.

Eager calls use a FusedLora. Compiled code calls the custom op nf4_patch::matmul_lora_4bit.

Results are as accurate as peft's, but not bit-identical, because the products of the base layer and the adapter are
added in fp32 and their sum is rounded once. Each call reads A, B and the scaling, so a call after an optimizer step
uses the new adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.weight import PackedWeight
from ..patching import guards, op
from ..patching.context import is_jit_tracing, plain_methods
from ..patching.counters import counters, warn_once
from ..patching.reasons import Reason
from . import adapter
from . import launch as matmul
from .choice import LARGEST_M, LAST_ROWS, config_for
from .product import FusedMatmul


class FusedLora(FusedMatmul):
    """The fused matmul with a LoRA adapter, for one target: a library function that nf4_patch replaces, or an op."""

    def add(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor | Reason:
        """Return x @ weight.T + bias + scale * (x @ A.T) @ B.T, [..., N] in bf16, or the Reason for a fallback.

        Args:
            x: [..., K], bf16.
            weight: [N, K] in x's dtype.
            bias: [N] in x's dtype.
            a, b: A [rank, K] and B [N, rank], both in bf16 or both in fp32.
        """
        if not (adapter.is_readable(a) and adapter.is_readable(b)):
            return Reason.LORA_OPERANDS
        launch: Any
        key: Any
        try:
            bias_key = None
            if bias is not None:
                bias_key = bias.data_ptr(), bias.dtype, bias.shape, bias.is_contiguous(), bias.is_neg()
            factors = a.dtype, b.dtype, a.shape, b.shape, a.get_device(), b.get_device()
            key = (x.shape, x.dtype, x.get_device(), x.is_neg(), bias_key, factors, weight.memo())
            launch = self.launches.get(key)
        except (AttributeError, TypeError, RuntimeError):  # see FusedMatmul.run
            key = launch = None
        if launch is None:
            launch = self.remember(key, self.resolve_with(x, weight, bias, a, b))
            if type(launch) is Reason:
                return launch
        result: Tensor = launch.add(x, a, b, scale)
        launch.counter.hits += 1
        return result

    def resolve_with(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, a: Tensor, b: Tensor
    ) -> adapter.LoraLaunch | Reason:
        """Check whether the kernels support the operands. Return a launch for them, or the Reason for a fallback."""
        if is_jit_tracing():
            return Reason.EXPORTING
        reason = why_not(x, weight, bias, a, b)
        if reason is not None:
            return reason
        if not matmul.supports(x, weight, bias) or weight.packed.data_ptr() % 16:
            return Reason.MATMUL_OPERANDS
        if not all(map(runtime.has_memory, weight.tensors())):
            return Reason.NO_STORAGE
        n, k = weight.shape
        config: Any = config_for(x.get_device(), x.numel() // k, n, k)
        try:
            launch = adapter.resolve(x, weight, bias, config, a)
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        launch.counter = counters.of(self.target, (n, k), str(x.dtype), "fused matmul with LoRA")
        return launch


def why_not(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, a: Tensor, b: Tensor, ignore: tuple[Reason, ...] = ()
) -> Reason | None:
    """Return the first Reason why the kernels do not support these operands, or None.

    The answer depends neither on addresses nor on the contents of tensors, so the function also works on fake tensors.

    Args:
        ignore: Reasons that ``guards.why_not`` does not check for the weight.
    """
    if not runtime.runs_on(x):
        return Reason.NOT_CUDA
    if len(weight.shape) != 2:
        return Reason.MATMUL_OPERANDS
    n, k = weight.shape
    if x.shape[-1:] != (k,) or x.numel() == 0 or x.numel() > LARGEST_M * k:
        return Reason.NOT_FASTER
    m: Any = x.numel() // k
    # If Dynamo traces the number of rows as a symbol, the compiled graph runs for any number of rows.
    # Then every range of row counts needs a config. LAST_ROWS holds the largest count of each range.
    every = (m,) if type(m) is int else LAST_ROWS
    if any(config_for(x.get_device(), rows, n, k) is None for rows in every):
        return Reason.NOT_FASTER
    m = every[-1]
    reason = guards.why_not(weight, ignore=ignore)
    if reason is not None:
        return reason
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != (n,) or bias.device != x.device):
        return Reason.MATMUL_OPERANDS
    if x.dtype is not adapter.BF16 or runtime.capability_of(x.device) < (8, 0) or weight.packed.device != x.device:
        return Reason.MATMUL_OPERANDS
    return None if adapter.supports(x, m, n, a, b) else Reason.LORA_OPERANDS


# The op takes x, the fields of a PackedWeight (as in the schema of ``op``), bias, a, b and scale.
SCHEMA = "(Tensor x, " + op.SCHEMA[1:].partition(")")[0] + ", Tensor? bias, Tensor a, Tensor b, float scale) -> Tensor"
NAME = "nf4_patch.matmul_lora_4bit"
fused = FusedLora(NAME)


def kernel(x: Tensor, *fields: Any) -> Tensor:
    """Run the op matmul_lora_4bit. If the kernels cannot run, dequantize the weight and use PyTorch operators.

    The library's original function cannot run as the fallback, because a compiled graph contains only the op.
    """
    *packed, bias, a, b, scale = fields
    weight = op.given(*packed)
    with plain_methods():
        result = fused.add(x, weight, bias, a, b, scale)
    if type(result) is not Reason:
        return result
    warn_once(op.FORMULA + result.sentence)
    dense = torch.ops.nf4_patch.dequantize_nf4(*packed)
    base = torch.nn.functional.linear(x, dense, bias)
    inner = torch.nn.functional.linear(x.to(a.dtype), a)
    total: Tensor = base + (torch.nn.functional.linear(inner, b) * scale).to(base.dtype)
    return total


def fake(x: Tensor, *fields: Any) -> Tensor:
    """Return an empty tensor with the shape and dtype of the op's result, for tracing with fake tensors.

    If the kernels do not support the operands, return a bool tensor instead. Its length is the index of the Reason in
    ``op.REASONS``. ``op.fake`` encodes a Reason in the same way, and ``traced`` decodes it.
    """
    *packed, bias, a, b, _ = fields
    weight = op.given(*packed)
    reason = why_not(x, weight, bias, a, b, ignore=(Reason.TENSOR_SUBCLASS,))  # every tensor is a FakeTensor here
    if reason is not None:
        return x.new_empty(op.REASONS.index(reason), dtype=torch.bool)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


if not hasattr(torch.ops.nf4_patch, "matmul_lora_4bit"):  # importlib.reload: defined once per process
    library = torch.library.Library("nf4_patch", "FRAGMENT")
    library.define("matmul_lora_4bit" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("matmul_lora_4bit", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("nf4_patch::matmul_lora_4bit", fake, lib=library)


def traced(
    x: Tensor, fields: tuple[Any, ...], bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor | Reason:
    """Call the op from code that Dynamo traces. Return the result of the op, or the Reason for a fallback.

    Args:
        fields: the fields of a PackedWeight, in the order of the op's schema.
    """
    result: Tensor = torch.ops.nf4_patch.matmul_lora_4bit(x, *fields, bias, a, b, scale)
    return op.REASONS[result.shape[0]] if result.dtype is torch.bool else result
