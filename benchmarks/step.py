"""python -m benchmarks.step [--peft | --trl | --compiled | --moe | --unsloth]: a QLoRA step as in TRL, alternating sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

from benchmarks import run_alone
from benchmarks.kinds import COMPILED, DENSE, FP32, LAYERS_ONLY, LIGER, STOCK, UNSLOTH
from benchmarks.models import config_of, qwen3
from benchmarks.sides import CACHE, FUSED, PACKED, Comparison, Side, Steps, measure
from benchmarks.training import LAYERS, LENGTHS, LLAMA
from nf4_patch.tools.report import Progress, require_gpu, require_patch


def sides_of(kind: str, options: Mapping[str, Mapping[str, str] | None], **common: str) -> dict[str, Side]:
    """Return the sides of one kind of model. The keys of ``options`` are appended to the kind's name."""
    return {
        ", ".join(filter(None, (kind, name))): Side(kind, None if given is None else {**common, **given})
        for name, given in options.items()
    }


PATCHED: dict[str, dict[str, str] | None] = {"": None, "patch": {}, "patch, cached": CACHE}
EVERY = PATCHED | {"fused": FUSED, "fused, cached": FUSED | CACHE}
ON = {name: given for name, given in EVERY.items() if given is not None}


def dense(sides: dict[str, Side]) -> Comparison:
    return Comparison("Llama-3.1-8B", LAYERS, sides, LENGTHS, partial(config_of, LLAMA))


COMPARISONS = {  # by command-line option
    "peft": dense(sides_of(STOCK, PATCHED)),
    "trl": dense(
        sides_of(STOCK, EVERY) | sides_of(LIGER, EVERY) | sides_of(FP32, {"": None, "fused": FUSED})
        | sides_of(UNSLOTH, PATCHED)
    ),
    "moe": Comparison(
        "Qwen3-30B-A3B", 2,
        sides_of(DENSE, {"": None})  # peft's LoRA on experts needs them in 16 bits, or the patch
        | sides_of(STOCK, ON, **PACKED)
        | sides_of(LIGER, ON, **PACKED)
        | sides_of(LAYERS_ONLY, {"fused": FUSED}, **PACKED)
        | sides_of(FP32, {"patch": {}, "fused": FUSED}, **PACKED)
        | sides_of(UNSLOTH, {"": None}),
        ((1, 512), (1, 2048), (1, 4096)), qwen3,
    ),
    "unsloth": dense(sides_of(UNSLOTH, PATCHED)),
    "compiled": dense(sides_of(STOCK, {"": None, "patch": {}, "fused": FUSED}) | sides_of(COMPILED, {"": None, "patch": {}})),
}  # fmt: skip


def flag(name: str, text: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", "what", flag_value=name, help=text)


@click.command()
@flag("peft", "Compare peft with the patch and without it.  [default]")
@flag("trl", "Compare peft, and Liger and Unsloth if they are installed.")
@flag("compiled", "Compare with compiled layers.")
@flag("moe", "Compare a mixture of experts, with LoRA on the experts.")
@flag("unsloth", "Compare Unsloth with the patch and without it.")
@click.option("--seconds", type=float, default=math.inf, help="Begin no round later than this.")
@click.pass_obj
def command(tell: Progress, what: str | None, seconds: float) -> Steps:
    """Measure a whole QLoRA training step, with the patch and without it."""
    require_gpu()
    require_patch()
    return measure(COMPARISONS[what or "peft"], seconds=seconds, tell=tell)


if __name__ == "__main__":
    run_alone(command, "python -m benchmarks.step")
