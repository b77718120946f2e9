"""From a packed weight to a running kernel: launches resolved once and remembered."""

from __future__ import annotations

from typing import Any

import torch

from .. import runtime
from ..runtime import KernelUnavailable, current_device, current_stream, empty_strided_cuda, fits, overlap
from ..weight import PackedWeight
from . import compilation


class Launch:
    """The launch of one weight, resolved once: addresses, sizes and kernel as plain integers.

    It keeps no tensor alive and is valid for as long as the weight has the same facts.

    Args:
        weight: on a CUDA device, of any rank; packed on 4 bytes. The result is transposed where the packed bytes are.

    Raises:
        KernelUnavailable: NO_STORAGE, MISALIGNED, GRAPH_CAPTURE, or what compilation.kernel_for raises.
    """

    def __init__(self, weight: PackedWeight):
        device = weight.packed.device
        tensors = weight.operands()
        if not all(map(runtime.has_memory, tensors)):
            raise KernelUnavailable("a tensor of the weight is larger than its memory", "NO_STORAGE")
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers[0] % runtime.WORD:
            raise KernelUnavailable(f"the packed weight starts at {pointers[0]:#x}, not on 4 bytes", "MISALIGNED")
        num_warps = compilation.warps_for(runtime.capability_of(device), weight.numel())
        kernel = compilation.kernel_for(compilation.Variant.of(weight, num_warps), device)
        self.n, self.dtype, self.device = weight.numel(), weight.dtype, weight.packed.get_device()
        self.differentiable = weight.packed.is_floating_point()  # bytes cannot require a gradient
        self.grid = -(-self.n // kernel.elements)
        self.call, head, tail, _ = kernel.entry
        self.head, self.tail = (*head, *pointers), (self.n, *tail)
        self.dense_shape, self.transposed = tuple(weight.shape), weight.transposed()
        result = torch.empty(self.dense_shape, dtype=weight.dtype, device="meta")
        result = result.t() if self.transposed else result
        self.shape, self.strides = tuple(result.shape), result.stride()
        self.spans = runtime.spans(*tensors)
        self.counters: dict[Any, Any] = {}  # by who uses it
        self.view: torch.Tensor | None = None  # the result in the device's buffer

    def accepts(self, out: Any) -> bool:
        """Whether the kernel can write to ``out``: dense, of the weight, 16-byte aligned, and none of what it reads."""
        if not fits(out, self.dense_shape, self.dtype, self.device):
            return False
        start = out.data_ptr()
        return start % 16 == 0 and not overlap(self.spans, start, start + out.nbytes)

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """A new weight (transposed if asked); or ``out``, filled: 16-byte aligned, n dense elements of its dtype and device."""
        device = self.device
        if current_device() != device:
            with runtime.on_device(device):
                return self.run(out)
        if out is None:
            out = empty_strided_cuda(self.shape, self.strides, self.dtype)
        self.call(self.grid, 1, 1, current_stream(device), *self.head, out.data_ptr(), *self.tail)
        return out

    def dense(self) -> torch.Tensor:
        """A new weight, never transposed."""
        result = self.run()
        return result.t() if self.transposed else result

    def into(self, out: torch.Tensor) -> torch.Tensor:
        """``out``, one that it ``accepts``, filled and transposed if asked."""
        self.run(out)
        return out.t() if self.transposed else out

    def into_buffer(self) -> torch.Tensor:
        """The weight in a buffer that the next such call may overwrite; a new one off the default stream."""
        if current_stream(self.device) != 0:  # 0: the default stream, which orders the calls
            return self.run()
        if self.view is None:
            dense = buffer_of(self.n, self.dtype, self.device)[: self.n].view(self.dense_shape)
            self.view = dense.t() if self.transposed else dense
        return self.run(self.view)


_buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def buffer_of(n: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """The device's buffer of at least n elements.

    It grows in place: every view of it, in whatever launch, then looks at the new memory, and none holds the old.
    """
    buffer = _buffers.get((device, dtype))
    if buffer is None or buffer.numel() < n:
        # training may write what generation allocated
        with torch.inference_mode(False), runtime.on_device(device):
            if buffer is None:
                buffer = empty_strided_cuda((0,), (1,), dtype)
            storage = buffer.untyped_storage()
            before = storage.nbytes()
            try:
                storage.resize_(0)  # freed before the larger one is taken
                storage.resize_(n * dtype.itemsize)
            except BaseException:  # out of memory, or an interrupt
                storage.resize_(before)
                raise
            buffer = _buffers[device, dtype] = buffer.new_empty(0).set_(storage, 0, (n,), (1,))
    return buffer


def remembered(weight: PackedWeight) -> Launch:
    """The launch of a weight that passed its guards, resolved at its first use. Its shape must be a tuple."""
    memo = weight.memo()
    memo.launch = launch = memo.launch or Launch(weight)
    return launch


def dequantize(weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run the kernel on a weight that passed its guards, ``weight.shape``; out, if given, is filled and returned.

    Any alignment: packed bytes off 4 bytes or an ``out`` off 16 are copied through an aligned buffer.
    """
    if weight.packed.data_ptr() % runtime.WORD:
        weight = weight._replace(packed=weight.packed.clone())
    weight = weight._replace(shape=tuple(weight.shape))
    launch = remembered(weight)
    if out is None:
        return launch.dense()
    return launch.run(out) if out.data_ptr() % 16 == 0 else out.copy_(dequantize(weight))
