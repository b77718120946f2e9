"""The option ``offload="6GiB"``: packed weights take at most 6 GiB of each GPU, and the rest is kept in host memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..patching.option import Option, size_in_words


@dataclass(frozen=True)
class OffloadStatus:
    """Part of ``status()`` for one GPU: the models with packed weights in host memory."""

    resident: int = 0  # bytes of packed weights of layers on the GPU, including the prefetch buffers
    in_host: int = 0  # bytes of packed weights in host memory
    fetches: int = 0  # copies of a layer to the GPU
    late: int = 0  # fetches without a prefetch: the copy started only when the layer was read

    def __str__(self) -> str:
        resident, in_host = size_in_words(self.resident), size_in_words(self.in_host)
        return (
            f"{in_host} of packed weights in host memory, {resident} on the GPU; {self.fetches} fetches, "
            f"{self.late} of them late"
        )


def report(mode: str | int) -> dict[str, OffloadStatus]:
    module = sys.modules.get(f"{__package__}.prefetch")  # not imported here, because it imports torch
    found: dict[str, OffloadStatus] = {} if module is None else module.snapshot()
    return found


def lines(offload: dict[str, OffloadStatus]) -> list[str]:
    return [f"offload, {device}: {found}" for device, found in offload.items()]


OFFLOAD = Option(
    "NF4_PATCH_OFFLOAD", ("off", "all"), "off",
    "Packed weights of layers wait in host memory and are prefetched, with bit-identical results. A size limits the packed weights "
    "of layers on each GPU, prefetch buffers included. all: only the prefetch buffers are on the GPU. It applies to models loaded "
    "afterwards.",
    size=True, on="6GiB",
    report=report, lines=lines,
)  # fmt: skip
