"""Variants of one thing measured side by side: a ratio exists only where the checks of its row passed in this very run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nf4_patch.tools import report
from nf4_patch.tools.matmul import BITSANDBYTES, OURS, SLACK
from nf4_patch.tools.timing import Times

UNPATCHED = "unpatched"  # the same with the patch off
GPU_TIME = "GPU time"  # at the end of a subject: not wall time
RATE = "tokens/s"  # the unit of which more is better
CEILING, EMPTY, DENSE = "ceiling", "torch.empty", "16-bit weights"
LIMITS = (CEILING, EMPTY, DENSE)  # what ours is held against; everything else that is timed is a baseline


@dataclass(frozen=True)
class Check:
    """What a ratio depends on."""

    passed: bool
    found: str
    error: float | None = None  # ours, relative, against fp64; None: bits were compared
    limit: float | None = None  # that it must not exceed


def accuracy(ours: float, theirs: float, of: str = "") -> Check:
    """Errors against fp64: that of dequantize + matmul, SLACK included, is the limit of ours."""
    found = f"{of}error {ours:.3e} against fp64, dequantize + matmul {theirs:.3e}"
    return Check(ours <= SLACK * theirs, found, ours, SLACK * theirs)


@dataclass(frozen=True)
class Row:
    """One subject, its variants' times, and the checks that ours passed or not.

    A check that bears a baseline's name decides about that baseline's ratio; bitsandbytes' and those of any other name
    ("fp64") about every ratio of the row.
    """

    subject: str
    unit: str  # us, ms, s or RATE
    times: dict[str, Times]
    checks: dict[str, Check]
    nbytes: int = 0  # moved by one call
    sizes: dict[str, int] = field(default_factory=dict)  # n, k, m, batch, tokens: the subject as numbers
    notes: dict[str, str] = field(default_factory=dict)  # further columns

    @property
    def checked(self) -> bool:
        """Something was compared, and no check that concerns the whole row failed."""
        others = self.times.keys() - {BITSANDBYTES}
        decisive = [check for name, check in self.checks.items() if name not in others] or self.checks.values()
        return bool(decisive) and all(check.passed for check in decisive)

    def ratio(self, other: str) -> float | None:
        """How many times ours is as fast as another variant; None where a check failed or nothing was measured."""
        if not self.checked or not {other, OURS} <= self.times.keys():
            return None
        if other in self.checks and not self.checks[other].passed:
            return None
        ours, theirs = self.times[OURS].median, self.times[other].median
        return ours / theirs if self.unit == RATE else theirs / ours

    @property
    def noise(self) -> float:
        """The largest difference of a variant from itself."""
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
    """A line a row: ours, the limits and what part of them ours reaches, the baselines and how many times ours is as fast."""
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
    """A variant's time and what ours is to it, or that the checks forbid to say."""
    if name not in row.times:
        return ""
    value, ratio = row.times[name].median, row.ratio(name)
    time = f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.1f}"
    if name == OURS:
        return time
    if ratio is None:
        return f"{time} check failed"
    return f"{time} {100 * ratio:.1f}%" if name in LIMITS else f"{time} {ratio:.2f}x"
