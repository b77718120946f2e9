"""The option ``activations="auto"`` or ``activations="8GiB"``, and its part of ``status()``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from ..memory.waits import Waits
from ..patching.option import Option, size_in_words


@dataclass(frozen=True)
class ActivationsStatus:
    """The status of kept activations. Each decoder layer is counted by its latest call in training."""

    mode: str = "off"  # "off", "auto", or the bytes per GPU
    kept: int = 0  # layers that kept their activations
    layers: int = 0  # layers that are checkpointed
    size: int = 0  # bytes that the kept layers hold until their backward
    why: dict[str, int] = field(default_factory=dict)  # number of layers that recompute, by the name of the Reason
    budget: int | None = None  # with activations="auto": the bytes per GPU that may be kept
    waits: str = ""  # with activations="auto": why there is no budget yet (a name in Waits)
    numbers: tuple[int, ...] = ()  # for the sentence of ``waits``

    def __str__(self) -> str:
        line = f"{self.kept} of {self.layers} layers kept {self.size / 2**30:.2f} GiB of activations at the last batch"
        return "; ".join([line, *(f"{count} recompute ({name})" for name, count in self.why.items())])


def report(mode: str | int) -> ActivationsStatus:
    module = sys.modules.get(f"{__package__}.layers")  # not imported here, because it imports torch
    found: ActivationsStatus = module.activations.snapshot(str(mode)) if module else ActivationsStatus(str(mode))
    return found


def lines(status: ActivationsStatus) -> list[str]:
    if status.mode == "off":
        return []
    found = [f"  {status}"] if status.layers else []
    if status.waits:
        why = Waits[status.waits].value.format(*status.numbers)
        found.append(f"  takes no memory until two more training steps: {why}")
    elif status.budget:
        found.append(f"  takes up to {size_in_words(status.budget)}, which was free at the largest batch so far")
    return found


ACTIVATIONS = Option(
    "NF4_PATCH_ACTIVATIONS", ("off", "auto"), "off",
    "Decoder layers under gradient checkpointing keep their activations instead of computing them twice, while memory is spare. "
    "Results are bit-identical. A size limits the memory on every GPU; auto uses the memory that the training leaves free.",
    size=True, on="auto", fast="auto", calls="layer calls", report=report, lines=lines,
)  # fmt: skip
