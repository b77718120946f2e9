"""``offload``: packed experts wait in host memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..patching.option import Option, size_in_words
from ..patching.target import TESTED_LOADING, Target


@dataclass(frozen=True)
class OffloadStatus:
    """Of one GPU, and of the models that have packed experts in host memory."""

    resident: int = 0  # bytes of packed experts on the GPU, what is in flight included
    in_host: int = 0  # bytes of packed experts
    fetches: int = 0  # of experts modules
    late: int = 0  # fetches that began only when the experts were read

    def __str__(self) -> str:
        resident, in_host = size_in_words(self.resident), size_in_words(self.in_host)
        return f"{in_host} of packed experts in host memory, {resident} here; {self.fetches} fetches, {self.late} not ahead"


def report(mode: str | int) -> dict[str, OffloadStatus]:
    module = sys.modules.get(f"{__package__}.prefetch")  # it needs torch
    found: dict[str, OffloadStatus] = {} if module is None else module.snapshot()
    return found


def lines(offload: dict[str, OffloadStatus]) -> list[str]:
    return [f"offload, {device}: {found}" for device, found in offload.items()]


OFFLOAD = Option(
    "NF4_PATCH_OFFLOAD", ("off", "all"), "off",
    "Packed experts wait in host memory and are fetched ahead, with the same bits. A size: so much of them, and of what is in "
    "flight, stays on every GPU; all: only what is in flight. For models that are loaded from then on, with experts=4bit.",
    size=True, on="6GiB",
    targets=(
        Target(
            "transformers.modeling_utils:caching_allocator_warmup", ">= 5.17", TESTED_LOADING,
            (("model", "expanded_device_map", "hf_quantizer"),), ".moe.loading:warm_up",
            "memory that transformers reserves before it loads",
            option="offload", lazy=True, patch_copies=True, uncounted="it loads and saves models",
        ),
    ),
    report=report, lines=lines,
)  # fmt: skip
