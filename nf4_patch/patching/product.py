"""Products straight from the packed weight, where bitsandbytes and Unsloth multiply a few rows.

Not the bits of the original (neither are bitsandbytes' own fused products those of dequantize + matmul):
therefore a switch of its own, ``enable(matmul="auto")`` or NF4_PATCH_MATMUL=auto, off by default.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..nf4 import calibration, matmul, matmul_dx
from ..nf4 import launch as launching
from ..nf4.layout import Layout
from . import guards
from .guards import Reason
from .stats import ledger


@functools.lru_cache(maxsize=4096)
def is_measured(device: int, m: int, n: int, k: int, backward: bool = False) -> bool:
    """Whether there is a row, calibrated or shipped, in which our product won."""
    table: Any = matmul_dx if backward else matmul
    return table.config_for(torch.cuda.get_device_capability(device), m, n, k, device=device) is not None


calibration.dependents.append(is_measured.cache_clear)


class Multiplier:
    """Serves the products of one target: from x, the weight and its fields to the result or a Reason.

    Backward, x is dY and the result dX: the same but for which side of the weight is summed over.
    """

    def __init__(self, target: str, backward: bool = False, limit: int = 16384):
        self.target = target
        self.backward = backward
        self.refusal: Any = matmul_dx.refusal if backward else matmul.refusal
        self.product: Any = matmul_dx.matmul_4bit_dx if backward else matmul.matmul_4bit
        self.approved: set[tuple[Any, ...]] = set()  # weights that passed the guards: addresses, sizes, types
        self.limit = limit

    def serve(
        self, x: torch.Tensor, packed: torch.Tensor, fields: tuple[Any, ...],
        bias: torch.Tensor | None = None, out: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """x @ weight.T + bias, [..., N] in x's dtype, or the Reason why not; backward x @ weight, [..., K].

        Args:
            bias: forward only.
            fields: those of a Layout after ``packed``, the dtype being x's.
            out: filled and returned.

        Raises:
            KernelUnavailable: it cannot be compiled here, or not now.
        """
        if not x.is_cuda or launching.INTERPRETED:
            return Reason.NOT_CUDA
        absmax, code, absmax2, code2, offset, blocksize, blocksize2, (n, k), dtype = fields
        inner, outer = (n, k) if self.backward else (k, n)
        m = x.numel() // inner
        if m == 0 or x.shape[-1] != inner or not is_measured(x.device.index, m, n, k, self.backward):
            return Reason.ROWS
        if out is not None and not (
            out.shape == (*x.shape[:-1], outer)
            and out.dtype is dtype
            and out.device == x.device
            and out.is_contiguous()
            and not out.requires_grad
        ):
            return Reason.OUT
        extra = () if self.backward else (bias,)
        key = (
            x.device.index, packed.data_ptr(), packed.numel(), absmax.data_ptr(), absmax.numel(),
            *((t.data_ptr() for t in (absmax2, code2, offset)) if absmax2 is not None else ()),
            blocksize, n, k, dtype,
        )  # fmt: skip
        if key not in self.approved:
            reason = guards.check(Layout(packed, *fields))
            if reason is None and (
                self.refusal(x, packed, blocksize, n, k, *extra) is not None
                or (offset is not None and offset.dtype is not torch.float32)
                or packed.device != x.device
            ):
                reason = Reason.PRODUCT
            if reason is None and not all(map(launching.has_memory, guards._tensors(Layout(packed, *fields)))):
                reason = Reason.NO_MEMORY
            if reason is not None:
                return reason
            if len(self.approved) >= self.limit:
                self.approved.clear()
            self.approved.add(key)
        elif bias is not None and self.refusal(x, packed, blocksize, n, k, bias) is not None:
            return Reason.PRODUCT
        result = self.product(
            x, packed, absmax, code, absmax2, code2, offset, blocksize, blocksize2, n, k, *extra, out=out
        )
        ledger.tally(self.target, (n, k), f"{str(dtype).removeprefix('torch.')} product").hits += 1
        return result
