"""Launch the dequantization kernel. The arguments of a launch are computed once, at a weight's first use."""

from __future__ import annotations

from typing import Any

import torch

from .. import runtime
from ..runtime import KernelUnavailable, current_device, current_stream, empty_strided_cuda, fits, overlap
from ..weight import PackedWeight
from . import compilation


class Launch:
    """A reusable launch of the kernel on one CUDA weight of any rank, with all arguments except the output.

    Addresses are integers, so a launch keeps no tensor alive. It is valid while the weight's fingerprint stays the same.
    If the packed bytes are transposed, the launch returns the transposed dense weight.

    Raises:
        KernelUnavailable: a tensor's memory is freed (NO_STORAGE), the packed bytes are not 4-byte aligned (MISALIGNED), a
            CUDA graph is being captured (GRAPH_CAPTURE), or ``compilation.kernel_for`` raised the error.
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
        self.view: torch.Tensor | None = None  # ``into_buffer`` sets this view of the shared buffer

    def accepts(self, out: Any) -> bool:
        """Return whether ``out`` has the weight's shape, dtype and device.

        It must also be contiguous, 16-byte aligned, and overlap no input.
        """
        if not fits(out, self.dense_shape, self.dtype, self.device):
            return False
        start = out.data_ptr()
        return start % 16 == 0 and not overlap(self.spans, start, start + out.nbytes)

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Dequantize into ``out``, or into a new tensor, which is transposed if the packed bytes are.

        ``out`` must be n contiguous elements in the weight's dtype, 16-byte aligned, on the weight's device. None of
        this is checked. ``out`` is filled in the row-major order of the dense weight.
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
        """Dequantize into a new tensor of the weight's shape, also from transposed bytes."""
        result = self.run()
        return result.t() if self.transposed else result

    def into(self, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out``, for which ``accepts`` must have returned True. Return it, transposed if the packed bytes are."""
        self.run(out)
        return out.t() if self.transposed else out

    def into_buffer(self) -> torch.Tensor:
        """Dequantize into the device's shared buffer, which the next call may overwrite.

        On a side stream, use a new tensor, because calls on different streams could overwrite the buffer too early.
        """
        if current_stream(self.device) != 0:  # 0 is the default stream, on which the calls run in order
            return self.run()
        if self.view is None:
            dense = buffer_of(self.n, self.dtype, self.device)[: self.n].view(self.dense_shape)
            self.view = dense.t() if self.transposed else dense
        return self.run(self.view)


_buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def buffer_of(n: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """Return the device's shared buffer for this dtype, enlarged to at least n elements.

    Enlarging resizes the storage that all views share, so that no launch's view keeps the old memory alive.
    """
    buffer = _buffers.get((device, dtype))
    if buffer is None or buffer.numel() < n:
        # The buffer must not be an inference tensor, because training might write to a buffer that generation allocated.
        with torch.inference_mode(False), runtime.on_device(device):
            if buffer is None:
                buffer = empty_strided_cuda((0,), (1,), dtype)
            storage = buffer.untyped_storage()
            before = storage.nbytes()
            try:
                storage.resize_(0)  # this frees the old memory before the larger memory is allocated
                storage.resize_(n * dtype.itemsize)
            except BaseException:  # out of memory
                storage.resize_(before)
                raise
            buffer = _buffers[device, dtype] = buffer.new_empty(0).set_(storage, 0, (n,), (1,))
    return buffer


def remembered(weight: PackedWeight) -> Launch:
    """Return the launch of a weight, which is built at its first use.

    The guards must have checked the weight, and ``weight.shape`` must be a tuple.
    """
    memo = weight.memo()
    memo.launch = launch = memo.launch or Launch(weight)
    return launch


def dequantize(weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize a weight into ``out`` or a new tensor. The guards must have checked the weight.

    An aligned copy stands in for packed bytes or ``out`` if they are not aligned.
    """
    if weight.packed.data_ptr() % runtime.WORD:
        weight = weight._replace(packed=weight.packed.clone())
    weight = weight._replace(shape=tuple(weight.shape))
    launch = remembered(weight)
    if out is None:
        return launch.dense()
    return launch.run(out) if out.data_ptr() % 16 == 0 else out.copy_(dequantize(weight))
