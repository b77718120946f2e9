"""``nf4-patch calibrate``: which config of the fused matmul wins on this GPU, by weight and rows of X, remembered.

What is written is what :mod:`nf4_patch.matmul.calibrated` reads, with the times that decided it.
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

from ...matmul import calibrated
from ...matmul import launch as matmul
from ...matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS
from ...nf4 import runtime
from ...patching.quant_state import weight_of
from .. import output
from ..llama import training_dtype
from ..patch import patch
from ..report import Progress, Report, silent, table
from .matmul import OURS, SLACK, Weights, gemv, others, require_gemm
from .timing import Times, gpu_times, over

ROWS = (1, 2, 8, 16, 32, 64)  # of X; each closes the range that starts after the one before
MARGIN = 0.03  # ours has to be faster by this much, and by more than the noise of the run
ROUNDS = 10
SHIPPED = SMALL_M_ROWS + SMALL_M_CANDIDATES  # whose configs are the candidates, whatever their GPU
METHOD = (
    "GPU time of one matmul, us: CUDA-graph replays over weights that overflow the L2, alternating, medians. Each config "
    "was right first: one-hot rows give dequantize's bits, and the error against fp64 is that of dequantize + matmul. "
    f"It is taken where it is {100 * MARGIN:.0f} % faster than all else, at the fewest rows of its range too."
)


class Point(NamedTuple):
    """What was measured of one weight at one number of rows of X."""

    m: int
    times: dict[str, Times]  # of the original ways to multiply, and of ours
    config: Any = None  # of ours: the fastest that is right; None: none is

    @property
    def noise(self) -> float:
        """The largest difference of anything from itself."""
        return max(times.noise for times in self.times.values())


def candidates(m: int) -> list[Any]:
    """The configs to try at ``m`` rows of X: those of every table row that covers m."""
    return list(dict.fromkeys(row.config for row in SHIPPED if row.max_m >= m))


def beats(here: Point, there: Point) -> bool:
    """Whether ours takes less here than everything else takes there."""
    if here.config is None:
        return False
    ours = here.times[OURS].median * (1 + max(MARGIN, here.noise, there.noise))
    return all(ours < times.median for name, times in there.times.items() if name != OURS)


def decided(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The rows to remember.

    Inside a range nothing is measured. Ours takes no longer there than at its last number of rows, and the others no less
    than at the one before: so there ours has to be faster than the others are at either end.
    """
    found = []
    for before, point in zip((None, *points), points, strict=False):
        wins = beats(point, point) and (before is None or point.m == before.m + 1 or beats(point, before))
        us = {name: times.median for name, times in point.times.items()}
        config = point.config._asdict() if wins else None
        found.append({"m": point.m, "config": config, "us": us, "noise": point.noise})
    return found


def multiply(config: Any, x: torch.Tensor, packed: torch.Tensor, state: Any, out: Any = None) -> Any:
    """The fused matmul with a config."""
    return matmul.resolve(x, weight_of(packed, state), None, config)(x, out)


def wrong(config: Any, x: torch.Tensor, weights: Weights) -> str:
    """What is wrong with a config; "" where one-hot rows give dequantize's bits, and x an error no larger than its matmul's.

    Raises:
        KernelUnavailable: it does not compile here.
    """
    m, k = x.shape
    columns = torch.randperm(k, device=x.device)[:m]
    one_hot = torch.nn.functional.one_hot(columns, k).to(x.dtype)
    out = torch.full((m, len(weights.dense)), float("nan"), dtype=x.dtype, device=x.device)
    if not torch.equal(multiply(config, one_hot, *weights.packed[0], out.clone()), weights.dense[:, columns].t()):
        return "one-hot rows do not give the bits of dequantize"
    ours, theirs = weights.errors(x, multiply(config, x, *weights.packed[0], out))
    return "" if ours <= SLACK * theirs else f"error {ours:.3e} against fp64, dequantize + matmul {theirs:.3e}"


def one_point(m: int, weights: Weights, unsloth: Any, failures: list[str]) -> Point:
    """Check every candidate, then time those that are right and everything else, alternating."""
    n, k = weights.dense.shape
    x = weights.rows_of_x(m)
    right = {}
    for config in candidates(m):
        try:
            found = wrong(config, x, weights)
        except runtime.KernelUnavailable:  # too many registers for this GPU, an instruction that it has not
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
    """What was measured on this GPU."""

    entry: dict[str, Any]  # that is remembered
    failures: list[str]  # configs that were wrong, and are not remembered
    note: str = ""  # where it is remembered

    def render(self) -> Iterable[str]:
        yield METHOD
        yield table({"weight": shape, **line(row)} for shape, rows in self.entry["matmul"].items() for row in rows)
        yield from self.failures
        yield self.note


def line(row: dict[str, Any]) -> dict[str, object]:
    """Of the table: each time, how many times as fast ours is, and the config that is taken."""
    us, config = row["us"], row["config"]
    ours = us.get(OURS)
    times = {
        name: f"{time:.2f}" + (f" ({time / ours:.2f}x)" if ours and name != OURS else "") for name, time in us.items()
    }
    taken = "the original" if config is None else "-".join(f"{value:d}" for value in config.values())
    return {"rows": row["m"], **times, "noise": f"{100 * row['noise']:.1f} %", "taken": taken}


@patch(False)
def measure(shapes: Sequence[tuple[int, int]], tell: Progress = silent) -> Calibration:
    """Of weights with these shapes, (n, k), on the current GPU.

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
    """Measure weights of these shapes, (n, k), and remember them in ``path`` with what the same releases measured before.

    Raises:
        NotAvailable: bitsandbytes is older than 0.50.
        OutputError: the file cannot be written.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    output.checked(path)
    name = calibrated.gpu(torch.cuda.current_device())
    found = measure(shapes, tell)
    try:
        known = calibrated.load(path)
    except (OSError, ValueError):  # damaged: replaced
        known = {}
    before = known[name] if calibrated.read(path, name).rows else {}
    same = all(before.get(key) == found.entry[key] for key in ("releases", "dtype"))
    known[name] = found.entry | {"matmul": (before["matmul"] if same else {}) | found.entry["matmul"]}
    try:
        calibrated.write(path, known)
    except OSError as error:
        return dataclasses.replace(found, note=f"{name} is not remembered: {path} was not written: {error.strerror}")
    return dataclasses.replace(found, note=f"{name} is remembered in {path}")
