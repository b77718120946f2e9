"""The functions that the fused matmul is compared with: X @ W.T with a 4-bit W, and the product in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import nf4_patch
from benchmarks.record import BITSANDBYTES
from benchmarks.timing import rotation
from nf4_patch.libraries.unsloth import MODULE as UNSLOTH_MODULE
from nf4_patch.matmul.measurement import DEQUANTIZE
from nf4_patch.nf4.codes import code_of
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.weight import PackedWeight
from nf4_patch.patching.quant_state import weight_of
from nf4_patch.tools.patch import dequantize_4bit, from_unsloth, original
from nf4_patch.tools.report import NotAvailable

Packed = tuple[torch.Tensor, Any]
Functions = dict[str, Callable[..., Any]]  # functions by name; each takes (packed, quant_state), some take ``out`` too
UNSLOTH = "Unsloth GEMV"  # for one row only


def subject_of(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))} {'bf16' if dtype is torch.bfloat16 else 'fp16'}"


def random_weights(shape: Sequence[int], dtype: torch.dtype, count: int) -> list[Packed]:
    """Return distinct random NF4 weights with nested statistics, as in a QLoRA checkpoint."""
    from bitsandbytes.functional import quantize_4bit

    dense = (torch.randn(*shape, dtype=dtype, device="cuda") * 0.02 for _ in range(count))
    return [quantize_4bit(weight, compress_statistics=True, quant_type="nf4") for weight in dense]


def exact(weight: PackedWeight) -> torch.Tensor:
    """Dequantize a weight in fp64: multiply codes by scales without rounding to 16 bits."""
    scales = reference.block_scales(weight, False).double().repeat_interleave(weight.blocksize)
    packed = weight.bytes()
    nibbles = torch.stack((packed >> 4, packed & 15), -1).reshape(-1).long()
    return (code_of(weight.quant_type, packed.device).double()[nibbles] * scales).view(tuple(weight.shape))


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def multiply(x: torch.Tensor, packed: torch.Tensor, state: Any) -> torch.Tensor:
    """Call bitsandbytes' op ``gemm_4bit`` as Linear4bit's forward does. ``state`` must be nested."""
    fields = state.state2.absmax, state.blocksize, state.quant_type, None, state.absmax, state.state2.code, state.offset
    return torch.ops.bitsandbytes.gemm_4bit(x, packed, list(state.shape), *fields)


def require_gemm() -> None:
    """Require a release of bitsandbytes that has a fused matmul to compare with.

    Raises:
        NotAvailable: bitsandbytes is older than 0.50.
    """
    import bitsandbytes  # noqa: F401 (registers its ops)

    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        raise NotAvailable("bitsandbytes before 0.50 has no gemm_4bit to compare with. Run pip install -U bitsandbytes")


def gemv() -> Callable[..., Any] | None:
    """Return Unsloth's unpatched matmul for an x of one row, or None if Unsloth is missing or fails on this machine."""
    return from_unsloth(lambda: original(UNSLOTH_MODULE, "_fast_gemv_bnb") or original(UNSLOTH_MODULE, "fast_gemv"))


def others(x: torch.Tensor, unsloth: Callable[..., Any] | None) -> Functions:
    """Return the functions that the fused matmul is compared with, by name. Each multiplies x by a packed weight.

    The patch must be off when these functions are called. ``unsloth`` is included only if x has one row.
    """
    found: Functions = {
        BITSANDBYTES: functools.partial(multiply, x),
        DEQUANTIZE: lambda packed, state: F.linear(x, nf4_patch.dequantize_nf4(packed, state)),
    }
    if len(x) == 1 and unsloth is not None:
        row = x.view(1, 1, -1)
        found[UNSLOTH] = lambda packed, state: unsloth(row, packed, state)
    return found


class Weights:
    """Packed weights of one shape. The first weight is also kept dequantized, in its own dtype and in fp64."""

    def __init__(self, packed: Sequence[Packed]):
        self.packed = packed
        weight, state = packed[0]
        self.dense: torch.Tensor = dequantize_4bit()(weight, state)
        self.exact = exact(weight_of(weight, state))  # fp64
        self.subject = subject_of(self.dense.shape, self.dense.dtype)

    @classmethod
    def random(cls, shape: tuple[int, int], dtype: torch.dtype) -> Weights:
        """Make enough random weights to overflow the L2 cache."""
        return cls(random_weights(shape, dtype, max(4, min(24, rotation(shape[0] * shape[1] // 2)))))

    def rows_of_x(self, m: int) -> torch.Tensor:
        return torch.randn(m, self.dense.shape[1], dtype=self.dense.dtype, device=self.dense.device)

    def errors(self, x: torch.Tensor, ours: torch.Tensor) -> tuple[float, float]:
        """Return the relative L2 errors of the fused matmul and of dequantize + matmul, against the product in fp64.

        ``ours`` is the fused matmul's product of x and the first weight. This method computes the other two products of
        the same operands.
        """
        truth = x.double() @ self.exact.t()
        return error(ours, truth), error(x @ self.dense.t(), truth)
