"""The option ``cache="6GiB"`` or ``cache="auto"``, and its part of ``status()``."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

from ..memory.waits import Waits
from ..patching.option import Option, size_in_words


class Uncached(enum.Enum):
    """Reasons why the cache did not serve a read."""

    BUDGET_SPENT = "the budget has no room for the weight"
    WAITING = 'cache="auto" waits for two training steps before it takes memory'
    CUDA_GRAPH = "a CUDA graph is being captured, and its replays would read memory that the cache may free"
    OTHER_STREAM = "the weight was decoded on another CUDA stream"
    INFERENCE_TENSOR = "a tensor of the weight is an inference tensor, which has no version counter"
    REFILLED = "the weight's memory is freed and refilled under the same tensor (FSDP)"
    NOT_A_PARAMETER = (
        "the packed tensor is neither a parameter nor a view of one (compiled code computed or reinterpreted it)"
    )
    ALIASED = "two parameters share memory, and a write through one does not raise the version counter of the other"
    ZERO3 = "DeepSpeed ZeRO-3 owns the weight and writes it without a new version"


@dataclass(frozen=True)
class CacheStatus:
    """The state of the weight cache."""

    mode: str = "off"  # "off", "auto", or the bytes per GPU
    taken: dict[int, int] = field(default_factory=dict)  # bytes by device (-1: the CPU), with dropped weights in use
    weights: int = 0  # cached weights
    hits: int = 0  # reads that the cache served
    misses: int = 0  # reads that dequantized
    uncached: dict[str, int] = field(default_factory=dict)  # number of reads not served, by reason (a name in Uncached)
    budget: int | None = None  # with cache="auto": the bytes per GPU that the cache may take
    waits: str = ""  # with cache="auto" and no budget yet: why (a name in Waits)
    numbers: tuple[int, ...] = ()  # for the sentence of ``waits``

    def __str__(self) -> str:
        mode = size_in_words(int(self.mode)) if self.mode.isdigit() else self.mode
        places = [(size, "the CPU" if device < 0 else f"device {device}") for device, size in self.taken.items()]
        taken = ", ".join(f"{size_in_words(size)} on {place}" for size, place in places)
        weights = f"{self.weights} weight{'s' * (self.weights != 1)}, {taken or 'nothing'}"
        reads = f"; {self.hits} of {self.hits + self.misses} reads served" * bool(self.hits + self.misses)
        return f'cache="{mode}": ' + f"{weights if self.weights or taken else 'empty'}{reads}"


def report(mode: str | int) -> CacheStatus:
    """Return the cache's status, or only ``mode`` if the cache is not imported yet."""
    module = sys.modules.get(f"{__package__}.store")  # not imported here, because it imports torch
    found: CacheStatus = module.cache.snapshot() if module else CacheStatus(str(mode))
    return found


def lines(cache: CacheStatus) -> list[str]:
    if cache.mode == "off" and not cache.hits:
        return []
    found = [str(cache)]
    if cache.waits:
        found.append(
            f"  takes no memory until two more training steps: {Waits[cache.waits].value.format(*cache.numbers)}"
        )
    elif cache.budget:
        found.append(f"  takes up to {size_in_words(cache.budget)}, which was free at the largest batch so far")
    return found + [f"  {n} x not cached: {why}: {Uncached[why].value}" for why, n in cache.uncached.items()]


CACHE = Option(
    "NF4_PATCH_CACHE", ("off", "auto"), "off",
    "Cache dequantized weights for functions that only read them. Results are bit-identical. A size limits the memory on "
    "every GPU; auto uses the memory that the training leaves free.",
    size=True, on="6GiB", fast="auto",
    report=report, lines=lines, used=lambda cache: cache.hits,
)  # fmt: skip
