"""The option ``matmul="auto"``, which multiplies few rows by the packed weight without a dense copy of the weight."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..patching.option import Option


@dataclass(frozen=True)
class MatmulStatus:
    """One measurement of the fused matmul, for a weight [out_features, in_features] and up to ``rows`` rows of x."""

    device: int
    rows: int
    out_features: int
    in_features: int
    fused: bool  # whether the fused matmul was faster, so that it runs
    us: dict[str, float]  # median GPU time in us, by the name of the timed function

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:.1f} us" for name, us in self.us.items())
        size = f"GPU {self.device}, up to {self.rows} rows x {self.out_features}x{self.in_features}"
        return f"{size}: {'the fused matmul' if self.fused else 'the original'} runs ({times})"


KERNELS = "fused matmul", "fused matmul with LoRA"  # the names under which launches are counted


def report(mode: str | int) -> tuple[MatmulStatus, ...]:
    module = sys.modules.get(f"{__package__}.choice")  # choice.py imports torch, so it is not imported here
    return module.report() if module else ()


def lines(measured: tuple[MatmulStatus, ...]) -> list[str]:
    fused = sum(each.fused for each in measured)
    return [f"  {fused} of {len(measured)} measured sizes run fused"] if measured else []


def used(measured: tuple[MatmulStatus, ...]) -> int:
    """Return how many products the fused matmul computed, for all targets."""
    from ..patching.counters import counters

    return sum(counter.hits for (*_, kernel), counter in list(counters.hit_counters.items()) if kernel in KERNELS)


MATMUL = Option(
    "NF4_PATCH_MATMUL", ("off", "auto"), "off",
    "auto: multiply up to 64 rows (generation, short sequences) directly by the packed weight where this was measured to be faster. "
    "Off by default, because results are as accurate, but not bit-identical.",
    on="auto", fast="auto", calls="products",
    report=report, lines=lines, used=used,
)  # fmt: skip
