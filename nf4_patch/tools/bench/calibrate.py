"""``nf4-patch calibrate``: which config of the fused matmul wins on this GPU, by weight and rows of X, remembered.

What is written is what :mod:`nf4_patch.patching.calibrated` reads, with the times that decided it.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from ...nf4 import runtime
from ...nf4.matmul import launch as matmul
from ...nf4.matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS
from ...patching import calibrated
from ...patching.quant_state import weight_of
from .. import output
from ..llama import LLAMA_8B, MODELS, projections, training_dtype
from ..patch import patch
from ..report import Progress, Report, silent
from . import matmul as fused_matmul
from .baselines import OURS
from .matmul import Weights
from .record import Check, Row, table
from .timing import Times, gpu_times, over

ROWS = (1, 2, 8, 16, 32, 64)  # of X; each closes the range that starts after the one before
MARGIN = 0.03  # ours has to be faster by this much, and by more than the noise of the run
ROUNDS = 10
SHIPPED = SMALL_M_ROWS + SMALL_M_CANDIDATES  # whose configs are the candidates, whatever their GPU
# what was measured of one weight at one number of rows of X, and the fastest config that is right; None: none is
Point = tuple[Row, Any]
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
        wins = beats(row, row) and (before is None or m == before[0].sizes["m"] + 1 or beats(row, before[0]))
        us = {name: times.median for name, times in row.times.items()}
        found.append({"m": m, "config": config._asdict() if wins else None, "us": us, "noise": row.noise})
    return found


def multiply(config: Any, x: torch.Tensor, packed: torch.Tensor, state: Any, out: Any = None) -> Any:
    """The fused matmul with a config."""
    return matmul.matmul_4bit(x, weight_of(packed, state), config=config, out=out)


def check(config: Any, x: torch.Tensor, weights: Weights) -> Check:
    """A config's result for x: the bits of dequantize in one-hot rows, the error of dequantize + matmul in others.

    Raises:
        KernelUnavailable: it does not compile here.
    """
    m, k = x.shape
    columns = torch.randperm(k, device=x.device)[:m]
    one_hot = torch.nn.functional.one_hot(columns, k).to(x.dtype)
    out = torch.full((m, len(weights.dense)), float("nan"), dtype=x.dtype, device=x.device)
    if not torch.equal(multiply(config, one_hot, *weights.packed[0], out.clone()), weights.dense[:, columns].t()):
        return Check(False, "one-hot rows do not give the bits of dequantize")
    return weights.check(x, multiply(config, x, *weights.packed[0], out))


def one_point(m: int, weights: Weights, quick: bool, unsloth: Any, failures: list[str]) -> Point:
    """Check every candidate, then time those that are right and everything else, alternating."""
    n, k = weights.dense.shape
    x = weights.rows_of_x(m)
    right: dict[str, tuple[Any, Check]] = {}
    for config in candidates(m, quick):
        try:
            checked = check(config, x, weights)
        except runtime.KernelUnavailable:  # too many registers for this GPU, an instruction that it has not
            continue
        if checked.passed:
            right[str(config)] = config, checked
        else:
            failures.append(f"{n}x{k}, {m} rows, {config}: {checked.found}")
    functions = fused_matmul.others(x, unsloth)
    functions |= {name: functools.partial(multiply, config, x) for name, (config, _) in right.items()}
    times = gpu_times(over(weights.packed, functions), ROUNDS)
    kept = {name: taken for name, taken in times.items() if name not in right}
    config, checks = None, {}
    if right:
        fastest = min(right, key=lambda name: times[name].median)
        kept, (config, checks["fp64"]) = {OURS: times[fastest], **kept}, right[fastest]
    return Row(f"M={m}", "us", kept, checks, sizes={"n": n, "k": k, "m": m}), config


@patch(False)
def measure(
    shapes: Sequence[tuple[int, int]], quick: bool = False, with_unsloth: bool = True, tell: Progress = silent
) -> tuple[dict[str, Any], list[str]]:
    """The entry of the current GPU, and what was wrong.

    Args:
        shapes: (n, k) of the weights.
        quick: try fewer configs.

    Raises:
        NotAvailable: bitsandbytes is older than 0.50.
    """
    fused_matmul.require_gemm()
    dtype = training_dtype()
    unsloth = fused_matmul.gemv() if with_unsloth else None
    failures: list[str] = []
    found = {}
    for i, (n, k) in enumerate(shapes):
        weights = Weights.random((n, k), dtype)
        points = []
        for j, m in enumerate(ROWS):
            tell(f"{weights.subject}, {m} rows", i * len(ROWS) + j, len(shapes) * len(ROWS))
            points.append(one_point(m, weights, quick, unsloth, failures))
        found[f"{n}x{k}"] = decided(points)
        del weights
        torch.cuda.empty_cache()
    return {
        "date": datetime.date.today().isoformat(),
        "releases": {"torch": torch.__version__, **calibrated.releases()},
        "dtype": str(dtype).removeprefix("torch."),
        "matmul": found,
    }, failures


@dataclass(frozen=True)
class Calibration(Report):
    """What is remembered, by GPU."""

    file: Path
    entries: dict[str, Any]
    failures: list[str] = field(default_factory=list)  # configs that were wrong, and are not remembered
    note: str = ""  # what was done

    def problems(self) -> list[str]:
        return self.failures

    def render(self) -> Iterable[RenderableType]:
        yield self.note
        for name, entry in self.entries.items():
            releases = ", ".join(f"{library} {release}" for library, release in entry["releases"].items() if release)
            yield f"{name}, {entry['date']}, {entry['dtype']}, {releases}"
            yield METHOD
            found = [row for shape, rows in entry["matmul"].items() for row in remembered(shape, rows)]
            yield table("fused matmul", found)
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


def known_at(path: Path) -> tuple[dict[str, Any], str]:
    """What the file remembers, by GPU; and why it cannot be read."""
    try:
        return calibrated.load(path), ""
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read: {error}"


def show(path: Path, missing: str) -> Calibration:
    """What is remembered, and of which GPUs it holds here; ``missing``: what to say of a file that should exist."""
    known, note = known_at(path)
    states = {name: calibrated.read(path, name) for name in known}
    lines = [note or (f"remembered in {path}" if known else missing or f"nothing is remembered in {path}")]
    lines += [f"{name}: {entry.status}" for name, entry in states.items()]
    return Calibration(path, {name: known[name] for name in known if states[name].rows}, note="\n".join(lines))


def gpu_for(path: Path) -> str:
    """The key of the current GPU.

    Raises:
        OSError, OutputError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    output.checked(path)
    return calibrated.gpu(torch.cuda.current_device())


def forget(path: Path) -> Calibration:
    name, (known, _) = gpu_for(path), known_at(path)
    if before := known.pop(name, None):
        calibrated.write(path, known)
    return Calibration(path, {}, note=f"{'forgotten' if before else 'nothing was remembered'}: {name}")


def calibrate(
    path: Path, models: Sequence[str], shapes: Sequence[tuple[int, int]], quick: bool, tell: Progress
) -> Calibration:
    """Measure the weights of the models and these shapes, those of Llama 8B where neither is given, and remember them."""
    name, (known, _) = gpu_for(path), known_at(path)
    chosen = [NAMES[model] for model in models] or ([] if shapes else [LLAMA_8B])
    wanted = dict.fromkeys((*(shape for model in chosen for shape in projections(model)), *shapes))
    entry, failures = measure(list(wanted), quick, tell=tell)
    before = known.get(name) if calibrated.read(path, name).rows else None
    if before and all(before[key] == entry[key] for key in ("releases", "dtype")):
        entry["matmul"] = {**before["matmul"], **entry["matmul"]}
    known[name] = entry
    written = output.write(path, lambda path: calibrated.write(path, known))
    note = f"{name} is remembered in {path}" if written else f"{name} was measured and is not remembered"
    return Calibration(path, {name: entry}, failures, note)
