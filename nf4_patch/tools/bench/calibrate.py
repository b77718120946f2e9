"""``nf4-patch calibrate``: which config of the fused products wins on this GPU, by weight and rows of X, remembered.

And whether our dequantization is no slower than Unsloth's own kernel. What is written is what
:mod:`nf4_patch.nf4.matmul.calibration` reads, with the times that decided it.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import RenderableType
from rich.table import Table

import nf4_patch

from ...config import Config
from ...nf4 import runtime
from ...nf4.layout import Layout
from ...nf4.matmul import backward as matmul_dx
from ...nf4.matmul import calibration
from ...nf4.matmul import launch as matmul
from ...patching import hooks
from ...patching.replacement import fields_of
from ..report import Report, Tell, silent
from . import dequantize as dequantization
from . import matmul as products
from .matmul import DEQUANTIZE, SLACK
from .peers import BITSANDBYTES, OURS, UNSLOTH_TRITON, original, peers
from .record import Comparison
from .shapes import LLAMA_8B, MODELS, Model, projections
from .timing import Times, gpu_times

ROWS = (1, 2, 8, 16, 32, 64)  # of X; each closes the range that starts after the one before
MARGIN = 0.03  # what is not this much faster is not called faster; nor what is not faster by the noise of the run
ROUNDS = 10
DIRECTIONS = {"forward": False, "backward": True}
SHIPPED = {
    "forward": matmul.ROWS + matmul.CANDIDATES,
    "backward": matmul_dx.ROWS,
}  # whose configs are the candidates, whatever their GPU
NAMES = {f"{model.name.split()[0]}-{model.name.split()[-1]}".lower(): model for model in MODELS}
METHOD = (
    "GPU time of one product, us: CUDA-graph replays over weights that overflow the L2, in turns, medians. Each config "
    "was right first: one-hot rows give dequantize's bits, and the error against fp64 is that of dequantize + matmul. "
    f"It is taken where it is {100 * MARGIN:.0f} % faster than all else, at the fewest rows of its range too."
)
Packed = tuple[torch.Tensor, Any]


def candidates(capability: tuple[int, int], direction: str, m: int, quick: bool) -> list[Any]:
    """The configs to try at ``m`` rows of X: those that serve as many somewhere; quick: that are taken there for a size."""
    rows = [row for row in SHIPPED[direction] if row.m >= m]
    found = [row.config for row in rows]
    if quick:
        sizes = dict.fromkeys((row.capability, m, row.n, other.k) for row in rows for other in rows)
        found = [config for size in sizes if (config := matmul.config_for(*size, SHIPPED[direction])) is not None]
    if capability < (9, 0):  # no clusters
        found = [config._replace(cluster=1) if "cluster" in config._fields else config for config in found]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Point:
    """One weight, direction and number of rows: the fastest of the configs that are right, beside everything else."""

    m: int
    config: Any  # None: none compiles here, or none is right
    times: dict[str, Times]  # OURS: of the config

    @property
    def noise(self) -> float:
        """The largest difference of a thing from itself."""
        return max(times.noise for times in self.times.values())

    def beats(self, other: Point) -> bool:
        """Whether ours here takes less than everything else takes there."""
        if OURS not in self.times:
            return False
        margin = 1 + max(MARGIN, self.noise, other.noise)
        ours = self.times[OURS].median * margin
        return all(ours < times.median for name, times in other.times.items() if name != OURS)


def decided(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The rows to remember.

    Inside a range nothing is measured. Ours takes no more there than at its last row, where it has to be faster than
    the others are at either end.
    """
    found = []
    for before, point in zip((None, *points), points, strict=False):
        wins = point.beats(point) and (before is None or point.m == before.m + 1 or point.beats(before))
        found.append({
            "m": point.m,
            "config": point.config._asdict() if wins else None,
            "us": {name: times.median for name, times in point.times.items()},
            "noise": point.noise,
        })  # fmt: skip
    return found


def multiply(backward: bool, config: Any, x: torch.Tensor, packed: torch.Tensor, state: Any, out: Any = None) -> Any:
    """Our product with a config: x @ weight.T, backward x @ weight."""
    function: Any = matmul_dx.matmul_4bit_dx if backward else matmul.matmul_4bit
    return function(x, Layout(packed, *fields_of(state)), config=config, out=out)


def others(backward: bool, x: torch.Tensor, unsloth: Any) -> dict[str, Callable[..., Any]]:
    """By name what ours has to beat."""
    if not backward:
        return products.others(x, unsloth)
    dequantize = original("bitsandbytes.functional", "dequantize_4bit")
    return {
        BITSANDBYTES: lambda packed, state: x @ dequantize(packed, state),
        DEQUANTIZE: lambda packed, state: x @ nf4_patch.dequantize_nf4(packed, state),
    }


def wrong(
    backward: bool, config: Any, x: torch.Tensor, weights: Packed, dense: torch.Tensor, truth: torch.Tensor
) -> str:  # fmt: skip
    """What is wrong with a config's product of x; "" where nothing is.

    Args:
        dense: the weight as bitsandbytes dequantizes it, [n, k] in x's dtype.
        truth: the weight in fp64.

    Raises:
        KernelUnavailable: it does not compile here.
    """
    m, inner = x.shape
    lines = torch.randperm(inner, device=x.device)[:m]
    one_hot = torch.zeros_like(x)
    one_hot[torch.arange(m, device=x.device), lines] = 1
    out = torch.full((m, dense.shape[1 if backward else 0]), float("nan"), dtype=x.dtype, device=x.device)
    want = dense[lines] if backward else dense[:, lines].t()
    if not torch.equal(multiply(backward, config, one_hot, *weights, out.clone()), want):
        return "one-hot rows do not give the bits of dequantize"
    side, exact = (dense, truth) if backward else (dense.t(), truth.t())
    result = x.double() @ exact
    ours = products.error(multiply(backward, config, x, *weights, out), result)
    theirs = products.error(x @ side, result)
    return "" if ours <= SLACK * theirs else f"error {ours:.3e} against fp64, dequantize + matmul {theirs:.3e}"


def one_point(
    direction: str, m: int, weights: Sequence[Packed], dense: torch.Tensor, truth: torch.Tensor, quick: bool,
    unsloth: Any, failures: list[str],
) -> Point:  # fmt: skip
    """Check every candidate, then time those that are right beside everything else, in turns."""
    backward = DIRECTIONS[direction]
    n, k = dense.shape
    x = torch.randn(m, n if backward else k, dtype=dense.dtype, device=dense.device)
    right: dict[str, Any] = {}
    for config in candidates(torch.cuda.get_device_capability(dense.device), direction, m, quick):
        try:
            why = wrong(backward, config, x, weights[0], dense, truth)
        except runtime.KernelUnavailable:  # too many registers for this GPU, an instruction that it has not
            continue
        if why:
            failures.append(f"{n}x{k} {direction}, {m} rows, {config}: {why}")
        else:
            right[str(config)] = config
    functions = others(backward, x, unsloth)
    functions |= {name: functools.partial(multiply, backward, config, x) for name, config in right.items()}
    times = gpu_times(
        {name: [functools.partial(f, *weight) for weight in weights] for name, f in functions.items()}, ROUNDS
    )
    kept = {name: taken for name, taken in times.items() if name not in right}
    if not right:
        return Point(m, None, kept)
    fastest = min(right, key=lambda name: times[name].median)
    return Point(m, right[fastest], {OURS: times[fastest], **kept})


def one_shape(
    shape: tuple[int, int], dtype: torch.dtype, quick: bool, unsloth: Any, failures: list[str], say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """The rows to remember of one weight, by direction."""
    weights = products.rotating(shape, dtype)
    packed, state = weights[0]
    dense = original("bitsandbytes.functional", "dequantize_4bit")(packed, state)
    truth = products.exact(Layout(packed, *fields_of(state)))
    found = {}
    for direction in DIRECTIONS:
        points = []
        for m in ROWS:
            say(f"{dequantization.name_of(shape, dtype)} {direction}, {m} rows")
            points.append(one_point(direction, m, weights, dense, truth, quick, unsloth, failures))
        found[direction] = decided(points)
    torch.cuda.empty_cache()
    return found


def eager(shapes: Iterable[tuple[int, int]], dtype: torch.dtype, tell: Tell) -> Iterator[Comparison]:
    """Our dequantization beside Unsloth's Triton kernel, on the host and on the GPU; nothing where there is none."""
    found = peers()
    if UNSLOTH_TRITON not in found or Config.read().forbidden:  # NF4_PATCH=0: ours is not to be had
        return
    yield from dequantization.on_host(found, tell)
    for shape in shapes:
        tell(f"dequantize {dequantization.name_of(shape, dtype)}")
        yield dequantization.one_shape(shape, dtype, "", {UNSLOTH_TRITON: found[UNSLOTH_TRITON]}, limits=False)


def faster(comparisons: Sequence[Comparison]) -> bool | None:
    """Whether ours is nowhere slower and somewhere faster than Unsloth's Triton kernel; None where nothing was compared."""
    if not comparisons:
        return None
    ratios = [(comparison.ratio(UNSLOTH_TRITON) or 0.0, comparison.noise) for comparison in comparisons]
    slower = any(ratio < 1 / (1 + MARGIN) for ratio, _ in ratios)
    return not slower and any(ratio > 1 + max(MARGIN, noise) for ratio, noise in ratios)


def measure(
    shapes: Sequence[tuple[int, int]], quick: bool = False, with_unsloth: bool = True, tell: Tell = silent
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """The entry of the current GPU, and what was wrong.

    Args:
        shapes: (n, k) of the weights.
        quick: try fewer configs.

    Raises:
        RuntimeError: there is no NVIDIA GPU, or bitsandbytes is older than 0.50.
    """
    products.check_machine()
    capability = torch.cuda.get_device_capability()
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    unsloth = products.gemv() if with_unsloth else None
    failures: list[str] = []
    points = len(shapes) * len(DIRECTIONS) * len(ROWS)
    done = iter(range(points))
    found = {
        shape: one_shape(shape, dtype, quick, unsloth, failures, lambda text: tell(text, next(done), points))
        for shape in shapes
    }
    comparisons = list(eager(shapes, dtype, tell)) if with_unsloth else []
    failures += [failure for comparison in comparisons for failure in comparison.failures]
    return {
        "date": datetime.date.today().isoformat(),
        "releases": {"torch": torch.__version__, **hooks.releases()},
        "dtype": str(dtype).removeprefix("torch."),
        **{
            direction: {f"{n}x{k}": rows[direction] for (n, k), rows in found.items()} for direction in DIRECTIONS
        },
        "faster_eagerly": faster(comparisons),
        "dequantization": [
            {
                "subject": comparison.subject,
                "us": {name: comparison.times[name].median for name in (OURS, UNSLOTH_TRITON)},
                "noise": comparison.noise,
            }
            for comparison in comparisons
        ],
    }, failures  # fmt: skip


def merged(known: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` with the shapes that it does not have from one of the same releases."""
    if known is None or any(known[name] != entry[name] for name in ("releases", "dtype")):
        return entry
    eagerly = entry if entry["faster_eagerly"] is not None else known
    return {
        **entry,
        **{direction: {**known[direction], **entry[direction]} for direction in DIRECTIONS},
        **{name: eagerly[name] for name in ("faster_eagerly", "dequantization")},
    }


def write(path: Path, entries: dict[str, Any]) -> None:
    """Whoever reads sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    calibration.forget()


@dataclass(frozen=True)
class Calibration(Report):
    """What is remembered, by GPU."""

    file: Path
    entries: dict[str, Any]
    failures: list[str] = field(default_factory=list)  # configs that were wrong, and are not remembered
    note: str = ""  # what was done

    @property
    def exit_code(self) -> int:
        return 1 if self.failures else 0

    def render(self) -> Iterable[RenderableType]:
        yield self.note
        for name, entry in self.entries.items():
            releases = ", ".join(f"{library} {release}" for library, release in entry["releases"].items() if release)
            yield f"{name}, {entry['date']}, {entry['dtype']}, {releases}"
            yield METHOD
            yield table(entry)
            if entry["dequantization"]:
                yield dequantizations(entry)
        yield from self.failures


def microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def table(entry: dict[str, Any]) -> Table:
    """One row a weight, direction and range: ours, the others, ours against the best of them, who is taken."""
    ranges = [
        (f"{shape} {direction}", before + 1, row)
        for direction in DIRECTIONS
        for shape, rows in entry[direction].items()
        for before, row in zip((0, *(row["m"] for row in rows)), rows, strict=False)
    ]
    names = list(dict.fromkeys(name for *_, row in ranges for name in row["us"] if name != OURS))
    caption = "taken: the config's fields in order (nf4/matmul.py, backward nf4/matmul_dx.py)"
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for heading in ("weight", "rows", OURS, *names, "best / ours", "noise", "taken"):
        text = heading in ("weight", "taken")
        result.add_column(heading, justify="left" if text else "right", no_wrap=text)
    for subject, first, row in ranges:
        us, config = row["us"], row["config"]
        ratio = f"{min(us[name] for name in names if name in us) / us[OURS]:.2f}x" if OURS in us else ""
        taken = "the original" if config is None else "-".join(f"{value:d}" for value in config.values())
        span = str(first) if first == row["m"] else f"{first} to {row['m']}"
        times = [microseconds(us.get(name)) for name in (OURS, *names)]
        result.add_row(subject if first == 1 else "", span, *times, ratio, f"{100 * row['noise']:.1f} %", taken)
    return result


def dequantizations(entry: dict[str, Any]) -> Table:
    keeps = "ours takes" if entry["faster_eagerly"] else "Unsloth's keeps"
    result = Table(title=f"dequantization, us: {keeps} eager calls", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", OURS, UNSLOTH_TRITON, "ratio", "noise"):
        result.add_column(heading, justify="right" if heading else "left")
    for row in entry["dequantization"]:
        ours, theirs = row["us"][OURS], row["us"][UNSLOTH_TRITON]
        result.add_row(
            row["subject"], f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}x", f"{100 * row['noise']:.1f} %"
        )
    return result


def shape_of(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) > 0 and int(k) > 0 and int(k) % 64 == 0):
        raise click.UsageError(f"--shape {text}: give it as NxK, K a multiple of 64, such as 14336x4096")
    return int(n), int(k)


@click.command()
@click.option("--model", "models", type=click.Choice(list(NAMES)), multiple=True,
              help="Whose projections; again for more.  [default: llama-8b, unless --shape is given]")  # fmt: skip
@click.option("--shape", "shapes", multiple=True, metavar="NxK", help="A weight of N rows, K columns; again for more.")
@click.option("--quick", is_flag=True, help="Fewer configs for each.")
@click.option("--show", is_flag=True, help="Only show what is remembered.")
@click.option("--forget", is_flag=True, help="Only forget what is remembered about this GPU.")
@click.pass_obj
def command(
    tell: Tell, models: tuple[str, ...], shapes: tuple[str, ...], quick: bool, show: bool, forget: bool
) -> Calibration:  # fmt: skip
    """Measure on this GPU which config of the fused products wins, by weight and rows of X, and remember it.

    With enable(matmul="auto") it then goes before the shipped tables, as long as the releases are these.
    """
    config = Config.read()
    path = config.calibration
    if path is None:
        raise click.UsageError("NF4_PATCH_CALIBRATION=off: unset it, or name a file")
    if show and forget:
        raise click.UsageError("--show and --forget: give one of them")
    try:
        known, note = calibration.load(path), ""
    except (OSError, ValueError) as error:
        known, note = {}, f"{path} cannot be read: {error}"
    states = {name: calibration.read(path, name, hooks.releases()) for name in known}
    if show:
        note = note or f"{'remembered' if known else 'nothing is remembered'} in {path}"
        lines = [note, *(f"{name}: {entry.status}" for name, entry in states.items())]
        sound = {name: known[name] for name, entry in states.items() if entry.forward or entry.backward}
        return Calibration(path, sound, note="\n".join(lines))
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise click.UsageError("no NVIDIA GPU: nothing can be measured here")
    hooks.use_calibration(config)
    name = calibration.gpu(torch.cuda.current_device())
    if forget:
        before = known.pop(name, None)
        if before is not None:
            write(path, known)
        return Calibration(path, {}, note=f"{'forgotten' if before else 'nothing was remembered'}: {name}")
    chosen: list[Model] = [NAMES[model] for model in models] or ([] if shapes else [LLAMA_8B])
    wanted = [shape for model in chosen for shape in projections(model)] + [shape_of(text) for text in shapes]
    try:
        entry, failures = measure(list(dict.fromkeys(wanted)), quick, tell=tell)
        known[name] = merged(known[name] if name in known and states[name].forward else None, entry)
        write(path, known)
    except (RuntimeError, ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error
    return Calibration(path, {name: known[name]}, failures, f"{name} is remembered in {path}")
