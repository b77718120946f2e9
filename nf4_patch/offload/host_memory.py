"""Pinned host memory for packed weights, mapped into the GPU's address space.

A tensor in it is still a CUDA tensor. Every operation works as before, but reads over the bus, which takes longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..cache.store import is_captured
from ..nf4 import runtime
from ..nf4.identity import Identity
from ..patching.option import size_in_words

SAME_ADDRESS = 91  # the number of the attribute CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister's flags
ALIGNMENT = 256  # Each tensor of a block starts at a multiple of ALIGNMENT bytes, as in PyTorch's allocator.
ADVICE = 'free host memory, or keep more weights on the GPU with a larger offload="...GiB"'


class Cuda:
    """Wraps all CUDA calls of the offload folder, so that tests can replace them."""

    kind, pending = "cuda", dict[int, tuple[Tensor, torch.device]]()
    event, stream, running_on = torch.cuda.Event, torch.cuda.Stream, staticmethod(torch.cuda.stream)
    current_stream, is_captured = staticmethod(torch.cuda.current_stream), staticmethod(is_captured)
    handle = staticmethod(runtime.current_stream)

    def register(self, host: Tensor, device: torch.device) -> str:
        """Pin memory and map it into the address space of every GPU. Return the error as text, or "" on success."""
        cudart, same = torch.cuda.cudart(), ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(same), SAME_ADDRESS, device.index)
        if not same.value:
            return "this GPU cannot read host memory at the host's address"
        with torch.cuda.device(device):  # PyTorch assigns the memory to the device that is current during this call.
            code = cudart.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_AND_MAPPED)
        return self.error(code, device)

    def error(self, code: Any, device: torch.device) -> str:
        """Return the error as text, or "". Clear the error, which the next kernel would raise otherwise."""
        if not int(code):
            return ""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        return str(torch.cuda.cudart().cudaGetErrorString(code))

    def unregister(self, host: Tensor, device: torch.device) -> None:
        """Unpin memory, unless it is not pinned.

        Unpinning would break a CUDA graph capture, so during a capture the memory waits for the next call. So does memory
        whose unpinning was interrupted.
        """
        self.pending[host.data_ptr()] = host, device
        if runtime.is_capturing():
            return
        for address, (_, place) in list(self.pending.items()):
            torch.cuda.synchronize(place)  # a kernel may still be reading the memory
            self.error(torch.cuda.cudart().cudaHostUnregister(address), place)
            self.pending.pop(address, None)

    def mapped(self, part: Any, device: torch.device) -> Tensor:
        """Return the host memory ``part`` as a CUDA tensor, uint8 [bytes], which keeps ``part`` alive."""
        return torch.as_tensor(part, device=device)

    def copy(self, destination: Tensor, host: Tensor) -> None:
        destination.copy_(host, non_blocking=True)


cuda: Any = Cuda()


class HostBlock:
    """Pinned host memory, which lives as long as any CUDA tensor in it.

    Raises:
        MemoryError: the memory cannot be allocated or pinned.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.device, self.size = device, 0  # bytes in use
        # ``resident`` is for ``status()``: the bytes of the layers that stay on the GPU. These layers have no block, so
        # one block of each GPU stores the number. In all other blocks it is 0.
        self.resident = 0
        self.host = pinned(capacity, device)  # uint8
        self.sizes = {self.host.data_ptr(): 0}  # bytes of each tensor, by address
        weakref.finalize(self, forget, cuda, self.host, self.sizes, device, os.getpid()).atexit = False
        blocks[self.host.data_ptr()] = weakref.ref(self)  # so that ``living`` finds a block that is still empty
        # Only the prefetcher writes ``identities`` and ``after``. The keys of ``identities`` are addresses of packed
        # bytes. A value is the identity that the weight at this address had when it was last read.
        self.identities: dict[int, Identity] = {}
        # ``after`` predicts the next block: ``after[previous]`` is the block that was read after this block when
        # ``previous`` was read before it. The previous block tells a forward from a backward, which reads in reverse.
        self.after: weakref.WeakKeyDictionary[HostBlock, Reference] = weakref.WeakKeyDictionary()

    def placed(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` into the block and return the copy. Without room, return ``tensor`` itself."""
        destination = self.host[self.size : self.size + tensor.nbytes]
        if destination.nbytes < tensor.nbytes:
            return tensor
        destination.copy_(tensor.reshape(-1).view(torch.uint8))
        start = destination.data_ptr()
        self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.sizes[start], blocks[start] = tensor.nbytes, weakref.ref(self)
        memory = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (start, False), "version": 2}
        part = SimpleNamespace(__cuda_array_interface__=memory, block=self)
        whole: Tensor = cuda.mapped(part, self.device)
        return whole.view(tensor.dtype).view(tensor.shape)

    def part(self, tensor: Tensor | None) -> slice | None:
        """Return the slice of ``host`` with this tensor's bytes, or None unless the whole tensor is in the block."""
        if tensor is None or self.sizes.get(tensor.data_ptr()) != tensor.nbytes or not tensor.is_contiguous():
            return None
        start = tensor.data_ptr() - self.host.data_ptr()
        return slice(start, start + tensor.nbytes)


Reference = Callable[[], HostBlock | None]  # a weak reference
# ``blocks`` maps the address of each tensor in host memory to its HostBlock. The address identifies the tensor, because
# no other tensor can have the address while the HostBlock lives.
blocks: dict[int, Reference] = {}
# When a host block of a GPU was freed, each of these functions is called with that GPU.
on_block_freed: list[Callable[[torch.device], None]] = []


def pinned(size: int, device: torch.device) -> Tensor:
    """Allocate and pin host memory, uint8 [size], or raise MemoryError."""
    try:
        # ``mmap`` returns shared memory, so a forked process does not copy pinned pages. PyTorch's own pinned memory
        # would waste memory, because PyTorch rounds its size up to a power of two.
        host = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        try:
            failure = cuda.register(host, device)
        except BaseException:  # an interrupt, after which the memory may be pinned
            cuda.unregister(host, device)
            raise
    except OSError as error:
        failure = str(error)
    if failure:
        raise MemoryError(
            f"offload: {size_in_words(size)} of host memory could not be pinned for packed weights: {failure}. "
            f"{size_in_words(sum(block.host.nbytes for block in living()))} are pinned already. Raise the limit for pinned memory "
            f"(ulimit -l; docker run --ulimit memlock=-1), {ADVICE}"
        )
    return host


def no_block() -> None:
    """Stand in for a weak reference to a block."""


def living() -> list[HostBlock]:
    """Return all host blocks, the oldest first."""
    return list(dict.fromkeys(block for reference in list(blocks.values()) if (block := reference()) is not None))


def forget(cuda: Any, host: Tensor, sizes: dict[int, int], device: torch.device, process: int) -> None:
    """Remove a freed block's tensors from ``blocks``, and unpin its memory."""
    for address in sizes:
        blocks.pop(address, None)
    if os.getpid() == process:  # a forked child has no CUDA
        cuda.unregister(host, device)
        for call in on_block_freed:
            call(device)
