"""The packed 4-bit weight as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STORAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
OFFSET_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Layout(NamedTuple):
    """One packed weight of n = prod(shape) elements in ceil(n / blocksize) blocks.

    A nested state carries ``absmax2``, ``code2`` and ``offset``; a flat one has None in all three.
    What follows from the fields is a method and no property: Dynamo of PyTorch 2.6 cannot trace a tuple's properties.
    """

    packed: torch.Tensor  # ceil(n / 2) bytes stored as any of STORAGE_DTYPES; high nibble = even element
    absmax: torch.Tensor  # [blocks], uint8 (nested: an index into code2) or fp32 (flat: the scale itself)
    code: torch.Tensor  # [16] fp32, the value of each nibble
    absmax2: torch.Tensor | None  # [ceil(blocks / blocksize2)] fp32
    code2: torch.Tensor | None  # [256] fp32
    offset: torch.Tensor | None  # one element, any of OFFSET_DTYPES, added to every scale
    blocksize: int  # elements per block
    blocksize2: int  # blocks per second-level block; 0 when flat
    shape: Sequence[int]  # of the dequantized weight, any rank
    dtype: torch.dtype  # of the dequantized weight, one of OUTPUT_DTYPES

    def numel(self) -> int:
        return math.prod(self.shape)

    def blocks(self) -> int:
        return -(-self.numel() // self.blocksize)

    def nested(self) -> bool:
        return self.absmax2 is not None

    def offset_dtype(self) -> torch.dtype | None:
        """None: flat."""
        return None if self.offset is None else self.offset.dtype

    def transposed(self) -> bool:
        """A packed weight handed in as [1, bytes] asks for the transposed result."""
        return self.packed.shape[0] == 1

    def step(self) -> int:
        """Of a weight [N, K]: so many elements of a row, 64 at most, from any multiple of it on, have one scale."""
        return min(64, self.blocksize, self.shape[1] & -self.shape[1])

    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.packed.numel() * self.packed.element_size()

    def bytes(self) -> torch.Tensor:
        """The packed weight as a flat uint8 view."""
        return self.packed.detach().reshape(-1).view(torch.uint8)

    def operands(self) -> tuple[torch.Tensor, ...]:
        """A kernel's tensors of the weight; a flat one repeats its code where the second level is, which is not read."""
        second = (self.absmax2, self.code2, self.offset) if self.nested() else (self.code,) * 3
        return (self.packed, self.absmax, self.code, *second)  # type: ignore[return-value]


def identity(
    table, packed, absmax, code, absmax2, code2, offset, blocksize, blocksize2, shape, dtype
) -> tuple[Any, ...]:
    """Everything a resolved launch depends on, as a key: the same addresses, sizes, strides and types, the same result.

    Args:
        table: what stands for ``code``, which is not read: the quant_type, or the address of the code.
        packed ... dtype: the fields of a Layout, in its order.

    Raises:
        AttributeError: a field is no tensor.
    """
    if absmax2 is None:
        return (
            packed.data_ptr(), packed.shape, packed.dtype, packed.is_contiguous(),
            absmax.data_ptr(), absmax.numel(), absmax.is_contiguous(), blocksize, shape, dtype, table,
        )  # fmt: skip
    return (
        packed.data_ptr(), packed.shape, packed.dtype, packed.is_contiguous(),
        absmax.data_ptr(), absmax.numel(), absmax.is_contiguous(), absmax2.data_ptr(), absmax2.numel(),
        absmax2.is_contiguous(), code2.data_ptr(), code2.is_contiguous(), offset.data_ptr(), offset.dtype,
        blocksize, blocksize2, shape, dtype, table,
    )  # fmt: skip
