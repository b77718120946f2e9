"""The packed 4-bit weight, as plain tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .codes import remembered_code

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STORAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
OFFSET_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


TensorGuards: Any = torch._C._dynamo.guards.TensorGuards  # type: ignore[attr-defined]
LIMIT = 16384  # the maximum number of memos. A 70B model has 560 weights, and each is read in one or two dtypes.


class WeightMemo:
    """Per-weight memo (launch, cache entry), shared by all targets and the custom op.

    It is valid while the weight's fingerprint is the same.
    """

    launch: Any = None  # the weight's Launch. It is built after the guards have checked the weight.
    entry: Any = None  # the weight's CacheEntry. The weight cache sets it, and checks at each read that it is valid.


class PackedWeight(NamedTuple):
    """A packed 4-bit weight of n = prod(shape) elements in ceil(n / blocksize) blocks.

    Double quantization is called nested. A flat weight has None for ``absmax2``, ``code2`` and ``offset``.
    """

    packed: torch.Tensor  # ceil(n / 2) bytes as any of STORAGE_DTYPES. The high nibble of a byte is the even element.
    absmax: torch.Tensor  # [blocks], uint8 (nested: an index into code2) or fp32 (flat: the scale itself)
    absmax2: torch.Tensor | None  # [ceil(blocks / blocksize2)] fp32, the scales of absmax
    code2: torch.Tensor | None  # [256] fp32, the values that absmax indexes
    offset: torch.Tensor | None  # a tensor of one element, which is added to every scale; any of OFFSET_DTYPES
    blocksize: int  # elements per block
    blocksize2: int  # blocks per second-level block; 0 when flat
    shape: Sequence[int]  # shape of the dequantized weight, of any rank
    dtype: torch.dtype  # dtype of the dequantized weight, one of OUTPUT_DTYPES
    quant_type: str  # "nf4" or "fp4"

    def memo(self) -> WeightMemo:
        """Return the memo of this weight's fingerprint.

        Raises:
            AttributeError: a field is not a tensor.
        """
        # The memo is looked up by addresses, shape and dtype. One call into PyTorch then compares the tensors with those of the
        # memo (class, dispatch keys, dtype, device, sizes, strides). This takes a third of the time of a fingerprint.
        # Any in place of typing.cast, and all ten names in place of a starred name, save 0.2 us per call (2-core CPU
        # machine, Python 3.11).
        fields: Any = self
        packed, absmax, absmax2, code2, offset, blocksize, blocksize2, shape, dtype, quant_type = fields
        if absmax2 is None:
            place: Any = (
                packed.data_ptr(), absmax.data_ptr(), code2, offset, blocksize, shape, dtype, quant_type
            )  # fmt: skip
            for same, memo in _checked.get(place, ()):
                if same(packed, absmax):
                    return memo
            return self.remember(place, packed, absmax)
        place = (
            packed.data_ptr(), absmax.data_ptr(), absmax2.data_ptr(), code2.data_ptr(), offset.data_ptr(),
            blocksize, blocksize2, shape, dtype, quant_type,
        )  # fmt: skip
        for same, memo in _checked.get(place, ()):
            if same(packed, absmax, absmax2, code2, offset):
                return memo
        return self.remember(place, packed, absmax, absmax2, code2, offset)

    def remember(self, place: tuple[Any, ...], *tensors: torch.Tensor) -> WeightMemo:
        """Return the memo for this weight's fingerprint, and store it under the key ``place``.

        ``memo()`` then finds it at once. It compares ``tensors`` with those of later weights that have the same key.
        """
        if len(_checked) >= LIMIT or len(_memos) >= LIMIT:
            forget()
        memo = _memos.setdefault(self.fingerprint(), WeightMemo())
        with contextlib.suppress(RuntimeError, TypeError):  # raised for a tensor without strides
            same = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            # A check passes only with the dispatch keys of its call, which depend on autocast and inference mode. So
            # the latest 8 checks are kept.
            _checked[place] = ((same, memo), *_checked.get(place, ())[:7])
        return memo

    def fingerprint(self) -> tuple[Any, ...]:
        """Return the addresses of the weight's tensors, and all properties on which the guards' answer depends."""
        count = 2 if self.absmax2 is None else 5
        tensors: Any = self[:count]
        return (
            *self[count:], self.packed.shape, type(self.packed).__torch_dispatch__, *map(type, tensors[1:]),
            *((t.data_ptr(), t.nbytes, t.dtype, t.is_contiguous(), t.is_neg()) for t in tensors),
        )  # fmt: skip

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in self[:5] if tensor is not None)

    def owner(self) -> torch.Tensor:
        """Return the tensor that owns the packed bytes. This is a parameter, unless the bytes were computed or copied.

        Bytes that Inductor computed have no ``_base``. Their address and version counter do not identify the weight.
        """
        base: torch.Tensor | None = self.packed._base
        return self.packed if base is None else base

    def operands(self) -> tuple[torch.Tensor, ...]:
        """Return a kernel's tensors: packed, absmax, code, absmax2, code2, offset.

        A flat weight has ``code`` in place of the last three.

        Raises:
            KernelUnavailable: GRAPH_CAPTURE, if ``code`` is not on the device yet and a CUDA graph is being captured.
        """
        code = remembered_code(self.quant_type, self.packed.device)
        second = (self.absmax2, self.code2, self.offset) if self.nested() else (code,) * 3
        return (self.packed, self.absmax, code, *second)  # type: ignore[return-value]

    def numel(self) -> int:
        return math.prod(self.shape)

    def blocks(self) -> int:
        return -(-self.numel() // self.blocksize)

    def nested(self) -> bool:
        return self.absmax2 is not None

    def offset_dtype(self) -> torch.dtype | None:
        return None if self.offset is None else self.offset.dtype

    def transposed(self) -> bool:
        """Return whether bitsandbytes returns the transposed weight."""
        return self.packed.shape[0] == 1

    def step(self) -> int:
        """Return how many consecutive elements of a row always share one scale, a power of two up to 64."""
        return min(64, self.blocksize, self.shape[1] & -self.shape[1])

    def nbytes(self) -> int:
        return self.packed.numel() * self.packed.element_size()

    def bytes(self) -> torch.Tensor:
        return self.packed.detach().reshape(-1).view(torch.uint8)


_memos: dict[tuple[Any, ...], WeightMemo] = {}
# The key holds the addresses of a weight's tensors, and all fields that are not tensors. The value holds pairs
# (check, memo): if a weight's tensors pass the check, the memo is the memo of that weight.
_checked: dict[tuple[Any, ...], tuple[tuple[Any, WeightMemo], ...]] = {}


def forget() -> None:
    _checked.clear()
    _memos.clear()
