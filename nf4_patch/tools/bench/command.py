"""``nf4-patch bench``: ours beside the saved originals of whatever is installed, the ceiling and the device copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..report import Report, Tell, silent
from .peers import OURS
from .record import Comparison, variants_of
from .timing import Machine, machine

METHOD = {
    "dequantize": "GPU time of one call: CUDA-graph replays over weights that overflow the L2, in turns, medians. "
    "ceiling: the same bytes moved with no decode.",
    "dequantize + matmul": "GPU time of dequantize and F.linear, bf16, the same way.",
    "host": "Host time of one eager call, GPU idle before: allocation, guards and statistics included.",
    "challenge": "The public NF4 challenge, checks on in the warm-ups, a synchronize after every call; "
    "both orders, medians.",
    "step": f"Wall time of a QLoRA step, the patch on ({OURS}) and off in turns. compile: the first step, compiled anew; "
    "Inductor does not repeat to the bit without us, so its losses need agree to 2**-8 only.",
}


LIMITS = {"torch.empty": "over it"}  # shown as ours over the limit; the others as a percentage


@dataclass(frozen=True)
class Bench(Report):
    """What was measured, by section of METHOD. A ratio is shown only where the bits agreed in this run."""

    machine: Machine
    sections: dict[str, list[Comparison]] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        return [failure for rows in self.sections.values() for row in rows for failure in row.failures]

    @property
    def exit_code(self) -> int:
        return 1 if self.failures else 0

    def render(self) -> Iterable[RenderableType]:
        yield str(self.machine)
        for name, rows in self.sections.items():
            yield ""
            yield METHOD[name]
            yield table(name, rows)
        yield from self.failures

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": {**vars(self.machine)},
            "method": {name: METHOD[name] for name in self.sections},
            "sections": {name: [row.as_dict() for row in rows] for name, rows in self.sections.items()},
            "failures": self.failures,
            "exit_code": self.exit_code,
        }


def table(name: str, rows: list[Comparison]) -> Table:
    """One row a comparison: ours, the limits and what ours is of them, each peer with its ratio, the noise."""
    names = variants_of(rows)
    peers = list(dict.fromkeys(peer for row in rows for peer in row.same_bits))
    traffic = any(row.nbytes for row in rows)
    notes = list(dict.fromkeys(note for row in rows for note in row.notes)) if name == "step" else []
    limits = [other for other in names if other not in (OURS, *peers)]
    result = Table(title=f"{name}, {rows[0].unit}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("", no_wrap=True)
    result.add_column(OURS, justify="right", no_wrap=True)
    if traffic:
        result.add_column("MB", justify="right")
        result.add_column("GB/s", justify="right")
    for limit in limits:
        result.add_column(limit, justify="right")
        result.add_column(LIMITS.get(limit, f"% of {limit}"), justify="right")
    for peer in (*peers, "noise"):
        result.add_column(peer, justify="right")
    for note in notes:
        result.add_column(note)
    for row in rows:
        cells = [row.subject, digits(row.times[OURS].median)]
        if traffic:
            cells += [f"{row.nbytes / 1e6:.1f}", shown(row.gigabytes_a_second(OURS), ".0f")]
        for limit in limits:
            percent = row.percent_of(limit)
            multiple = None if percent is None else 100 / percent
            cells.append(digits(row.times[limit].median) if limit in row.times else "")
            cells.append(shown(multiple, ".2f") + "x" * bool(multiple) if limit in LIMITS else shown(percent, ".1f"))
        cells += [peer_of(row, peer) for peer in peers]
        cells.append(f"{100 * row.noise:.1f} %")
        result.add_row(*cells, *(row.notes.get(note, "") for note in notes))
    return result


def digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def shown(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def peer_of(row: Comparison, peer: str) -> str:
    """Its time and how many times ours is as fast, or why there is no ratio."""
    if peer not in row.same_bits:
        return ""
    time = digits(row.times[peer].median) if peer in row.times else "not timed"
    ratio = row.ratio(peer)
    if ratio is not None:
        return f"{time} {ratio:.2f}x"
    return time if row.checked and row.same_bits[peer] else f"{time} bits differ"


def measure(
    sections: Iterable[str], with_unsloth: bool = True, challenge_only: bool = False,
    step: str = "", tell: Tell = silent,
) -> Bench:  # fmt: skip
    """Measure the sections of METHOD, in order.

    Args:
        challenge_only: of the shapes only the challenge's.
        step: whose step, "peft" or "unsloth", or "compile".

    Raises:
        RuntimeError: there is no NVIDIA GPU, or the kernel does not run here.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise RuntimeError("no NVIDIA GPU: nothing can be measured here")
    done: dict[str, list[Comparison]] = {}
    for section in sections:
        if section == "step":
            from . import training as steps

            done[section] = list(steps.run(step, tell))
            continue
        from . import challenge
        from . import dequantize as dequantization
        from .peers import peers

        found = peers(with_unsloth)
        if section == "dequantize":
            done[section] = list(dequantization.on_gpu(found, tell, challenge_only))
        elif section == "dequantize + matmul":
            done[section] = list(dequantization.with_matmul(found, tell))
        elif section == "host":
            done[section] = list(dequantization.on_host(found, tell))
        elif section == "challenge":
            done[section] = list(challenge.run(found, tell))
        else:
            raise ValueError(f"section {section!r}; known: {', '.join(METHOD)}")
    return Bench(machine(), done)


def products_of(quick: bool, unsloth: bool, tell: Tell) -> Report:
    from . import matmul as products
    from . import shapes

    return products.measure((shapes.LLAMA_8B,) if quick else None, with_unsloth=unsloth, tell=tell)


def generations_of(quick: bool, tell: Tell) -> Report:
    from . import generation as generate

    return generate.measure(layers=8 if quick else 32, tell=tell)


@click.command()
@click.option("--challenge", is_flag=True, help="The public Unsloth NF4 challenge instead.")
@click.option("--step", type=click.Choice(["peft", "unsloth", "compile"]),
              help="A QLoRA step with the patch on and off instead; compile: the first one of a compiled peft model.")  # fmt: skip
@click.option("--matmul", is_flag=True, help="The fused product of 1 to 8192 rows, Llama 8B and 70B, instead.")
@click.option("--generate", is_flag=True, help="Tokens a second of a 4-bit Llama 8B, static cache, instead.")
@click.option(
    "--quick",
    is_flag=True,
    help="Only the challenge's three shapes, and no matmul. With --matmul: Llama 8B; with --generate: 8 layers.",
)
@click.option("--unsloth/--no-unsloth", default=True, help="Whether Unsloth is measured where it is installed.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it as well.")
@click.pass_obj
def command(
    tell: Tell, challenge: bool, step: str | None, matmul: bool, generate: bool, quick: bool, unsloth: bool,
    plot: Path | None,
) -> Report:  # fmt: skip
    """Measure the kernel beside what it replaces."""
    chosen = {"--challenge": challenge, "--step": step, "--matmul": matmul, "--generate": generate}
    names = [name for name, given in chosen.items() if given]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} measure different things: give one of them")
    if plot and names not in ([], ["--matmul"]):
        raise click.UsageError(f"--plot draws the dequantization or --matmul: leave out {names[0]}")
    report: Any
    try:
        if matmul:
            report = products_of(quick, unsloth, tell)
        elif generate:
            report = generations_of(quick, tell)
        elif names:
            report = measure([names[0].removeprefix("--")], unsloth, quick, step or "", tell)
        else:
            sections = ["dequantize", "host"] if quick else ["dequantize", "dequantize + matmul", "host"]
            report = measure(sections, unsloth, quick, "", tell)
    except (RuntimeError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if plot and matmul:
        from . import plots

        plots.draw_products(report, plot)
        return report
    if plot:
        from . import plots

        plots.draw(report, plot)
    return report
