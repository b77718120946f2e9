"""From a layout to a running kernel: launches resolved once and remembered."""

from __future__ import annotations

from typing import Any

import torch

from .. import runtime
from ..layout import Layout, identity
from ..runtime import KernelUnavailable, current_device, current_stream, empty_strided_cuda, fits, overlap
from . import compilation


class Launch:
    """The launch of one layout, resolved once: addresses, sizes and kernel as plain integers.

    It keeps no tensor alive and is valid for as long as the layout has the same ``identity``.

    Args:
        layout: on a CUDA device, of any rank; packed on 4 bytes.
        transposed: the caller gets the transpose of the dense ``layout.shape``, a view.

    Raises:
        KernelUnavailable: NO_STORAGE, MISALIGNED, or what compilation.kernel_for raises.
    """

    def __init__(self, layout: Layout, transposed: bool = False):
        device = layout.packed.device
        tensors = layout.operands()
        if not all(map(runtime.has_memory, tensors)):
            raise KernelUnavailable("a tensor of the weight is larger than its memory", "NO_STORAGE")
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers[0] % 4:
            raise KernelUnavailable(f"the packed weight starts at {pointers[0]:#x}, not on 4 bytes", "MISALIGNED")
        num_warps = compilation.warps_for(torch.cuda.get_device_capability(device), layout.numel())
        kernel = compilation.kernel_for(compilation.Variant.of(layout, num_warps), device)
        self.n, self.dtype, self.device = layout.numel(), layout.dtype, layout.packed.get_device()
        self.differentiable = layout.packed.is_floating_point()  # bytes cannot require a gradient
        self.grid = -(-self.n // kernel.elements)
        self.call, head, tail, _ = kernel.entry
        self.head, self.tail = (*head, *pointers), (self.n, *tail)
        self.dense_shape, self.transposed = tuple(layout.shape), transposed
        result = torch.empty(self.dense_shape, dtype=layout.dtype, device="meta")
        result = result.t() if transposed else result
        self.shape, self.strides = tuple(result.shape), result.stride()
        self.spans = runtime.spans(*tensors)
        self.counter: Any = None  # the caller's counter
        self.view: torch.Tensor | None = None  # the result in the shared buffer

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
            with torch.cuda.device(device):
                return self.run(out)
        if out is None:
            out = empty_strided_cuda(self.shape, self.strides, self.dtype)
        self.call(self.grid, 1, 1, current_stream(device), *self.head, out.data_ptr(), *self.tail)
        return out

    def into(self, out: torch.Tensor) -> torch.Tensor:
        """``out``, one that it ``accepts``, filled and transposed if asked."""
        self.run(out)
        return out.t() if self.transposed else out

    def shared(self) -> torch.Tensor:
        """The weight in a buffer that the next such call may overwrite; a new one off the default stream."""
        if current_stream(self.device) != 0:  # 0: the default stream, which orders the calls
            return self.run()
        if self.view is None:
            dense = shared_buffer(self.n, self.dtype, self.device)[: self.n].view(self.dense_shape)
            self.view = dense.t() if self.transposed else dense
        return self.run(self.view)


_buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}


def shared_buffer(n: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """The device's buffer of at least n elements.

    It grows in place: every view of it, in whatever launch, then looks at the new memory, and none holds the old.
    """
    buffer = _buffers.get((device, dtype))
    if buffer is None or buffer.numel() < n:
        with torch.inference_mode(False):  # training may write what generation allocated
            if buffer is None:
                buffer = torch.empty(0, dtype=dtype, device=torch.device("cuda", device))
            storage = buffer.untyped_storage()
            before = storage.nbytes()
            storage.resize_(0)  # freed before the larger one is taken
            try:
                storage.resize_(n * dtype.itemsize)
            except torch.cuda.OutOfMemoryError:
                storage.resize_(before)
                raise
            buffer = _buffers[device, dtype] = buffer.new_empty(0).set_(storage, 0, (n,), (1,))
    return buffer


_memo = runtime.Memo()  # of the op: a compiled graph calls it as often as eager code calls a target


def remembered(layout: Layout) -> Launch | None:
    """The launch of a layout that ``dequantize`` has run before; its shape must be a tuple."""
    return _memo.get(identity(layout.code.data_ptr(), *layout))


def dequantize(layout: Layout, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run the kernel on a layout that passed its guards, ``layout.shape``; out, if given, is filled and returned.

    Any alignment: a weight off 4 bytes or an ``out`` off 16 is copied through an aligned buffer.
    Under Triton's interpreter the tensors may be on any device.
    """
    if compilation.INTERPRETED:
        return _interpret(layout, out)
    if layout.packed.data_ptr() % 4:
        layout = layout._replace(packed=layout.packed.clone())
    layout = layout._replace(shape=tuple(layout.shape))
    launch = remembered(layout) or _memo.remember(identity(layout.code.data_ptr(), *layout), Launch(layout))
    if out is None or out.data_ptr() % 16 == 0:
        return launch.run(out)
    return out.copy_(launch.run())


def _interpret(layout: Layout, out: torch.Tensor | None) -> torch.Tensor:
    variant = compilation.Variant.of(layout, compilation.INTERPRETER_WARPS)
    values = compilation.constants(variant, None)
    if out is None:
        out = torch.empty(tuple(layout.shape), dtype=layout.dtype, device=layout.packed.device)
    grid = (-(-layout.numel() // compilation.elements_of(variant)),)
    compilation.kernels.dequantize_kernel[grid](*compilation.operands(layout, out.view(-1)), layout.numel(), **values)
    return out
