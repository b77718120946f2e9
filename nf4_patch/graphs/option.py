"""The option ``graphs="auto"``, which runs decoder layers as CUDA graphs.

The option applies to training with gradient checkpointing, and to generation with a static cache.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..patching.option import Option
from ..patching.target import Target

WAIT_FOR_PYTHON = (8, 0)  # GPUs of this compute capability and newer ones wait for Python in short steps


@dataclass(frozen=True)
class GraphsStatus:
    """The numbers of CUDA graphs and replays in this process. ``status().graphs`` returns a GraphsStatus."""

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
    targets=(
        Target(
            "transformers.modeling_layers:GradientCheckpointingLayer.__call__", ">= 4.53", ("4.56.2", "5.17.0", "5.24.0"),
            (("self", "args", "kwargs"),), ".adapters.transformers:decoder_layer",
            'decoder layers run as CUDA graphs in training with gradient checkpointing and in generation with a static cache, with '
            'enable(graphs="auto") only, or keep their activations, with enable(activations=...) only',
            option="graphs", or_option="activations", uncounted="status().graphs counts its replays",
        ),
        Target(
            "transformers.generation.utils:GenerationMixin._valid_auto_compile_criteria", ">= 5.17", ("5.17.0", "5.24.0"),
            (("self", "model_kwargs", "generation_config"),), ".adapters.transformers:valid_auto_compile_criteria",
            'generate() asks for the function that runs its decode steps, with enable(graphs="auto") only',
            option="graphs", uncounted="status().graphs counts its replays",
        ),
        Target(
            "transformers.modeling_utils:PreTrainedModel.get_compiled_call", ">= 5.17", ("5.17.0", "5.24.0"),
            (("self", "compile_config"),), ".adapters.transformers:compiled_call",
            'decode steps of generate() with a static cache run as one CUDA graph, with enable(graphs="auto") only',
            option="graphs", uncounted="status().graphs counts its replays",
        ),
    ),
    report=report, lines=lines, used=lambda graphs: graphs.replays, calls="layer calls",
)  # fmt: skip
