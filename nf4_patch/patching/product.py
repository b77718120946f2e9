"""Products straight from the packed weight, where bitsandbytes and Unsloth multiply a few rows.

Not the bits of the original (neither are bitsandbytes' own fused products those of dequantize + matmul):
therefore a switch of its own, ``enable(matmul="auto")`` or NF4_PATCH_MATMUL=auto, off by default.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from ..nf4 import runtime
from ..nf4.dequantize import compilation
from ..nf4.layout import Layout, identity
from ..nf4.matmul import launch as matmul
from . import guards
from .reasons import Reason
from .stats import ledger


@functools.lru_cache(maxsize=4096)
def is_measured(device: int, m: int, n: int, k: int) -> bool:
    """Whether there is a row, calibrated or shipped, in which our product won."""
    return matmul.config_for(torch.cuda.get_device_capability(device), m, n, k, device=device) is not None


_multipliers: weakref.WeakSet[Multiplier] = weakref.WeakSet()


def forget() -> None:
    """Ask the tables anew: another calibration is in force."""
    matmul.forget()
    is_measured.cache_clear()
    for multiplier in _multipliers:
        multiplier.products.clear()


class Multiplier:
    """Serves the products of one target: from x, the weight and its fields to the result or a Reason."""

    def __init__(self, server: Any):
        self.server = server  # of the target's dequantizations
        self.memo = runtime.Memo()
        self.products: dict[tuple[Any, ...], Any] = self.memo.launches
        _multipliers.add(self)

    def serve(
        self, x: torch.Tensor, packed: torch.Tensor, fields: tuple[Any, ...], quant_type: str,
        bias: torch.Tensor | None = None, out: torch.Tensor | None = None, state: Any = None,
    ) -> Any:  # fmt: skip
        """x @ weight.T + bias, [..., N] in x's dtype, or the Reason why not.

        A remembered product is found before anything else is asked for.

        Args:
            fields: those of a Layout after ``packed``, the dtype being x's; the code is not read.
            out: filled and returned.
            state: the QuantState, where there is one to look at.
        """
        key: Any = None
        product = None
        try:
            known = None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, bias.is_contiguous())
            key = (x.shape, x.get_device(), known, identity(quant_type, packed, *fields))
            product = self.products.get(key)
        except (AttributeError, TypeError):  # a field is no tensor, or the shape a list: the guards decide
            key = None
        if product is None:
            product = self.prepare(key, x, Layout(packed, *fields), quant_type, bias, state)
            if type(product) is Reason:
                return product
        if out is not None and not (
            out.shape == product.shape
            and out.dtype is x.dtype
            and out.get_device() == product.device
            and out.is_contiguous()
            and not out.requires_grad
        ):
            return Reason.OUT
        result = product(x, out)
        product.tally.hits += 1
        return result

    def prepare(self, key: Any, x: torch.Tensor, layout: Layout, quant_type: str, bias: Any, state: Any) -> Any:
        """Guard and resolve a product that is then remembered, or the Reason why not."""
        if torch._C._is_tracing():
            return Reason.EXPORT
        device = x.get_device()
        if device < 0 or compilation.INTERPRETED:
            return Reason.NOT_CUDA
        if len(layout.shape) != 2:
            return Reason.PRODUCT
        n, k = layout.shape
        m = x.numel() // k
        if m == 0 or x.shape[-1] != k or not is_measured(device, m, n, k):
            return Reason.ROWS
        decoded = self.server.decoded_as(layout, quant_type)
        if isinstance(decoded, Reason):
            return decoded
        reason = self.server.refuse(decoded, state)
        if reason is not None:
            return reason
        if matmul.refusal(x, decoded, bias) is not None:
            return Reason.PRODUCT
        if not all(map(runtime.has_memory, guards._tensors(decoded))):
            return Reason.NO_MEMORY
        try:
            product: Any = matmul.resolve(x, decoded, bias)
        except runtime.KernelUnavailable as error:
            return self.server.unavailable(error)
        product.tally = ledger.tally(self.server.target, (n, k), f"{str(x.dtype).removeprefix('torch.')} product")
        return product if key is None else self.memo.remember(key, product)
