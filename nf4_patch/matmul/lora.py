"""The custom op nf4_patch::matmul_lora_4bit, which compiled code calls for the fused matmul with a LoRA adapter.

Eager calls use ``FusedMatmul.run``. Results are as accurate as peft's, but not bit-identical, because base and adapter
product are added in fp32 and rounded once. Each call reads A, B and the scaling, so a call after an optimizer step uses
the new adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..patching import op
from ..patching.context import plain_methods
from ..patching.counters import warn_once
from ..patching.reasons import Reason
from .product import FusedMatmul, config_or_why_not

# The op takes x, the fields of a PackedWeight (as in the schema of ``op``), bias, a, b and scale.
SCHEMA = "(Tensor x, " + op.SCHEMA[1:].partition(")")[0] + ", Tensor? bias, Tensor a, Tensor b, float scale) -> Tensor"
NAME = "nf4_patch.matmul_lora_4bit"
fused = FusedMatmul(NAME)


def kernel(x: Tensor, *fields: Any) -> Tensor:
    """Run the op, or PyTorch operators if the kernels cannot run.

    A compiled graph holds only the op, not the library's original function.
    """
    *packed, bias, a, b, scale = fields
    weight = op.given(*packed)
    with plain_methods():
        result = fused.run(x, weight, bias, None, (a, b, scale))
    if type(result) is not Reason:
        return result
    warn_once(op.FORMULA + result.sentence)
    dense = torch.ops.nf4_patch.dequantize_nf4(*packed)
    base = torch.nn.functional.linear(x, dense, bias)
    inner = torch.nn.functional.linear(x.to(a.dtype), a)
    total: Tensor = base + (torch.nn.functional.linear(inner, b) * scale).to(base.dtype)
    return total


def fake(x: Tensor, *fields: Any) -> Tensor:
    """Return an empty result, or a bool tensor whose length is the index of the Reason in ``op.REASONS``."""
    *packed, bias, a, b, scale = fields
    weight = op.given(*packed)
    ignore = (Reason.TENSOR_SUBCLASS,)  # every tensor is a FakeTensor here
    config = config_or_why_not(x, weight, bias, (a, b, scale), ignore)
    if type(config) is Reason:
        return x.new_empty(op.REASONS.index(config), dtype=torch.bool)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


if not hasattr(torch.ops.nf4_patch, "matmul_lora_4bit"):  # importlib.reload must not define the op a second time
    library = torch.library.Library("nf4_patch", "FRAGMENT")
    library.define("matmul_lora_4bit" + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("matmul_lora_4bit", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake("nf4_patch::matmul_lora_4bit", fake, lib=library)


def traced(
    x: Tensor, fields: tuple[Any, ...], bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor | Reason:
    """Call the op from code that Dynamo traces, with the fields of a PackedWeight in the order of the op's schema."""
    result: Tensor = torch.ops.nf4_patch.matmul_lora_4bit(x, *fields, bias, a, b, scale)
    return op.REASONS[result.shape[0]] if result.dtype is torch.bool else result
