"""python -m benchmarks.recipe [--layers 16 | --small | --mixture]: a QLoRA step of a TRL script after each further
switch, and Unsloth's.
"""

from __future__ import annotations

import math
from functools import partial

import click

from benchmarks import run_alone
from benchmarks.kinds import DENSE, LIGER, STOCK, UNSLOTH
from benchmarks.models import MODELS, config_of, qwen3
from benchmarks.sides import ACTIVATIONS, CACHE, FUSED, GRAPHS, PACKED, PAGED_ADAMW, Comparison, Side, Steps, measure
from benchmarks.training import LENGTHS, llama
from nf4_patch.tools.report import Progress, require_gpu, require_patch

BLOCK_GRAPHS = (("UNSLOTH_BLOCK_CUDAGRAPHS", "1"),)
BEST = f"{UNSLOTH}, best"  # every layer keeps its activations, and runs as Unsloth's own CUDA graphs
# Unsloth with its own checkpoint, which is its default. It moves the inputs of layers to host memory.
OFFLOADING = Side(UNSLOTH, None, checkpointing="unsloth")


def sides_of(first: dict[str, Side], **common: str) -> dict[str, Side]:
    """Return ``first``, a side for each further switch, and Unsloth's sides.

    All sides with the patch have the options ``common``.
    """
    graphs = common | FUSED | GRAPHS
    best = graphs | ACTIVATIONS
    return first | {
        "patch": Side(STOCK, common),
        "liger": Side(LIGER, common),
        "fused": Side(LIGER, common | FUSED),
        "graphs": Side(LIGER, graphs),
        "activations": Side(LIGER, best),
        "cache": Side(LIGER, best | CACHE),
        "paged optimizer": Side(LIGER, best | CACHE, PAGED_ADAMW),
        BEST: Side(UNSLOTH, None, environment=BLOCK_GRAPHS, skips="max"),
        f"{UNSLOTH}, offloading": OFFLOADING,
        f"{UNSLOTH}, offloading, graphs": OFFLOADING._replace(options=GRAPHS),
    }


def dense(layers: int) -> Comparison:
    sides = sides_of({"peft": Side(STOCK, None)})
    if layers > 8:  # fewer processes, so that all fit into the memory of one GPU
        sides = {name: sides[name] for name in ("fused", "graphs", "activations", f"{UNSLOTH}, offloading", BEST)}
    return Comparison("Llama-3.1-8B", layers, sides, LENGTHS, partial(config_of, llama(layers)))


def small() -> Comparison:
    """Return the comparison for a small model with its whole vocabulary, whose head takes a large part of a step."""
    every, shape = dense(4).sides, MODELS["llama-1b"]
    sides = {name: every[name] for name in ("peft", "fused", "graphs", "activations", BEST)}
    sides["graphs, no liger"] = Side(STOCK, FUSED | GRAPHS)
    return Comparison("Llama-3.2-1B", shape.num_hidden_layers, sides, LENGTHS, partial(config_of, shape))


def mixture() -> Comparison:
    """Return the comparison for a mixture. The first side has experts in 16 bits, because peft's LoRA on experts needs them."""
    sides = sides_of({"16-bit experts": Side(DENSE, None)}, **PACKED)
    return Comparison("Qwen3-30B-A3B", 2, sides, ((1, 512), (1, 2048), (1, 4096)), qwen3)


@click.command()
@click.option("--layers", default=4, show_default=True, help="Number of layers of the dense model.")
@click.option("--seconds", type=float, default=math.inf, help="Begin no round later than this.")
@click.option(
    "--mixture", "is_mixture", is_flag=True, help="Measure two layers of a mixture, with LoRA on the experts."
)
@click.option("--small", "is_small", is_flag=True, help="Measure a whole model of 1B parameters.")
@click.pass_obj
def command(tell: Progress, layers: int, seconds: float, is_mixture: bool, is_small: bool) -> Steps:
    """Measure a QLoRA step of a TRL script after each further switch, and one of Unsloth."""
    require_gpu()
    require_patch()
    comparison = mixture() if is_mixture else small() if is_small else dense(layers)
    return measure(comparison, seconds=seconds, tell=tell)


if __name__ == "__main__":
    run_alone(command, "python -m benchmarks.recipe")
