"""Keep the input of a layer in host memory from its forward to its backward, as Unsloth's checkpoint does."""

from __future__ import annotations

import functools

import torch
import torch.utils.checkpoint
from torch import Tensor

UNSLOTH = "unsloth_zoo.gradient_checkpointing"  # the Python module of Unsloth's checkpoint
MINIMUM_NBYTES = 2 * 2**20  # smaller inputs stay on the GPU, as with Unsloth


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


class OffloadedInput:
    """A copy of the layer's input in pinned host memory.

    The copies to the host and back run on a stream of their own, at the same time as the layers.
    """

    def __init__(self, x: Tensor):
        self.device = x.device
        self.on_host = torch.empty_like(x, device="cpu", pin_memory=True)
        self.prefetched: Tensor | None = None
        stream = copy_stream(x.device)
        stream.wait_stream(current_stream(x.device))
        with torch.cuda.stream(stream):
            self.on_host.copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Let later GPU work wait for the copies that have begun. After that, the memory of x may be reused."""
        current_stream(self.device).wait_stream(copy_stream(self.device))

    def prefetch(self) -> None:
        """Begin to copy the input back to the GPU."""
        stream = copy_stream(self.device)
        # The copy gets memory of ``stream``. Earlier layers may still read what this memory held before.
        stream.wait_stream(current_stream(self.device))
        with torch.cuda.stream(stream):
            self.prefetched = self.on_host.to(self.device, non_blocking=True)

    def load(self) -> Tensor:
        """Return the input on the GPU."""
        if self.prefetched is None:
            self.prefetch()
        self.wait()
        x, self.prefetched = self.prefetched, None
        assert x is not None
        return x


def offloads(reentrant: bool) -> bool:
    """Return whether Unsloth's checkpoint is active, which moves the inputs of layers to host memory."""
    return reentrant and torch.utils.checkpoint.CheckpointFunction.__module__ == UNSLOTH
