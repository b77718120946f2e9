"""Variants of one thing measured side by side: a ratio exists only where the bits agreed in this very run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .peers import BITSANDBYTES, OURS
from .timing import Times


@dataclass(frozen=True)
class Comparison:
    """One subject, its variants' times, and whether ours gave each peer's bits before anything was timed."""

    subject: str
    unit: str  # us, ms, s
    times: dict[str, Times]
    same_bits: dict[str, bool]  # by peer
    nbytes: int = 0  # traffic of one call
    notes: dict[str, str] = field(default_factory=dict)  # further columns

    @property
    def checked(self) -> bool:
        """Something was compared, and ours has the bits of bitsandbytes where that was measured."""
        return bool(self.same_bits) and self.same_bits.get(BITSANDBYTES, all(self.same_bits.values()))

    def ratio(self, peer: str) -> float | None:
        """How many times ours is as fast as the peer; None where the bits did not agree or nothing was measured."""
        if not self.checked or not self.same_bits.get(peer, False) or not {peer, OURS} <= self.times.keys():
            return None
        return self.times[peer].median / self.times[OURS].median

    def percent_of(self, limit: str) -> float | None:
        """100 * limit / ours by time; None as in ``ratio``."""
        if not self.checked or not {limit, OURS} <= self.times.keys():
            return None
        return 100 * self.times[limit].median / self.times[OURS].median

    def gigabytes_a_second(self, name: str) -> float | None:
        if name not in self.times or (name == OURS and not self.checked):
            return None
        return self.nbytes / self.times[name].median / 1e3  # bytes a microsecond

    @property
    def noise(self) -> float:
        """The largest difference of a variant from itself."""
        return max(times.noise for times in self.times.values())

    @property
    def failures(self) -> list[str]:
        return [f"{self.subject}: the bits differ from {peer}" for peer, same in self.same_bits.items() if not same]

    def as_dict(self) -> dict[str, object]:
        return {
            "subject": self.subject,
            "unit": self.unit,
            "nbytes": self.nbytes,
            "same_bits": self.same_bits,
            "median": {name: times.median for name, times in self.times.items()},
            "noise": {name: times.noise for name, times in self.times.items()},
            "ratio": {peer: self.ratio(peer) for peer in self.same_bits},
            "notes": self.notes,
            "times": {name: times.values for name, times in self.times.items()},
        }


def variants_of(comparisons: Sequence[Comparison]) -> list[str]:
    """Every variant's name, in the order of first appearance."""
    return list(dict.fromkeys(name for comparison in comparisons for name in comparison.times))
