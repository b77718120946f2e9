"""The option ``graphs="auto"``, for training with gradient checkpointing and for generation with a static cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..patching.option import Option

WAIT_FOR_PYTHON = (8, 0)  # GPUs from this compute capability upwards wait for Python in short steps


@dataclass(frozen=True)
class GraphsStatus:
    """The numbers of CUDA graphs and replays in this process."""

    mode: str = "off"
    layers: int = 0  # layers that have graphs
    shapes: int = 0  # input shapes that have graphs
    replays: int = 0  # forwards that ran as a CUDA graph

    def __str__(self) -> str:
        return f"{self.layers} layers and {self.shapes} input shape{'s' * (self.shapes != 1)} have CUDA graphs"


def report(mode: str | int) -> GraphsStatus:
    module = sys.modules.get(f"{__package__}.layers")  # not imported here, because it imports torch
    return module.graphs.snapshot(str(mode)) if module else GraphsStatus(str(mode))


def lines(graphs: GraphsStatus) -> list[str]:
    return [f"  {graphs}"] if graphs.layers else []


GRAPHS = Option(
    "NF4_PATCH_GRAPHS", ("off", "auto"), "off",
    "auto: decoder layers run as CUDA graphs while a model trains with gradient checkpointing, or generates with a static cache, so "
    "that the GPU does not wait for Python. Results are bit-identical.",
    on="auto", fast="auto",
    report=report, lines=lines, used=lambda graphs: graphs.replays, calls="layer calls",
)  # fmt: skip
