"""Keep the input of a layer in host memory from its forward to its backward, as Unsloth's checkpoint does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

MINIMUM_NBYTES = 2 * 2**20  # smaller inputs stay on the GPU, as with Unsloth


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def copying(device: torch.device) -> Iterator[None]:
    """Run the copies in the ``with`` block on a stream of their own, after all earlier work of the current stream.

    Tensors that the ``with`` block allocates belong to the stream of the copies. So their memory is used again only
    after another ``with copying``, which waits for the work that read them.
    """
    stream = copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def wait_for_copies(device: torch.device) -> None:
    """Let later work of the current stream wait for all copies so far."""
    torch.cuda.current_stream(device).wait_stream(copy_stream(device))


def host_memory(x: Tensor) -> Tensor:
    """Return an empty tensor in host memory for a copy of x."""
    try:
        return torch.empty_like(x, device="cpu", pin_memory=True)
    except RuntimeError:  # If pinned memory is exhausted, other host memory works too, but Python waits for each copy.
        return torch.empty_like(x, device="cpu")


class OffloadedInput:
    """A copy of a layer's input in host memory. The copies to the host and back run at the same time as the layers."""

    def __init__(self, x: Tensor):
        self.device, self.on_host = x.device, host_memory(x)
        self.on_gpu: Tensor | None = None
        with copying(self.device):
            self.on_host.copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Let later work of the current stream wait for the copy to the host. Then the memory of x may be reused."""
        wait_for_copies(self.device)

    def prefetch(self) -> None:
        """Begin to copy the input back to the GPU."""
        if self.on_gpu is None:
            with copying(self.device):
                self.on_gpu = self.on_host.to(self.device, non_blocking=True)

    def load(self) -> Tensor:
        """Return the input on the GPU."""
        self.prefetch()
        wait_for_copies(self.device)
        x, self.on_gpu = self.on_gpu, None
        assert x is not None
        return x
