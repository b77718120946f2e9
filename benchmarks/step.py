"""python -m benchmarks.step [--peft | --trl | --compiled | --unsloth]: a QLoRA step as in TRL, with alternating sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

from benchmarks import run_alone
from benchmarks.kinds import COMPILED, FP32, STOCK, UNSLOTH
from benchmarks.models import config_of
from benchmarks.sides import CACHE, FUSED, Comparison, Side, Steps, measure
from benchmarks.training import LAYERS, LENGTHS, LLAMA
from nf4_patch.tools.report import Progress, require_gpu, require_patch


def sides_of(kind: str, options: Mapping[str, dict[str, str] | None]) -> dict[str, Side]:
    """Return the sides of one kind of model. The keys of ``options`` are appended to the kind's name."""
    return {", ".join(filter(None, (kind, name))): Side(kind, given) for name, given in options.items()}


def dense(sides: dict[str, Side]) -> Comparison:
    return Comparison("Llama-3.1-8B", LAYERS, sides, LENGTHS, partial(config_of, LLAMA))


PATCHED: dict[str, dict[str, str] | None] = {"": None, "patch": {}}
CACHED = PATCHED | {"patch, cached": CACHE}  # Unsloth's compiled layers do not read from the cache
COMPARISONS = {  # by command-line option
    "peft": dense(sides_of(STOCK, CACHED)),
    "trl": dense(
        sides_of(STOCK, CACHED | {"fused": FUSED}) | sides_of(FP32, {"": None, "fused": FUSED}) | sides_of(UNSLOTH, PATCHED)
    ),
    "unsloth": dense(sides_of(UNSLOTH, PATCHED)),
    "compiled": dense(sides_of(STOCK, {"": None, "patch": {}, "fused": FUSED}) | sides_of(COMPILED, {"": None, "patch": {}})),
}  # fmt: skip


def flag(name: str, text: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", "what", flag_value=name, help=text)


@click.command()
@flag("peft", "Compare peft with the patch and without it.  [default]")
@flag("trl", "Compare peft, with adapters in 16 bits and in fp32, and Unsloth if it is installed.")
@flag("compiled", "Compare with compiled layers.")
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
