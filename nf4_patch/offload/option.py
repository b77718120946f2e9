"""The option ``offload``, which keeps packed weights in host memory.

With "6GiB", packed weights take at most 6 GiB of each GPU, and the others stay in host memory. With "auto", copies of
them also fill each GPU's spare memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..memory.waits import Waits
from ..patching.option import Option, size_in_words


@dataclass(frozen=True)
class OffloadStatus:
    """The part of ``status()`` about packed weights in host memory, for one GPU."""

    resident: int = 0  # bytes of packed weights of layers on the GPU, including prefetch buffers and resident copies
    in_host: int = 0  # bytes of packed weights in host memory
    fetches: int = 0  # copies of a layer to the GPU
    late: int = 0  # fetches without a prefetch: the copy started only when the layer was read
    layers: int = 0  # with offload="auto": decoder layers with packed weights in host memory
    kept: int = 0  # of these layers, those that spare memory keeps a copy of on the GPU
    waits: str = ""  # with offload="auto" and no budget yet: why (a name in Waits)
    numbers: tuple[int, ...] = ()  # for the sentence of ``waits``

    def __str__(self) -> str:
        resident, in_host = size_in_words(self.resident), size_in_words(self.in_host)
        line = (
            f"{in_host} of packed weights in host memory, {resident} on the GPU; {self.fetches} fetches, "
            f"{self.late} of them late"
        )
        return f"{line}; {self.kept} of {self.layers} layers stay on the GPU" if self.layers else line


def report(mode: str | int) -> dict[str, OffloadStatus]:
    module = sys.modules.get(f"{__package__}.prefetch")  # not imported here, because it imports torch
    found: dict[str, OffloadStatus] = {} if module is None else module.snapshot()
    return found


def lines(offload: dict[str, OffloadStatus]) -> list[str]:
    found = []
    for device, status in offload.items():
        found.append(f"offload, {device}: {status}")
        if status.in_host and not status.fetches:
            found.append(
                "  nothing was prefetched so far; compiled layers read host memory instead -> docs/offload.md says what to set"
            )
        if status.waits:
            why = Waits[status.waits].value.format(*status.numbers)
            found.append(f"  no further layers stay on the GPU until two more training steps: {why}")
    return found


OFFLOAD = Option(
    "NF4_PATCH_OFFLOAD", ("off", "auto", "all"), "off",
    "Packed weights of layers wait in host memory and are prefetched, with bit-identical results. A size limits the packed weights "
    "of layers on each GPU, prefetch buffers included. all: only the prefetch buffers are on the GPU. auto: memory that the training "
    "leaves free holds further layers. Load the model after the option is set.",
    size=True, on="6GiB",
    idle="no packed weight is in host memory -> load a 4-bit model onto a GPU after the option is on",
    report=report, lines=lines,
)  # fmt: skip
