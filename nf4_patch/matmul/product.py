"""Replace bitsandbytes' and Unsloth's matmul of a few rows by the fused matmul.

Results of the fused matmul are as accurate as those of dequantize + matmul, but not bit-identical. The same is true
of bitsandbytes' own fused kernels. So the fused matmul is off by default. ``enable(matmul="auto")`` or
NF4_PATCH_MATMUL=auto switches it on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.weight import LIMIT, PackedWeight
from ..patching import guards
from ..patching.context import PLAIN, is_jit_tracing, plain_methods, returns_tensors, watched
from ..patching.counters import counters
from ..patching.quant_state import weight_of
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks, Function, replacement_of
from . import launch as matmul
from .choice import config_for


class FusedMatmul:
    """The fused matmul of one target."""

    def __init__(self, target: str, fallbacks: Fallbacks | None = None):
        self.target, self.fallbacks = target, fallbacks or Fallbacks(target)
        self.launches: dict[Any, matmul.MatmulLaunch] = {}

    def run(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor | Reason:
        """Return x @ weight.T + bias, [..., N] in x's dtype, or the Reason for a fallback.

        Args:
            weight: in x's dtype.
            out: the tensor for the result. If it is None, a new tensor is returned.
        """
        launch: matmul.MatmulLaunch | Reason | None
        key: Any
        try:
            bias_key = (
                None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, bias.is_contiguous(), bias.is_neg())
            )
            key = (x.shape, x.get_device(), x.is_neg(), bias_key, weight.memo())
            launch = self.launches.get(key)
        except (AttributeError, TypeError, RuntimeError):
            # An argument is not a tensor, or a tensor has no memory, or a shape is a list. Such a call has no key.
            key = launch = None
        if launch is None:
            launch = self.remember(key, self.resolve(x, weight, bias))
            if type(launch) is Reason:
                return launch
        if out is not None and not launch.accepts(x, out):
            return Reason.OUT_MISMATCH
        result = launch(x, out)
        launch.counter.hits += 1
        return result

    def remember(self, key: Any, launch: matmul.MatmulLaunch | Reason) -> matmul.MatmulLaunch | Reason:
        """Store a launch for later calls with the same key, and return it.

        A Reason is returned without being stored, and so is a launch if the key is None.
        """
        if key is not None and type(launch) is not Reason:
            if len(self.launches) >= LIMIT:
                self.launches.clear()
            self.launches[key] = launch
        return launch

    def resolve(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> matmul.MatmulLaunch | Reason:
        """Check whether the kernel supports the operands. Return a launch for them, or the Reason for a fallback."""
        if is_jit_tracing():
            return Reason.EXPORTING
        device = x.get_device()
        if device < 0:
            return Reason.NOT_CUDA
        if len(weight.shape) != 2:
            return Reason.MATMUL_OPERANDS
        n, k = weight.shape
        m = x.numel() // k if k else 0
        fits = m and x.shape[-1] == k
        config = config_for(device, m, n, k, may_measure=not x.requires_grad) if fits else None
        if config is None:
            return Reason.NOT_FASTER
        reason = guards.why_not(weight)
        if reason is not None:
            return reason
        if not matmul.supports(x, weight, bias):
            return Reason.MATMUL_OPERANDS
        if not all(map(runtime.has_memory, weight.tensors())):
            return Reason.NO_STORAGE
        try:
            launch = matmul.resolve(x, weight, bias, config)
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        launch.counter = counters.of(self.target, (n, k), str(x.dtype), "fused matmul")
        return launch

    def of_state(
        self, x: Tensor, packed: Tensor, state: Any, bias: Tensor | None = None, out: Tensor | None = None,
        transposed: bool | None = None,
    ) -> Tensor | Reason:  # fmt: skip
        """Multiply x by a weight that is given as packed bytes and a QuantState. Return the product, or a Reason.

        A call that requires a gradient gets a Reason, because the fused matmul has no backward.

        Args:
            transposed: the required layout of the packed bytes. True requires [1, bytes], False requires another
                layout, and None accepts all.
        """
        weight = weight_of(packed, state)
        if type(weight) is Reason:
            # bitsandbytes itself multiplies by a weight that is packed for the CPU. So on the CPU this is no error.
            return Reason.NOT_CUDA if weight is Reason.CPU_PACKING and x.get_device() < 0 else weight
        if (watcher := watched()) is not None:
            return watcher
        if type(x) not in PLAIN or not returns_tensors(type(packed)):
            return Reason.TENSOR_SUBCLASS
        if bias is not None and type(bias) not in PLAIN:
            return Reason.TENSOR_SUBCLASS
        if (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))) or (
            transposed is not None and weight.transposed() is not transposed
        ):
            return Reason.MATMUL_OPERANDS
        if weight.dtype is not x.dtype:
            weight = weight._replace(dtype=x.dtype)
        with plain_methods():
            return self.run(x, weight, bias, out)

    def one_row(self, x: Tensor, packed: Tensor, state: Any, out: Tensor | None) -> Tensor | Reason:
        """Call ``of_state`` if x has one row."""
        return self.of_state(x, packed, state, None, out) if x.numel() == x.shape[-1] else Reason.MATMUL_OPERANDS


def multiplied_first(multiply: Callable[..., Tensor | Reason]) -> Function:
    """Turn ``multiply`` into a factory of replacements, for the ``replace`` field of a Target (a decorator).

    A replacement calls ``multiply`` first. If ``multiply`` returns a Reason, the original function runs.
    """

    def make(target: Any, original: Function) -> Function:
        fused = FusedMatmul(target.name)
        return replacement_of(
            target, original, fused.fallbacks, MethodType(multiply, fused), is_body=True, refuses=True
        )

    return make
