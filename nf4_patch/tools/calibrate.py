"""``nf4-patch calibrate``: find the fastest config of the fused matmul on this GPU, by weight and rows of X, and save it.

The file is read by :mod:`nf4_patch.matmul.calibrated`. It also contains the times that decided.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..matmul import calibrated
from ..matmul import launch as matmul
from ..matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS
from ..nf4 import runtime
from ..patching.quant_state import weight_of
from . import output
from .llama import training_dtype
from .matmul import OURS, SLACK, Weights, gemv, others, require_gemm
from .patch import patch
from .report import Progress, Report, silent, table
from .timing import Times, gpu_times, over

ROWS = (1, 2, 8, 16, 32, 64)  # rows of X; each is the upper end of a range
MARGIN = 0.03  # the fused matmul has to be faster by this fraction, and by more than the noise of the run
ROUNDS = 10
SHIPPED = SMALL_M_ROWS + SMALL_M_CANDIDATES  # the candidates are the configs of all these rows, measured on any GPU
METHOD = (
    "GPU time of one matmul, us: medians of alternating CUDA-graph replays over weights that overflow the L2 cache. Each config "
    "is checked before it is timed: one-hot rows return the bits of dequantize, and the error against fp64 is no larger than "
    f"with dequantize + matmul. A config is used if it is {100 * MARGIN:.0f} % faster than everything else, at both ends of its "
    "range of rows."
)


class Point(NamedTuple):
    """Measurement of one weight at one number of rows of X."""

    m: int
    times: dict[str, Times]  # of the originals and of the fused matmul
    config: Any = None  # the fastest correct config of the fused matmul, None if no config is correct

    @property
    def noise(self) -> float:
        """Return the largest noise of any of the times."""
        return max(times.noise for times in self.times.values())


def candidates(m: int) -> list[Any]:
    """Return the configs to try at ``m`` rows of X: the configs of every table row that covers m."""
    return list(dict.fromkeys(row.config for row in SHIPPED if row.max_m >= m))


def beats(here: Point, there: Point) -> bool:
    """Return whether the fused matmul at ``here`` is faster than everything else at ``there``."""
    if here.config is None:
        return False
    ours = here.times[OURS].median * (1 + max(MARGIN, here.noise, there.noise))
    return all(ours < times.median for name, times in there.times.items() if name != OURS)


def decided(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the rows to save.

    Only the ends of a range are measured. Inside a range, the fused matmul takes no longer than at the upper end. The
    originals take no less than at the end of the previous range. So the fused matmul's time at the upper end has to be below
    the originals' times at both ends.
    """
    found = []
    for before, point in zip((None, *points), points, strict=False):
        wins = beats(point, point) and (before is None or point.m == before.m + 1 or beats(point, before))
        us = {name: times.median for name, times in point.times.items()}
        config = point.config._asdict() if wins else None
        found.append({"m": point.m, "config": config, "us": us, "noise": point.noise})
    return found


def multiply(config: Any, x: torch.Tensor, packed: torch.Tensor, state: Any, out: Any = None) -> Any:
    """Run the fused matmul with a given config."""
    return matmul.resolve(x, weight_of(packed, state), None, config)(x, out)


def wrong(config: Any, x: torch.Tensor, weights: Weights) -> str:
    """Check a config. Return the failure, or "" if the config is correct.

    One-hot rows have to return the bits of dequantize. For ``x``, the error against fp64 must not exceed the error of
    dequantize + matmul.

    Raises:
        KernelUnavailable: the config does not compile on this GPU.
    """
    m, k = x.shape
    columns = torch.randperm(k, device=x.device)[:m]
    one_hot = torch.nn.functional.one_hot(columns, k).to(x.dtype)
    out = torch.full((m, len(weights.dense)), float("nan"), dtype=x.dtype, device=x.device)
    if not torch.equal(multiply(config, one_hot, *weights.packed[0], out.clone()), weights.dense[:, columns].t()):
        return "one-hot rows do not return the bits of dequantize"
    ours, theirs = weights.errors(x, multiply(config, x, *weights.packed[0], out))
    return "" if ours <= SLACK * theirs else f"error {ours:.3e} against fp64, dequantize + matmul {theirs:.3e}"


def one_point(m: int, weights: Weights, unsloth: Any, failures: list[str]) -> Point:
    """Check every candidate. Then time the correct candidates and the originals, alternating."""
    n, k = weights.dense.shape
    x = weights.rows_of_x(m)
    right = {}
    for config in candidates(m):
        try:
            found = wrong(config, x, weights)
        except runtime.KernelUnavailable:  # too many registers for this GPU, or an instruction that it lacks
            continue
        if found:
            failures.append(f"{n}x{k}, {m} rows, {config}: {found}")
        else:
            right[str(config)] = config
    functions = others(x, unsloth)
    functions |= {name: functools.partial(multiply, config, x) for name, config in right.items()}
    times = gpu_times(over(weights.packed, functions), ROUNDS)
    ours = min(right, key=lambda name: times[name].median, default="")
    kept = {OURS: times[ours]} if right else {}
    return Point(m, kept | {name: taken for name, taken in times.items() if name not in right}, right.get(ours))


@dataclass(frozen=True)
class Calibration(Report):
    """Result of a calibration on this GPU."""

    entry: dict[str, Any]  # as saved
    failures: list[str]  # incorrect configs, which are not saved
    note: str = ""  # where the calibration is saved

    def render(self) -> Iterable[str]:
        yield METHOD
        yield table({"weight": shape, **line(row)} for shape, rows in self.entry["matmul"].items() for row in rows)
        yield from self.failures
        yield self.note


def line(row: dict[str, Any]) -> dict[str, object]:
    """Return a line of the table: all times, the speed-up of the fused matmul over each, and the config that is used."""
    us, config = row["us"], row["config"]
    ours = us.get(OURS)
    times = {
        name: f"{time:.2f}" + (f" ({time / ours:.2f}x)" if ours and name != OURS else "") for name, time in us.items()
    }
    taken = "the original" if config is None else "-".join(f"{value:d}" for value in config.values())
    return {"rows": row["m"], **times, "noise": f"{100 * row['noise']:.1f} %", "used": taken}


@patch(False)
def measure(shapes: Sequence[tuple[int, int]], tell: Progress = silent) -> Calibration:
    """Calibrate weights of these shapes, (n, k), on the current GPU.

    Raises:
        NotAvailable: bitsandbytes is older than 0.50.
    """
    require_gemm()
    unsloth = gemv()
    failures: list[str] = []
    found = {}
    for i, (n, k) in enumerate(shapes):
        weights = Weights.random((n, k), training_dtype())
        points = []
        for j, m in enumerate(ROWS):
            tell(f"{weights.subject}, {m} rows", i * len(ROWS) + j, len(shapes) * len(ROWS))
            points.append(one_point(m, weights, unsloth, failures))
        found[f"{n}x{k}"] = decided(points)
        del weights
        torch.cuda.empty_cache()
    entry = {
        "date": datetime.date.today().isoformat(),
        "releases": {"torch": torch.__version__, **calibrated.releases()},
        "dtype": str(training_dtype()).removeprefix("torch."),
        "matmul": found,
    }
    return Calibration(entry, failures)


def calibrate(path: Path, shapes: Sequence[tuple[int, int]], tell: Progress) -> Calibration:
    """Measure weights of these shapes, (n, k), and save them in ``path``. Keep earlier results of the same releases.

    Raises:
        NotAvailable: bitsandbytes is older than 0.50.
        click.BadParameter: the file cannot be written.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    output.OutputFile().convert(path)
    name = calibrated.gpu(torch.cuda.current_device())
    found = measure(shapes, tell)
    try:
        known = calibrated.load(path)
    except (OSError, ValueError):  # a damaged file is replaced
        known = {}
    before = known[name] if calibrated.read(path, name).rows else {}
    same = all(before.get(key) == found.entry[key] for key in ("releases", "dtype"))
    known[name] = found.entry | {"matmul": (before["matmul"] if same else {}) | found.entry["matmul"]}
    try:
        calibrated.write(path, known)
    except OSError as error:
        return dataclasses.replace(found, note=f"The calibration of {name} was not saved to {path}: {error.strerror}")
    return dataclasses.replace(found, note=f"The calibration of {name} is saved in {path}")
