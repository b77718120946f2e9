"""``nf4-patch bench``: ours beside the saved originals of whatever is installed, the ceiling and the device copy."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import click

from ...config import Config
from ..output import OutputFile, write
from ..report import Progress, require_gpu, silent
from .peers import OURS
from .record import Bench
from .timing import machine

METHOD = {
    "dequantize": "GPU time of one call: CUDA-graph replays over weights that overflow the L2, alternating, medians. "
    "ceiling: the same bytes moved with no decode; %: the part of it that ours reaches.",
    "dequantize + matmul": "GPU time of dequantize and F.linear, bf16, the same way.",
    "host": "Host time of one eager call, GPU idle before: allocation, guards and statistics included.",
    "challenge": "The public NF4 challenge, checks on in the warm-ups, a synchronize after every call; "
    "both orders, medians.",
    "step": f"A QLoRA step, the patch on ({OURS}) and off alternating: wall time, and GPU time (the sum of its kernels and "
    "copies). 16-bit weights: the same step with nn.Linear on the dequantized weights. compile: the first step, compiled "
    "anew; Inductor does not repeat to the bit without us, so its losses need agree to 2**-8 only.",
}


def measure(
    sections: Iterable[str], with_unsloth: bool = True, challenge_only: bool = False,
    step: str = "", tell: Progress = silent,
) -> Bench:  # fmt: skip
    """Measure the sections of METHOD, in order.

    Args:
        challenge_only: of the shapes only the challenge's.
        step: as the option of that name.

    Raises:
        RuntimeError: there is no NVIDIA GPU, or the kernel does not run here.
    """
    require_gpu()
    from . import challenge, dequantize, training
    from .peers import peers

    found = functools.cache(lambda: peers(with_unsloth))  # a step imports its trainer first
    run = {
        "dequantize": lambda: dequantize.on_gpu(found(), tell, challenge_only),
        "dequantize + matmul": lambda: dequantize.with_matmul(found(), tell),
        "host": lambda: dequantize.on_host(found(), tell),
        "challenge": lambda: challenge.run(found(), tell),
        "step": lambda: training.run(step, tell),
    }
    done = {section: list(run[section]()) for section in sections}
    return Bench(machine(), done, {section: METHOD[section] for section in done})


@click.command()
@click.option("--challenge", is_flag=True, help="The public Unsloth NF4 challenge instead.")
@click.option("--step", type=click.Choice(["peft", "unsloth", "moe", "cache", "compile"]),
              help="A QLoRA step with the patch on and off instead; moe: of mixtures of experts with peft, and their "
              "generation; cache: by the size of the weight cache; compile: the first one of a compiled peft model.")  # fmt: skip
@click.option("--matmul", is_flag=True, help="The fused matmul of 1 to 8192 rows, Llama 8B and 70B, instead.")
@click.option("--generate", is_flag=True, help="Tokens a second of a 4-bit Llama 8B, static cache, instead.")
@click.option("--quick", is_flag=True,
              help="Only the challenge's three shapes, and no matmul. With --matmul: Llama 8B; with --generate: 8 layers.")  # fmt: skip
@click.option("--unsloth/--no-unsloth", default=True, help="Whether Unsloth is measured where it is installed.")
@click.option("--plot", type=OutputFile(), metavar="FILE.png", help="Draw it as well.")
@click.pass_obj
def command(
    tell: Progress, challenge: bool, step: str | None, matmul: bool, generate: bool, quick: bool, unsloth: bool,
    plot: Path | None,
) -> Bench:  # fmt: skip
    """Measure the kernel beside what it replaces."""
    chosen = {"--challenge": challenge, "--step": step, "--matmul": matmul, "--generate": generate}
    names = [name for name, given in chosen.items() if given]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} measure different things: give one of them")
    if plot and names not in ([], ["--matmul"]):
        raise click.UsageError(f"--plot draws the dequantization or --matmul: leave out {names[0]}")
    if Config.read().forbidden:
        raise click.UsageError("NF4_PATCH=0 or NF4_USE_TRITON=0 keeps the patch off: unset it to measure the patch")
    if plot:
        import matplotlib  # noqa: F401  # a missing one is named before the work
    from . import generation, plots, shapes
    from . import matmul as fused_matmul

    try:
        if matmul:
            models = (shapes.LLAMA_8B,) if quick else None
            report = fused_matmul.measure(models, with_unsloth=unsloth, tell=tell)
        elif generate:
            report = generation.measure(layers=8 if quick else 32, tell=tell)
        elif names:
            report = measure([names[0].removeprefix("--")], unsloth, quick, step or "", tell)
        else:
            sections = ["dequantize", "host"] if quick else ["dequantize", "dequantize + matmul", "host"]
            report = measure(sections, unsloth, quick, "", tell)
    except (RuntimeError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if plot:
        write(plot, functools.partial(plots.draw_matmul if matmul else plots.draw, report))
    return report
