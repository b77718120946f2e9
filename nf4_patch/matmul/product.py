"""Replace bitsandbytes' and Unsloth's matmul of a few rows by the fused matmul.

Results are as accurate as those of dequantize + matmul or of bitsandbytes' own fused kernels, but not bit-identical. So
the fused matmul is off by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..nf4 import runtime
from ..nf4.weight import LIMIT, PackedWeight
from ..patching import dequantizer, guards
from ..patching.context import PLAIN, is_jit_tracing, plain_methods, returns_tensors, watched
from ..patching.counters import counters
from ..patching.quant_state import weight_of
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks, Function, replacement_of
from . import adapter as lora_matmul
from . import launch as matmul
from .adapter import Adapter
from .choice import LARGEST_M, LAST_ROWS, config_for
from .option import KERNELS


class FusedMatmul:
    """Runs the fused matmul in place of one library function, and stores the launches."""

    def __init__(self, target: str, fallbacks: Fallbacks | None = None):
        self.target, self.fallbacks = target, fallbacks or Fallbacks(target)
        self.launches: dict[Any, matmul.MatmulLaunch] = {}

    def run(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        adapter: Adapter | None = None,
    ) -> Tensor | Reason:
        """Return x @ weight.T + bias, [..., N] in x's dtype, or the Reason for a fallback.

        The weight [N, K] has x's dtype. With ``adapter``, which excludes ``out``, add scale * (x @ A.T) @ B.T.
        """
        if dequantizer.prefetch.on:  # no lambda, see ``Dequantizer.run``
            found = dequantizer.prefetch.read(
                weight, functools.partial(self.run, x, bias=bias, out=out, adapter=adapter)
            )
            if found is not None:
                return found
        if adapter is not None and not (lora_matmul.is_readable(adapter[0]) and lora_matmul.is_readable(adapter[1])):
            return Reason.LORA_OPERANDS
        launch: Any
        key: Any
        try:
            bias_key = (
                None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, bias.is_contiguous(), bias.is_neg())
            )
            layout = None if adapter is None else lora_matmul.key_of(x, adapter)
            key = (x.shape, x.get_device(), x.is_neg(), bias_key, layout, weight.memo())
            launch = self.launches.get(key)
        except (AttributeError, TypeError, RuntimeError):
            # A call has no key if an argument is not a tensor, a tensor has no memory, or a shape is a list.
            key = launch = None
        if launch is None:
            launch = self.remember(key, self.resolve(x, weight, bias, adapter))
            if type(launch) is Reason:
                return launch
        if out is not None and (adapter is not None or not launch.accepts(x, out)):
            return Reason.OUT_MISMATCH
        result: Tensor = launch(x, out) if adapter is None else launch.add(x, *adapter)
        launch.counter.hits += 1
        return result

    def remember(self, key: Any, launch: matmul.MatmulLaunch | Reason) -> matmul.MatmulLaunch | Reason:
        """Return ``launch``, and store it unless it is a Reason or ``key`` is None."""
        if key is not None and type(launch) is not Reason:
            if len(self.launches) >= LIMIT:
                self.launches.clear()
            self.launches[key] = launch
        return launch

    def resolve(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, adapter: Adapter | None
    ) -> matmul.MatmulLaunch | Reason:
        """Return a launch for these operands, or the Reason why the kernel does not support them."""
        if is_jit_tracing():
            return Reason.EXPORTING
        config = config_or_why_not(x, weight, bias, adapter)
        if type(config) is Reason:
            return config
        if not matmul.supports(x, weight, bias):
            return Reason.MATMUL_OPERANDS
        if not all(map(runtime.has_memory, weight.tensors())):
            return Reason.NO_STORAGE
        try:
            if adapter is None:
                launch = matmul.resolve(x, weight, bias, config)
            else:
                launch = lora_matmul.resolve(x, weight, bias, config, adapter[0])
        except runtime.KernelUnavailable as error:
            return self.fallbacks.unavailable(error)
        kernel = KERNELS[adapter is not None]
        launch.counter = counters.of(self.target, tuple(weight.shape), str(x.dtype), kernel)
        return launch

    def of_state(
        self, x: Tensor, packed: Tensor, state: Any, bias: Tensor | None = None, out: Tensor | None = None,
        transposed: bool | None = None,
    ) -> Tensor | Reason:  # fmt: skip
        """Multiply x by a weight that is given as packed bytes and a QuantState. Return the product, or a Reason.

        The fused matmul has no backward, so a call that requires a gradient gets a Reason. With ``transposed`` True, the
        packed bytes must be [1, bytes], and with False they must not.
        """
        weight = weight_of(packed, state)
        if type(weight) is Reason:
            # On the CPU, bitsandbytes itself multiplies by a weight that is packed for the CPU, so this is no error.
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
            return unsupported(x)
        if weight.dtype is not x.dtype:
            weight = weight._replace(dtype=x.dtype)
        with plain_methods():
            return self.run(x, weight, bias, out)

    def one_row(self, x: Tensor, packed: Tensor, state: Any, out: Tensor | None) -> Tensor | Reason:
        return self.of_state(x, packed, state, None, out) if x.numel() == x.shape[-1] else Reason.MATMUL_OPERANDS


def unsupported(x: Tensor) -> Reason:
    return Reason.MATMUL_OPERANDS if runtime.runs_on(x) else Reason.NOT_CUDA


def config_or_why_not(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, adapter: Adapter | None, ignore: tuple[Reason, ...] = ()
) -> Any:
    """Return the config for these operands, or the first Reason, not in ``ignore``, why the kernels do not support them.

    Neither addresses nor contents of tensors are read, so the function also works on fake tensors.
    """
    if not runtime.runs_on(x):
        return Reason.NOT_CUDA
    if len(weight.shape) != 2:
        return Reason.MATMUL_OPERANDS
    n, k = weight.shape
    if x.shape[-1:] != (k,) or x.numel() == 0 or x.numel() > LARGEST_M * k:
        return Reason.NOT_FASTER
    m: Any = x.numel() // k
    # If Dynamo traces the number of rows as a symbol, the compiled graph runs for any number of rows, so every range of
    # row counts needs a config.
    every = (m,) if type(m) is int else LAST_ROWS
    device, may_measure = x.get_device(), adapter is not None or not x.requires_grad
    configs = [config_for(device, rows, n, k, may_measure=may_measure) for rows in every]
    if None in configs:
        return (
            Reason.NOT_CUDA if device < 0 else Reason.NOT_FASTER
        )  # under Triton's interpreter, kernels run on the CPU
    reason = guards.why_not(weight, ignore=ignore)
    if reason is None and adapter is not None:
        reason = lora_matmul.why_not(x, weight, bias, adapter, every[-1])
    return configs[-1] if reason is None else reason


def multiplied_first(multiply: Callable[..., Tensor | Reason]) -> Function:
    """Turn ``multiply`` into a factory of replacements, for the field ``replace`` of a Target."""

    def make(target: Any, original: Function) -> Function:
        fused = FusedMatmul(target.name)
        return replacement_of(
            target, original, fused.fallbacks, MethodType(multiply, fused), is_body=True, refuses=True
        )

    return make
