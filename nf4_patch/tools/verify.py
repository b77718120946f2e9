"""The command ``nf4-patch verify``, which compares the kernel with bitsandbytes on this machine's GPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import nf4_patch

from ..nf4.runtime import equal_bits
from . import cases
from .patch import patch
from .report import Progress, Report, plural, provenance, silent, table

Dequantize = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]  # weight, quant_state, out -> the weight
SHOWN = 20  # failures that are listed


@dataclass
class VerifyReport(Report):
    place: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # counts by family of cases and output dtype
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def render(self) -> Iterable[str]:
        yield table(self.rows)
        yield provenance(self.place)
        yield from self.notes
        yield from self.failures[:SHOWN]
        compared = plural(sum(row["cases"] for row in self.rows), "case")
        elements = plural(sum(row["elements"] for row in self.rows), "element")
        same = f"Bit-identical: {compared}, {elements}, none differs."
        yield f"NOT bit-identical: {len(self.failures):,} of {compared} failed." if self.failures else same


@patch(False)
def verify(tell: Progress = silent, dequantize: Dequantize = nf4_patch.dequantize_nf4) -> VerifyReport:
    """Compare a function, by default the kernel, with bitsandbytes on weights of every layout."""
    device = cases.device_here()
    report = VerifyReport(cases.place_of(device))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    every = list(cases.every_case())
    for number, case in enumerate(every):
        tell(f"verify: {case.family}", number, len(every))
        dtype = str(case.dtype).removeprefix("torch.")
        start = {"family": case.family, "dtype": dtype, "cases": 0, "elements": 0, "differing": 0}
        row = rows.setdefault((case.family, dtype), start)
        packed, state = cases.quantized(case, number, device)
        count, failure = compare(packed, state, dequantize)
        row["cases"] += 1
        row["elements"] += state.shape.numel()
        row["differing"] += count
        report.failures += [f"{case}: {failure}"] * bool(failure)
    report.rows += rows.values()
    return report


def compare(packed: torch.Tensor, state: Any, dequantize: Dequantize) -> tuple[int, str]:
    """Return how many elements differ, and a sentence about the first difference."""
    import bitsandbytes.functional as F

    out = torch.full(tuple(state.shape), float("nan"), dtype=state.dtype, device=packed.device)
    try:
        got = dequantize(packed, state, out)
    except (ValueError, RuntimeError) as error:  # the kernel supports every case, so an error is a failure
        return out.numel(), f"unsupported: {error}"
    want = F.dequantize_4bit(packed, state)
    if got.shape != want.shape or got.dtype is not want.dtype:
        return want.numel(), f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    where = torch.nonzero(~equal_bits(got, want)).reshape(-1)
    count = where.numel()
    if not count:
        return 0, ""
    first = int(where[0])
    a, b = float(got.reshape(-1)[first]), float(want.reshape(-1)[first])
    return count, f"{count} of {want.numel()} elements differ, first [{first}]: {a!r}, bitsandbytes {b!r}"
