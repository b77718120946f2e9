"""The kernel against bitsandbytes on this machine, bit for bit; under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Column, Table

import nf4_patch

from . import cases
from .patch import patch
from .report import NotAvailable, Progress, Report, holds, plural, provenance, silent

Dequantize = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]  # weight, quant_state, out -> the weight
# family, output dtype and name of a weight to compare, and what makes it (packed, quant_state) when its turn comes
Weight = tuple[str, str, str, Callable[[], tuple[torch.Tensor, Any]]]
SHOWN = 20  # failures that are listed


@dataclass
class Family:
    """One family of cases in one output dtype."""

    family: str
    dtype: str
    cases: int = 0
    elements: int = 0
    differing: int = 0


@dataclass
class VerifyReport(Report):
    place: str
    rows: list[Family] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return sum(row.elements for row in self.rows)

    def problems(self) -> list[str]:
        return self.failures or ([] if self.elements else ["Nothing was compared."])

    def render(self) -> Iterable[RenderableType]:
        counts = [Column(heading, justify="right") for heading in ("cases", "elements", "differing")]
        table = Table("cases of", "output", *counts, title="Kernel against bitsandbytes, bit for bit")
        for row in self.rows:
            cells = (f"{row.cases:,}", f"{row.elements:,}", f"{row.differing:,}")
            table.add_row(row.family, row.dtype, *cells, style="red" if row.differing else None)
        yield table
        yield provenance(self.place)
        yield from self.notes
        yield from self.failures[:SHOWN]
        if len(self.failures) > SHOWN:
            yield f"... and {len(self.failures) - SHOWN} more"
        compared = plural(sum(row.cases for row in self.rows), "case")
        if not self.elements:
            yield "Nothing was compared."
        elif self.failures:
            yield f"NOT the same bits: {len(self.failures):,} of {compared} failed."
        else:
            yield f"The same bits: {compared}, {plural(self.elements, 'element')}, none differs."


def verify(
    weights: Path | None = None, tell: Progress = silent, dequantize: Dequantize = nf4_patch.dequantize_nf4
) -> VerifyReport:
    """Compare the kernel with bitsandbytes, on made weights or on those of a checkpoint.

    Args:
        weights: a .safetensors file with bitsandbytes 4-bit weights.
        dequantize: what is compared.

    Raises:
        NotAvailable: ``weights`` cannot be read, or holds no 4-bit weight; there is no GPU, and bitsandbytes is older
            than 0.50.
    """
    cases.use_interpreter_without_gpu()
    import bitsandbytes

    from ..nf4.dequantize import compilation

    device = cases.device_here()
    report = VerifyReport(cases.place_of(device))
    if device.type == "cpu":
        if not holds(bitsandbytes.__version__, ">= 0.50"):
            raise NotAvailable(
                f"no GPU, and the CPU code of bitsandbytes {bitsandbytes.__version__} has other bits than its CUDA library or "
                "does not take every shape: nothing can be compared here; install bitsandbytes 0.50 or newer"
            )
        if not compilation.INTERPRETED:
            report.failures.append("no GPU, and the kernels were imported before the interpreter could be chosen")
            return report
        report.notes.append(
            "No GPU here: the kernel without its inline PTX ran under Triton's interpreter, against bitsandbytes' CPU "
            "library; signs of FP4's zeros are not compared (the CPU library's differ from the CUDA library's)."
        )
        if weights is None:
            report.notes.append(
                "To keep it short every combination ran two of the six shapes: each blocksize met each shape."
            )
    with patch(False):
        compare_all(report, list_cases(weights, device), dequantize, tell)
    return report


def list_cases(weights: Path | None, device: torch.device) -> list[Weight]:
    if weights is not None:
        found = list(checkpoint(weights, device))
        if not found:
            raise NotAvailable(f"{weights} holds no 4-bit weight of bitsandbytes: nothing can be compared")
        return found
    made = functools.partial(cases.quantized, device=device)
    return [
        (case.family, str(case.dtype).removeprefix("torch."), str(case), functools.partial(made, case, seed))
        for seed, case in enumerate(cases.every_case(thin=device.type == "cpu"))
    ]


def checkpoint(path: Path, device: torch.device) -> Iterator[Weight]:
    """The 4-bit weights of a checkpoint that transformers or bitsandbytes saved.

    Raises:
        NotAvailable: the file cannot be read; from ``make``, a weight cannot be.
    """
    from bitsandbytes.functional import QuantState
    from safetensors import SafetensorError, safe_open

    # What QuantState.from_dict raises for keys and values that are not those of a quant_state.
    DAMAGED = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, AssertionError)
    try:
        file = safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise NotAvailable(f"{path} cannot be read as safetensors: {error}") from error
    keys = sorted(file.keys())

    def read(prefix: str, fields: list[str]) -> tuple[torch.Tensor, Any]:
        try:
            state = QuantState.from_dict({key[len(prefix) + 1 :]: file.get_tensor(key) for key in fields}, device)
            if state.shape is None:
                raise ValueError("its quant_state has no shape")
            return file.get_tensor(prefix), state
        except DAMAGED as error:
            raise NotAvailable(f"damaged in the checkpoint: {type(error).__name__}: {error}") from error

    for key in keys:
        prefix, found, _ = key.partition(".quant_state.bitsandbytes__")
        if found:
            fields = [k for k in keys if k.startswith(prefix + ".")]
            yield "weights of the checkpoint", "its own", prefix, functools.partial(read, prefix, fields)


def compare_all(report: VerifyReport, weights: list[Weight], dequantize: Dequantize, tell: Progress) -> None:
    rows: dict[tuple[str, str], Family] = {}
    for done, (family, dtype, name, make) in enumerate(weights):
        tell(f"verify: {family}", done, len(weights))
        row = rows.setdefault((family, dtype), Family(family, dtype))
        row.cases += 1
        try:
            packed, state = make()
            row.elements += state.shape.numel()
            count, failure = compare(packed, state, dequantize)
            row.differing += count
        except NotAvailable as error:
            failure = str(error)
        if failure:
            report.failures.append(f"{name}: {failure}")
    report.rows = list(rows.values())


def compare(packed: torch.Tensor, state: Any, dequantize: Dequantize) -> tuple[int, str]:
    """How many elements differ, and a sentence on the first; (0, "") where none does."""
    out = torch.full(tuple(state.shape), float("nan"), dtype=state.dtype, device=packed.device)
    try:  # before bitsandbytes, which would read past the end of a damaged weight
        got = dequantize(packed, state, out)
    except (ValueError, RuntimeError) as error:  # a failure here: every case is one for the kernel
        return out.numel(), f"unsupported: {error}"
    want = cases.ask_bitsandbytes(packed, state)
    if got.shape != want.shape or got.dtype is not want.dtype:
        return want.numel(), f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    where = cases.differing(got, want, zeros_alike=state.quant_type == "fp4" and not packed.is_cuda)
    count = where.numel()
    if not count:
        return 0, ""
    first = int(where[0])
    a, b = float(got.reshape(-1)[first]), float(want.reshape(-1)[first])
    return count, f"{count} of {want.numel()} elements differ, first [{first}]: {a!r}, bitsandbytes {b!r}"
