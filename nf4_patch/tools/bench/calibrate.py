"""``nf4-patch calibrate``: which config of the fused matmul wins on this GPU, by weight and rows of X, remembered.

What is written is what :mod:`nf4_patch.patching.calibrated` reads, with the times that decided it.
"""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import RenderableType

from ...config import Config
from ...nf4 import runtime
from ...nf4.layout import Layout
from ...nf4.matmul import launch as matmul
from ...nf4.matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS
from ...patching import calibrated
from ...patching.quant_state import fields_of
from .. import output
from ..llama import training_dtype
from ..patch import patch
from ..report import Progress, Report, require_gpu, silent
from . import dequantize as dequantization
from . import matmul as fused_matmul
from .baselines import OURS, original
from .dequantize import Packed
from .record import Check, Row, accuracy, table
from .shapes import LLAMA_8B, MODELS, projections
from .timing import Times, gpu_times

ROWS = (1, 2, 8, 16, 32, 64)  # of X; each closes the range that starts after the one before
MARGIN = 0.03  # ours has to be faster by this much, and by more than the noise of the run
ROUNDS = 10
SHIPPED = SMALL_M_ROWS + SMALL_M_CANDIDATES  # whose configs are the candidates, whatever their GPU
NAMES = {f"{name.split()[0]}-{name.split()[-1]}".lower(): model for name, model in MODELS.items()}
METHOD = (
    "GPU time of one matmul, us: CUDA-graph replays over weights that overflow the L2, alternating, medians. Each config "
    "was right first: one-hot rows give dequantize's bits, and the error against fp64 is that of dequantize + matmul. "
    f"It is taken where it is {100 * MARGIN:.0f} % faster than all else, at the fewest rows of its range too."
)


def candidates(m: int, quick: bool) -> list[Any]:
    """The configs to try at ``m`` rows of X: those of every table row that covers m; quick: only those that some size takes."""
    rows = [row for row in SHIPPED if row.max_m >= m]
    found: list[Any] = [row.config for row in rows]
    if quick:
        sizes = dict.fromkeys((row.capability, m, row.min_n, other.max_k) for row in rows for other in rows)
        found = [config for size in sizes if (config := matmul.first_config(SHIPPED, *size)) is not None]
    return list(dict.fromkeys(found))


class Point(NamedTuple):
    """What was measured of one weight at one number of rows of X, and the fastest config that is right; None: none is."""

    row: Row
    config: Any


def beats(here: Row, there: Row) -> bool:
    """Whether ours takes less here than everything else takes there."""
    if OURS not in here.times:
        return False
    ours = here.times[OURS].median * (1 + max(MARGIN, here.noise, there.noise))
    return all(ours < times.median for name, times in there.times.items() if name != OURS)


def decided(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The rows to remember.

    Inside a range nothing is measured. Ours takes no longer there than at its last number of rows, and the others no less
    than at the one before: so there ours has to be faster than the others are at either end.
    """
    found = []
    for before, (row, config) in zip((None, *points), points, strict=False):
        m = row.sizes["m"]
        wins = beats(row, row) and (before is None or m == before.row.sizes["m"] + 1 or beats(row, before.row))
        us = {name: times.median for name, times in row.times.items()}
        found.append({"m": m, "config": config._asdict() if wins else None, "us": us, "noise": row.noise})
    return found


def multiply(config: Any, x: torch.Tensor, packed: torch.Tensor, state: Any, out: Any = None) -> Any:
    """The fused matmul with a config."""
    return matmul.matmul_4bit(x, Layout(packed, *fields_of(state)), config=config, out=out)


def check(config: Any, x: torch.Tensor, weights: Packed, dense: torch.Tensor, truth: torch.Tensor) -> Check:
    """A config's result for x: the bits of dequantize in one-hot rows, the error of dequantize + matmul in others.

    Args:
        dense: the weight as bitsandbytes dequantizes it, [n, k] in x's dtype.
        truth: the weight in fp64.

    Raises:
        KernelUnavailable: it does not compile here.
    """
    m, k = x.shape
    columns = torch.randperm(k, device=x.device)[:m]
    one_hot = torch.zeros_like(x)
    one_hot[torch.arange(m, device=x.device), columns] = 1
    out = torch.full((m, dense.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    if not torch.equal(multiply(config, one_hot, *weights, out.clone()), dense[:, columns].t()):
        return Check(False, "one-hot rows do not give the bits of dequantize")
    result = x.double() @ truth.t()
    ours = fused_matmul.error(multiply(config, x, *weights, out), result)
    return accuracy(ours, fused_matmul.error(x @ dense.t(), result))


def one_point(
    m: int, weights: Sequence[Packed], dense: torch.Tensor, truth: torch.Tensor, quick: bool, unsloth: Any,
    failures: list[str],
) -> Point:  # fmt: skip
    """Check every candidate, then time those that are right and everything else, alternating."""
    n, k = dense.shape
    x = torch.randn(m, k, dtype=dense.dtype, device=dense.device)
    right: dict[str, tuple[Any, Check]] = {}
    for config in candidates(m, quick):
        try:
            checked = check(config, x, weights[0], dense, truth)
        except runtime.KernelUnavailable:  # too many registers for this GPU, an instruction that it has not
            continue
        if checked.passed:
            right[str(config)] = config, checked
        else:
            failures.append(f"{n}x{k}, {m} rows, {config}: {checked.found}")
    functions = fused_matmul.others(x, unsloth)
    functions |= {name: functools.partial(multiply, config, x) for name, (config, _) in right.items()}
    times = gpu_times(
        {name: [functools.partial(f, *weight) for weight in weights] for name, f in functions.items()}, ROUNDS
    )
    kept = {name: taken for name, taken in times.items() if name not in right}
    config, checks = None, {}
    if right:
        fastest = min(right, key=lambda name: times[name].median)
        kept, (config, checks["fp64"]) = {OURS: times[fastest], **kept}, right[fastest]
    return Point(Row(f"M={m}", "us", kept, checks, sizes={"n": n, "k": k, "m": m}), config)


def one_shape(
    shape: tuple[int, int], dtype: torch.dtype, quick: bool, unsloth: Any, failures: list[str], say: Callable[[str], None]
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows to remember of one weight."""
    weights = fused_matmul.rotating(shape, dtype)
    packed, state = weights[0]
    dense = original("bitsandbytes.functional", "dequantize_4bit")(packed, state)
    truth = fused_matmul.exact(Layout(packed, *fields_of(state)))
    points = []
    for m in ROWS:
        say(f"{dequantization.subject_of(shape, dtype)}, {m} rows")
        points.append(one_point(m, weights, dense, truth, quick, unsloth, failures))
    torch.cuda.empty_cache()
    return decided(points)


@patch(False)
def measure(
    shapes: Sequence[tuple[int, int]], quick: bool = False, with_unsloth: bool = True, tell: Progress = silent
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """The entry of the current GPU, and what was wrong.

    Args:
        shapes: (n, k) of the weights.
        quick: try fewer configs.

    Raises:
        RuntimeError: there is no NVIDIA GPU, or bitsandbytes is older than 0.50.
    """
    fused_matmul.check_machine()
    dtype = training_dtype()
    unsloth, failures = fused_matmul.gemv() if with_unsloth else None, list[str]()
    done, total = itertools.count(), len(shapes) * len(ROWS)
    found = {
        f"{n}x{k}": one_shape((n, k), dtype, quick, unsloth, failures, lambda text: tell(text, next(done), total))
        for n, k in shapes
    }
    return {
        "date": datetime.date.today().isoformat(),
        "releases": {"torch": torch.__version__, **calibrated.releases()},
        "dtype": str(dtype).removeprefix("torch."),
        "matmul": found,
    }, failures


def merged(known: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` with the shapes that it does not have from one of the same releases."""
    if known is None or any(known[name] != entry[name] for name in ("releases", "dtype")):
        return entry
    return {**entry, "matmul": {**known["matmul"], **entry["matmul"]}}


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
            yield table(
                "fused matmul", [row for shape, rows in entry["matmul"].items() for row in remembered(shape, rows)]
            )
        yield from self.failures


def remembered(shape: str, rows: Sequence[dict[str, Any]]) -> Iterable[Row]:
    """What was measured and taken for a weight, by range of rows of X; only what passed its check was recorded."""
    for first, row in zip((1, *(row["m"] + 1 for row in rows)), rows, strict=False):
        m = str(first) if first == row["m"] else f"{first} to {row['m']}"
        times = {name: Times((us,)) for name, us in row["us"].items()}
        passed = {"fp64": Check(True, "checked before it was timed")}
        notes = {"noise": f"{100 * row['noise']:.1f} %", "taken": taken(row["config"])}
        yield Row(f"{shape} M={m}", "us", times, passed, notes=notes)


def taken(config: dict[str, Any] | None) -> str:
    return "the original" if config is None else "-".join(f"{value:d}" for value in config.values())


def shape_of(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) > 0 and int(k) > 0 and int(k) % 64 == 0):
        raise click.UsageError(f"--shape {text}: give it as NxK, K a multiple of 64, such as 14336x4096")
    return int(n), int(k)


@click.command()
@click.option("--model", "models", type=click.Choice(list(NAMES)), multiple=True,
              help="Model whose layer shapes to measure; repeatable.  [default: llama-8b, unless --shape is given]")  # fmt: skip
@click.option("--shape", "shapes", multiple=True, metavar="NxK", help="A weight of N rows, K columns; repeatable.")
@click.option("--quick", is_flag=True, help="Fewer configs for each.")
@click.option("--show", is_flag=True, help="Only show what is remembered.")
@click.option("--forget", is_flag=True, help="Only forget what is remembered about this GPU.")
@click.pass_obj
def command(
    tell: Progress, models: tuple[str, ...], shapes: tuple[str, ...], quick: bool, show: bool, forget: bool
) -> Calibration:  # fmt: skip
    """Measure on this GPU which config of the fused matmul wins, by weight and rows of X, and remember it.

    enable(matmul="auto") then prefers it to the shipped tables, as long as the same releases are installed.
    """
    config = Config.read()
    path = config.calibration
    if path is None:
        raise click.UsageError("NF4_PATCH_CALIBRATION=off: unset it, or name a file")
    if show and forget:
        raise click.UsageError("--show and --forget: give one of them")
    try:
        known, note = calibrated.load(path), ""
    except (OSError, ValueError) as error:
        known, note = {}, f"{path} cannot be read: {error}"
    states = {name: calibrated.read(path, name) for name in known}
    if show:
        nothing = config.missing_calibration() or f"nothing is remembered in {path}"
        note = note or (f"remembered in {path}" if known else nothing)
        lines = [note, *(f"{name}: {entry.status}" for name, entry in states.items())]
        sound = {name: known[name] for name, entry in states.items() if entry.rows}
        return Calibration(path, sound, note="\n".join(lines))
    chosen = [NAMES[model] for model in models] or ([] if shapes else [LLAMA_8B])
    wanted = [shape for model in chosen for shape in projections(model)] + [shape_of(text) for text in shapes]
    try:
        require_gpu()
        calibrated.use(config)
        name = calibrated.gpu(torch.cuda.current_device())
        path.parent.mkdir(parents=True, exist_ok=True)
        path = output.checked(path)
        if forget:
            if before := known.pop(name, None):
                calibrated.write(path, known)
            return Calibration(path, {}, note=f"{'forgotten' if before else 'nothing was remembered'}: {name}")
        entry, failures = measure(list(dict.fromkeys(wanted)), quick, tell=tell)
    except (RuntimeError, ImportError, OSError, output.OutputError) as error:
        raise click.ClickException(str(error)) from error
    known[name] = merged(known[name] if name in known and states[name].rows else None, entry)
    written = output.write(path, lambda path: calibrated.write(path, known))
    note = f"{name} is remembered in {path}" if written else f"{name} was measured and is not remembered"
    return Calibration(path, {name: known[name]}, failures, note)
