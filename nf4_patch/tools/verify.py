"""The kernel against bitsandbytes on this machine, bit for bit; under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import RenderableType
from rich.table import Table

import nf4_patch

from ..nf4.layout import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES
from .report import Report, Tell, plural, provenance, silent

Serve = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]  # weight, quant_state, out -> the weight

# Whole programs and part of one, partial last blocks, odd counts, rows that no blocksize divides, rank 1 to 3.
SHAPES = ((256, 512), (96, 136), (33, 77), (3, 5, 44), (4097,), (1, 1))
MATRIX, RAGGED = (256, 192), (65, 42)
SHOWN = 20  # failures that are listed


class Case(NamedTuple):
    """One weight to make and compare."""

    family: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int = 64
    nested: bool = True
    quant_type: str = "nf4"
    transposed: bool = False
    storage: torch.dtype = torch.uint8
    offset_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = [
            self.quant_type, "nested" if self.nested else "flat", "x".join(map(str, self.shape)), name_of(self.dtype),
            f"blocksize {self.blocksize}",
        ]  # fmt: skip
        words += ["transposed"] if self.transposed else []
        words += [f"stored as {name_of(self.storage)}"] if self.storage is not torch.uint8 else []
        words += [f"{name_of(self.offset_dtype)} offset"] if self.offset_dtype is not torch.float32 else []
        return ", ".join(words)


LAYOUTS, TRANSPOSED, STORAGE, OFFSETS = "shapes x blocksizes", "transposed", "storage dtypes", "offset dtypes"
PAIRS = "absmax byte x packed byte"


def cases(thin: bool = False) -> Iterator[Case]:
    """Every output dtype with everything that changes the kernel or the way to it.

    ``thin``: two of the six shapes for each combination, so that every dtype and blocksize still meets every shape.
    """
    for dtype in OUTPUT_DTYPES:
        combinations = itertools.product(BLOCKSIZES, (True, False), ("nf4", "fp4"))
        for number, (blocksize, nested, kind) in enumerate(combinations):
            for shape in SHAPES[number % 3 :: 3] if thin else SHAPES:
                yield Case(LAYOUTS, shape, dtype, blocksize, nested, kind)
        for shape, nested in itertools.product((MATRIX, RAGGED), (True, False)):
            yield Case(TRANSPOSED, shape, dtype, nested=nested, transposed=True)
        for storage, transposed in itertools.product(STORAGE_DTYPES[1:], (False, True)):
            yield Case(STORAGE, MATRIX, dtype, storage=storage, transposed=transposed)
        for offset, shape in itertools.product(OFFSET_DTYPES[1:], (MATRIX, RAGGED)):
            yield Case(OFFSETS, shape, dtype, offset_dtype=offset)
        for blocksize, kind in itertools.product((64, 512), ("nf4", "fp4")):
            yield Case(PAIRS, (256, 512), dtype, blocksize, quant_type=kind)


def make(case: Case, device: torch.device, seed: int) -> tuple[torch.Tensor, Any]:
    """The packed weight and QuantState that bitsandbytes makes of a random weight of a transformer's scale."""
    import bitsandbytes.functional as F

    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(case.shape, generator=generator) * 0.05).to(device=device, dtype=case.dtype)
    packed, state = F.quantize_4bit(
        weight, blocksize=case.blocksize, compress_statistics=case.nested,
        quant_type=case.quant_type, quant_storage=case.storage,
    )  # fmt: skip
    if case.nested:
        state.offset = state.offset.to(case.offset_dtype)
    if case.family == PAIRS:  # 256 runs of the 256 packed bytes, one absmax byte each
        packed.view(-1).copy_(torch.arange(256, device=device).to(torch.uint8).repeat(256))
        state.absmax.copy_(torch.arange(256, device=device).to(torch.uint8).repeat_interleave(512 // case.blocksize))
    return (packed.t() if case.transposed else packed), state


def ask_bitsandbytes(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight as bitsandbytes dequantizes it.

    On the CPU it is asked for a flat shape: bitsandbytes 0.50.2 starts a new block at every row there when a
    row is even and no multiple of the blocksize. Its CUDA library does not.
    """
    import bitsandbytes.functional as F

    if packed.is_cuda:
        return F.dequantize_4bit(packed, state)
    shape = state.shape
    state.shape = torch.Size((shape.numel(),))
    try:
        weight = F.dequantize_4bit(packed.reshape(-1, 1), state).reshape(shape)
    finally:
        state.shape = shape
    return weight.t() if packed.shape[0] == 1 else weight


def differing(got: torch.Tensor, want: torch.Tensor, zeros_alike: bool) -> torch.Tensor:
    """The flat indices of the elements whose bits differ, signs of zero too unless ``zeros_alike``.

    A NaN differs from everything here: no case has one, and ``got`` was poisoned with them.
    """
    got, want = got.reshape(-1), want.reshape(-1)
    integers = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    same = got.view(integers) == want.view(integers)
    if zeros_alike:
        same |= (got == 0) & (want == 0)
    return torch.nonzero(~same | got.isnan()).reshape(-1)


@dataclass
class Row:
    """One family of cases in one output dtype."""

    family: str
    dtype: str
    cases: int = 0
    elements: int = 0
    differing: int = 0


@dataclass
class VerifyReport(Report):
    place: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return sum(row.elements for row in self.rows)

    @property
    def exit_code(self) -> int:
        return 1 if self.failures or not self.elements else 0

    def render(self) -> Iterable[RenderableType]:
        table = Table(title="Kernel against bitsandbytes, bit for bit")
        for heading in ("cases of", "output", "cases", "elements", "differing"):
            table.add_column(heading, justify="left" if heading in ("cases of", "output") else "right")
        for row in self.rows:
            counts = (f"{row.cases:,}", f"{row.elements:,}", f"{row.differing:,}")
            table.add_row(row.family, row.dtype, *counts, style="red" if row.differing else None)
        yield table
        yield provenance(self.place)
        yield from self.notes
        yield from self.failures[:SHOWN]
        if len(self.failures) > SHOWN:
            yield f"... and {len(self.failures) - SHOWN} more"
        cases = plural(sum(row.cases for row in self.rows), "case")
        if not self.elements:
            yield "Nothing was compared."
        elif self.failures:
            yield f"NOT the same bits: {len(self.failures):,} of {cases} failed."
        else:
            yield f"The same bits: {cases}, {plural(self.elements, 'element')}, none differs."


def verify(
    weights: Path | None = None,
    serve: Serve | None = None,
    tell: Tell = silent,
    arch: tuple[int, int] | None = None,
) -> VerifyReport:
    """Compare the kernel with bitsandbytes, on made weights or on those of a checkpoint.

    Args:
        weights: a .safetensors file with bitsandbytes 4-bit weights.
        serve: what is compared, by default ``nf4_patch.dequantize_nf4``.
        arch: compare the code that a GPU of this older capability would run, with its launch configuration.

    Raises:
        BadCheckpoint: ``weights`` cannot be read, or holds no 4-bit weight.
        portable.CannotRun: that code does not run on this machine.
    """
    use_interpreter_without_gpu()
    from ..nf4.dequantize import compilation

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    report = VerifyReport(place_of(device))
    if arch is not None:
        from .sass import portable

        portable.check(arch, device)
        serve = portable.dequantizer(arch)
        report.notes.append(
            f"Compared is the code of sm_{arch[0]}{arch[1]}: its PTX and its launch configuration, translated for this "
            "GPU by the driver."
        )
    if not on_gpu:
        if not compilation.INTERPRETED:
            report.failures.append("no GPU, and the kernels were imported before the interpreter could be chosen")
            return report
        report.notes.append(
            "No GPU here: the plain twin of the kernel ran under Triton's interpreter, against bitsandbytes' CPU "
            "library; signs of FP4's zeros are not compared (the CPU library's differ from the CUDA library's). "
            "Of the six shapes every combination ran two, to keep it short: each blocksize met each shape."
        )
    serve = serve or nf4_patch.dequantize_nf4
    with unpatched():
        compare_all(report, list_cases(weights, device), serve, tell)
    return report


class Weight(NamedTuple):
    """A weight to compare, made when its turn comes."""

    family: str
    dtype: str
    name: str
    make: Callable[[], tuple[torch.Tensor, Any]]


class BadCheckpoint(ValueError):
    """A file that cannot be read as a checkpoint with 4-bit weights; the message says why."""


def list_cases(weights: Path | None, device: torch.device) -> list[Weight]:
    if weights is not None:
        found = list(checkpoint(weights, device))
        if not found:
            raise BadCheckpoint(f"{weights} holds no 4-bit weight of bitsandbytes: nothing can be compared")
        return found

    def made(case: Case, seed: int) -> Weight:
        return Weight(case.family, name_of(case.dtype), str(case), lambda: make(case, device, seed))

    return [made(case, seed) for seed, case in enumerate(cases(thin=device.type == "cpu"))]


def checkpoint(path: Path, device: torch.device) -> Iterator[Weight]:
    """The 4-bit weights of a checkpoint that transformers or bitsandbytes saved.

    Raises:
        BadCheckpoint: the file cannot be read; from ``make``, a weight cannot be.
    """
    from bitsandbytes.functional import QuantState
    from safetensors import SafetensorError, safe_open

    # What QuantState.from_dict raises for keys and values that are not those of a quant_state.
    DAMAGED = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, AssertionError)
    try:
        file = safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} cannot be read as safetensors: {error}") from error
    keys = sorted(file.keys())

    def read(prefix: str, fields: list[str]) -> tuple[torch.Tensor, Any]:
        try:
            state = QuantState.from_dict({key[len(prefix) + 1 :]: file.get_tensor(key) for key in fields}, device)
            if state.shape is None:
                raise ValueError("its quant_state has no shape")
            return file.get_tensor(prefix), state
        except DAMAGED as error:
            raise BadCheckpoint(f"damaged in the checkpoint: {type(error).__name__}: {error}") from error

    for key in keys:
        prefix, found, _ = key.partition(".quant_state.bitsandbytes__")
        if found:
            fields = [k for k in keys if k.startswith(prefix + ".")]
            yield Weight("weights of the checkpoint", "its own", prefix, lambda p=prefix, f=fields: read(p, f))  # type: ignore[misc]


def compare_all(report: VerifyReport, weights: list[Weight], serve: Serve, tell: Tell) -> None:
    rows: dict[tuple[str, str], Row] = {}
    for done, weight in enumerate(weights):
        tell(f"verify: {weight.family}", done, len(weights))
        row = rows.setdefault((weight.family, weight.dtype), Row(weight.family, weight.dtype))
        row.cases += 1
        try:
            packed, state = weight.make()
        except BadCheckpoint as error:
            report.failures.append(f"{weight.name}: {error}")
            continue
        row.elements += state.shape.numel()
        count, sentence = compare(packed, state, serve)
        row.differing += count
        if sentence:
            report.failures.append(f"{weight.name}: {sentence}")
    report.rows = list(rows.values())


def compare(packed: torch.Tensor, state: Any, serve: Serve) -> tuple[int, str]:
    """How many elements differ, and a sentence on the first; (0, "") where none does."""
    out = torch.full(tuple(state.shape), float("nan"), dtype=state.dtype, device=packed.device)
    try:  # before bitsandbytes, which would read past the end of a damaged weight
        got = serve(packed, state, out)
    except (ValueError, RuntimeError) as error:  # a failure here: every case is one for the kernel
        return out.numel(), f"refused: {error}"
    want = ask_bitsandbytes(packed, state)
    if got.shape != want.shape or got.dtype is not want.dtype:
        return want.numel(), f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    where = differing(got, want, zeros_alike=state.quant_type == "fp4" and not packed.is_cuda)
    if not where.numel():
        return 0, ""
    first = int(where[0])
    a, b = float(got.reshape(-1)[first]), float(want.reshape(-1)[first])
    return (
        where.numel(),
        f"{where.numel()} of {want.numel()} elements differ, first [{first}]: {a!r}, bitsandbytes {b!r}",
    )


def use_interpreter_without_gpu() -> None:
    """Import the kernels under Triton's interpreter where there is no GPU, if nobody has imported them yet.

    Only them: the variable is put back, so that Inductor and Unsloth define theirs as usual; Triton itself is
    imported before (its gluon asserts that all of Triton was imported alike).
    """
    if torch.cuda.is_available() or "nf4_patch.nf4.dequantize.kernels" in sys.modules:
        return
    import triton  # noqa: F401

    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from ..nf4.dequantize import kernels  # noqa: F401
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """bitsandbytes as it is, also where NF4_PATCH=1 patches it on import: nothing is compared with itself."""
    import bitsandbytes.functional  # noqa: F401

    before = nf4_patch.is_enabled()
    nf4_patch.disable()
    try:
        yield
    finally:
        if before:
            nf4_patch.enable()


def place_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU (Triton's interpreter)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
