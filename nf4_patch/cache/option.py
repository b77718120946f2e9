"""``cache="6GiB"`` or ``"auto"``: dequantized weights stay for the functions that only read them."""

from __future__ import annotations

import enum
import functools
import sys
from dataclasses import dataclass, field

from ..patching.option import Option, size_in_words
from ..patching.target import ANY, Target

TESTED_AUTOGRAD = ("0.49.2", "0.50.2")
TESTED_TORCH = ("2.11.0", "2.13.0")

CacheTarget = functools.partial(Target, option="cache", uncounted="its reads may come from the cache")


class Uncached(enum.Enum):
    """Why a weight that a caller only reads was decoded and not kept."""

    BUDGET_SPENT = "the budget is spent: no room for the weight, or for a compiled layer as a whole"
    WAITING = 'cache="auto" waits for two steps of the optimizer before it takes memory'
    CUDA_GRAPH = "a CUDA graph is being captured: its replays would read memory that the cache may free"
    OTHER_STREAM = "it was decoded on another CUDA stream"
    CHECKPOINT = "a compiled layer in a non-reentrant checkpoint: its recompute must save what its forward saved"
    INFERENCE_TENSOR = "a tensor of the weight is an inference tensor, which has no version counter"
    REFILLED = "its memory is freed and filled again under the same tensor (FSDP)"
    WRAPPED = "another library wraps the function that dequantizes in a compiled layer, and may write into the result"
    NOT_A_PARAMETER = (
        "it is no parameter of a module and no view of one (a tensor that compiled code computed or reinterpreted)"
    )
    ALIASED = "two parameters share its memory, and a write through one does not move the version of the other"
    ZERO3 = "DeepSpeed ZeRO-3 owns it and writes it without a new version"


@dataclass(frozen=True)
class CacheStatus:
    """Bytes are what PyTorch's allocator takes at most."""

    mode: str = "off"  # off, auto, or bytes per GPU
    taken: dict[int, int] = field(default_factory=dict)  # by device (-1: the CPU), also what is dropped and still used
    weights: int = 0
    hits: int = 0  # dequantizations saved
    misses: int = 0
    uncached: dict[str, int] = field(default_factory=dict)  # by name of the Uncached
    compiled: int = 0  # weights that compiled layers read; each call of such a layer counts as one read of each
    found: str = ""  # with "auto": how much it may take and why

    def __str__(self) -> str:
        mode = size_in_words(int(self.mode)) if self.mode.isdigit() else self.mode
        places = [(size, "the CPU" if device < 0 else f"device {device}") for device, size in self.taken.items()]
        taken = ", ".join(f"{size_in_words(size)} on {place}" for size, place in places)
        compiled = f" ({self.compiled} for compiled layers)" if self.compiled else ""
        weights = f"{self.weights} weight{'s' * (self.weights != 1)}{compiled}, {taken or 'nothing'}"
        reads = f"; {self.hits} of {self.hits + self.misses} reads served" * bool(self.hits + self.misses)
        return f"cache {mode}: {weights if self.weights or taken else 'empty'}{reads}"


def report(mode: str | int) -> CacheStatus:
    module = sys.modules.get(f"{__package__}.store")  # it needs torch
    found: CacheStatus = module.cache.snapshot() if module else CacheStatus(str(mode))
    return found


def lines(cache: CacheStatus) -> list[str]:
    if cache.mode == "off" and not cache.hits:
        return []
    found = [str(cache), *([f"  it may take {cache.found}"] if cache.found else [])]
    return found + [f"  {n} x not cached: {why}: {Uncached[why].value}" for why, n in cache.uncached.items()]


CACHE = Option(
    "NF4_PATCH_CACHE", ("off", "auto"), "off",
    "Keep dequantized weights for the functions that only read them, with the same bits. A size: as many as fit into "
    "that much memory of every GPU; auto: as many as fit into what the training leaves free.",
    size=True, on="6GiB",
    targets=(
        CacheTarget(
            "bitsandbytes.autograd._functions:MatMul4Bit.forward", ">= 0.43", TESTED_AUTOGRAD,
            (("ctx", "A", "B", "out", "bias", "quant_state"),), ".cache.reads:observed",
            'the size of each batch, for cache="auto", with enable(cache=...) only',
            uncounted="it only observes",
        ),
        CacheTarget(
            "unsloth.models._block_compile:_wrap", ">= 2026.10", ("2026.10.9",),
            (("cls", "compile_options", "kinds"),), ".cache.unsloth:compiled_layers",
            "cached weights in Unsloth's compiled layers, with enable(cache=...) only",
        ),
        CacheTarget(
            "torch.utils:weakref.getweakrefs", ">= 2.3", TESTED_TORCH,
            ANY, ".cache.reads:getweakrefs",
            "parameters whose contents are swapped while their weights are cached, with enable(cache=...) only",
            after="bitsandbytes.functional",  # PyTorch is complete then
        ),
        CacheTarget(
            "torch:UntypedStorage.resize_", ">= 2.0", TESTED_TORCH,
            ANY, ".cache.reads:resize",
            "memory that is freed and filled again (FSDP) while its weight is cached, with enable(cache=...) only",
            after="bitsandbytes.functional",
        ),
    ),
    report=report, lines=lines,
)  # fmt: skip
