"""Rows of benchmark results. A row has a ratio only if its checks passed in the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.timing import Times
from nf4_patch.matmul.measurement import SLACK
from nf4_patch.tools import report

OURS, BITSANDBYTES = "nf4_patch", "bitsandbytes"
UNPATCHED = "unpatched"  # the same code with the patch off
GPU_TIME = "GPU time"  # at the end of a subject, in contrast to wall-clock time
RATE = "tokens/s"  # the only unit where more is better
CEILING, EMPTY, DENSE = "ceiling", "torch.empty", "16-bit weights"
LIMITS = (CEILING, EMPTY, DENSE)  # limits that nf4_patch approaches; all other variants are baselines


@dataclass(frozen=True)
class Check:
    """A check that a ratio depends on."""

    passed: bool
    found: str
    error: float | None = None  # our relative error against fp64, None if bits were compared
    limit: float | None = None  # maximum of ``error``


def accuracy(ours: float, theirs: float, of: str = "") -> Check:
    """Check nf4_patch's error against fp64. The limit is SLACK times the error of dequantize + matmul."""
    found = f"{of}error {ours:.3e} against fp64, dequantize + matmul {theirs:.3e}"
    return Check(ours <= SLACK * theirs, found, ours, SLACK * theirs)


@dataclass(frozen=True)
class Row:
    """One subject with its variants' times, and with the checks of nf4_patch's result.

    A check with a baseline's name decides about the ratio to this baseline. bitsandbytes' check and checks with any
    other name, such as "fp64", decide about every ratio of the row.
    """

    subject: str
    unit: str  # us, ms, s or RATE
    times: dict[str, Times]
    checks: dict[str, Check]
    nbytes: int = 0  # read and written by one call
    sizes: dict[str, int] = field(default_factory=dict)  # the subject as numbers: n, k, m, batch, tokens
    notes: dict[str, str] = field(default_factory=dict)  # additional columns

    @property
    def checked(self) -> bool:
        """Return whether anything was compared and no check that concerns the whole row failed."""
        others = self.times.keys() - {BITSANDBYTES}
        decisive = [check for name, check in self.checks.items() if name not in others] or self.checks.values()
        return bool(decisive) and all(check.passed for check in decisive)

    def ratio(self, other: str) -> float | None:
        """Return nf4_patch's speed-up over another variant, or None if a check failed or nothing was measured."""
        if not self.checked or not {other, OURS} <= self.times.keys():
            return None
        if other in self.checks and not self.checks[other].passed:
            return None
        ours, theirs = self.times[OURS].median, self.times[other].median
        return ours / theirs if self.unit == RATE else theirs / ours

    @property
    def noise(self) -> float:
        """Return the largest noise of any variant."""
        return max(times.noise for times in self.times.values())

    @property
    def failures(self) -> list[str]:
        return [f"{self.subject}: {check.found}" for check in self.checks.values() if not check.passed]

    def as_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "median": {name: times.median for name, times in self.times.items()},
            "noise": {name: times.noise for name, times in self.times.items()},
            "ratio": {name: self.ratio(name) for name in self.times if name != OURS},
            "times": {name: times.values for name, times in self.times.items()},
        }


def table(title: str, rows: Sequence[Row]) -> str:
    """Return a text table with one line per row: nf4_patch's time, the limits with nf4_patch's percentage, and the
    baselines with its speed-up.
    """
    others = [name for name in dict.fromkeys(name for row in rows for name in row.times) if name != OURS]
    others.sort(key=lambda name: name not in LIMITS)
    heading = f"{title}, {' / '.join(dict.fromkeys(row.unit for row in rows))}"
    lines = [
        {
            heading: row.subject,
            **{name: cell(row, name) for name in (OURS, *others)},
            "noise": f"{100 * row.noise:.1f} %",
            **row.notes,
        }
        for row in rows
    ]
    return report.table(lines)


def cell(row: Row, name: str) -> str:
    """Return a variant's time with nf4_patch's ratio to it, or with "check failed" in place of the ratio."""
    if name not in row.times:
        return ""
    value, ratio = row.times[name].median, row.ratio(name)
    time = f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.1f}"
    if name == OURS:
        return time
    if ratio is None:
        return f"{time} check failed"
    return f"{time} {100 * ratio:.1f}%" if name in LIMITS else f"{time} {ratio:.2f}x"
