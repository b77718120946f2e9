"""Launches of the dequantization kernel. The arguments of a launch are worked out once per weight and remembered."""

from __future__ import annotations

from typing import Any

import torch

from .. import runtime
from ..runtime import KernelUnavailable, current_device, current_stream, empty_strided_cuda, fits, overlap
from ..weight import PackedWeight
from . import compilation


class Launch:
    """The launch of the kernel on one weight, with the compiled kernel, addresses and sizes looked up once.

    A launch holds plain integers and keeps no tensor alive. It is valid as long as the weight's fingerprint (addresses,
    sizes, dtypes; see ``PackedWeight.fingerprint``) stays the same.

    Args:
        weight: on a CUDA device, of any rank, 4-byte aligned. If the packed bytes are transposed, so is the result.

    Raises:
        KernelUnavailable: for the Reason NO_STORAGE, MISALIGNED or GRAPH_CAPTURE, or raised by compilation.kernel_for.
    """

    def __init__(self, weight: PackedWeight):
        device = weight.packed.device
        tensors = weight.operands()
        if not all(map(runtime.has_memory, tensors)):
            raise KernelUnavailable("a tensor of the weight is larger than its memory", "NO_STORAGE")
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers[0] % runtime.WORD:
            raise KernelUnavailable(f"the packed weight at {pointers[0]:#x} is not 4-byte aligned", "MISALIGNED")
        num_warps = compilation.warps_for(runtime.capability_of(device), weight.numel())
        kernel = compilation.kernel_for(compilation.Variant.of(weight, num_warps), device)
        self.n, self.dtype, self.device = weight.numel(), weight.dtype, weight.packed.get_device()
        self.differentiable = weight.packed.is_floating_point()  # an integer tensor cannot require a gradient
        self.grid = -(-self.n // kernel.elements)
        self.call, head, tail, _ = kernel.entry
        self.head, self.tail = (*head, *pointers), (self.n, *tail)
        self.dense_shape, self.transposed = tuple(weight.shape), weight.transposed()
        result = torch.empty(self.dense_shape, dtype=weight.dtype, device="meta")
        result = result.t() if self.transposed else result
        self.shape, self.strides = tuple(result.shape), result.stride()
        self.spans = runtime.spans(*tensors)
        self.counters: dict[Any, Any] = {}  # hit counters, by target
        self.view: torch.Tensor | None = None  # view of the device's shared buffer in the result's shape

    def accepts(self, out: Any) -> bool:
        """Return whether the kernel can write to ``out``.

        ``out`` must have the weight's shape, dtype and device. It must be contiguous and 16-byte aligned, and must not share
        memory with a tensor that the kernel reads.
        """
        if not fits(out, self.dense_shape, self.dtype, self.device):
            return False
        start = out.data_ptr()
        return start % 16 == 0 and not overlap(self.spans, start, start + out.nbytes)

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Dequantize into a new tensor, transposed if the packed bytes are, or fill and return ``out``.

        Args:
            out: n contiguous elements in the weight's dtype, 16-byte aligned, on the weight's device. Not checked here.
        """
        device = self.device
        if current_device() != device:
            with runtime.on_device(device):
                return self.run(out)
        if out is None:
            out = empty_strided_cuda(self.shape, self.strides, self.dtype)
        self.call(self.grid, 1, 1, current_stream(device), *self.head, out.data_ptr(), *self.tail)
        return out

    def dense(self) -> torch.Tensor:
        """Dequantize into a new tensor that is never transposed."""
        result = self.run()
        return result.t() if self.transposed else result

    def into(self, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out``, for which ``accepts`` returned True. Return it, transposed if the packed bytes are."""
        self.run(out)
        return out.t() if self.transposed else out

    def into_buffer(self) -> torch.Tensor:
        """Dequantize into a shared buffer that the next call may overwrite.

        On a stream other than the default stream, dequantize into a new tensor instead.
        """
        if current_stream(self.device) != 0:  # 0 is the default stream, on which the calls run in order
            return self.run()
        if self.view is None:
            dense = buffer_of(self.n, self.dtype, self.device)[: self.n].view(self.dense_shape)
            self.view = dense.t() if self.transposed else dense
        return self.run(self.view)


_buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def buffer_of(n: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """Return the device's shared buffer, with at least n elements.

    The buffer grows in place, so the views that launches hold move to the new memory. No view keeps the old memory alive.
    """
    buffer = _buffers.get((device, dtype))
    if buffer is None or buffer.numel() < n:
        # no inference tensor, because training may write to a buffer that generation allocated
        with torch.inference_mode(False), runtime.on_device(device):
            if buffer is None:
                buffer = empty_strided_cuda((0,), (1,), dtype)
            storage = buffer.untyped_storage()
            before = storage.nbytes()
            try:
                storage.resize_(0)  # frees the old memory before the larger one is allocated
                storage.resize_(n * dtype.itemsize)
            except BaseException:  # out of memory, or an interrupt
                storage.resize_(before)
                raise
            buffer = _buffers[device, dtype] = buffer.new_empty(0).set_(storage, 0, (n,), (1,))
    return buffer


def remembered(weight: PackedWeight) -> Launch:
    """Return the launch of a weight. The launch is made at the weight's first use.

    The guards, which check whether the kernel supports a weight, must have passed. ``weight.shape`` must be a tuple.
    """
    memo = weight.memo()
    memo.launch = launch = memo.launch or Launch(weight)
    return launch


def dequantize(weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run the kernel on a weight. Return a new tensor of ``weight.shape``, or ``out``, filled.

    The guards must have passed, as for ``remembered``.
    Packed bytes that are not 4-byte aligned, and an ``out`` that is not 16-byte aligned, go through an aligned copy.
    """
    if weight.packed.data_ptr() % runtime.WORD:
        weight = weight._replace(packed=weight.packed.clone())
    weight = weight._replace(shape=tuple(weight.shape))
    launch = remembered(weight)
    if out is None:
        return launch.dense()
    return launch.run(out) if out.data_ptr() % 16 == 0 else out.copy_(dequantize(weight))
