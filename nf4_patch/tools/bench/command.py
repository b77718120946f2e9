"""``nf4-patch bench``: ours next to the saved originals of whatever is installed."""

from __future__ import annotations

import click

from ..patch import require_patch
from ..report import Progress, require_gpu
from .record import Bench


@click.command()
@click.option("--step", type=click.Choice(["peft"]), help="A whole QLoRA training step, the patch on and off, instead.")
@click.option("--matmul", is_flag=True, help="The fused matmul of 1 to 8192 rows, Llama 8B and 70B, instead.")
@click.option("--quick", is_flag=True,
              help="Three shapes only; with --matmul Llama 8B only.")  # fmt: skip
@click.option("--unsloth/--no-unsloth", default=True, help="Whether Unsloth is measured where it is installed.")
@click.pass_obj
def command(tell: Progress, step: str | None, matmul: bool, quick: bool, unsloth: bool) -> Bench:
    """Measure the kernel next to what it replaces: GPU time of a dequantization, and host time of a call."""
    if step and matmul:
        raise click.UsageError("--step and --matmul measure different things: give one of them")
    require_gpu()
    require_patch()
    from . import dequantize, shapes
    from . import matmul as fused_matmul
    from . import step as training_step

    try:
        if matmul:
            return fused_matmul.measure([shapes.LLAMA_8B] if quick else None, with_unsloth=unsloth, tell=tell)
        return training_step.measure(tell) if step else dequantize.measure(unsloth, quick, tell)
    except (RuntimeError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from error
