"""Counts from the machine code of the dequantization kernel, for a GPU that need not be here."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import machine_code
import torch
from machine_code import Capability, Code
from rich import box
from rich.console import RenderableType
from rich.table import Table

from nf4_patch.nf4.dequantize import compilation
from nf4_patch.nf4.dequantize.compilation import Variant
from nf4_patch.tools.report import Progress, Report, right_aligned, silent

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OURS, BITSANDBYTES = "nf4_patch", "bitsandbytes"
# bitsandbytes' kernels by the C++ type that they write: the weight, 16 elements per thread, and the absmax, 8 blocks per thread.
MANGLED = {torch.float16: "6__half", torch.bfloat16: "13__nv_bfloat16", torch.float32: "f"}
WEIGHT, ABSMAX = "kDequantizeBlockwiseI{}Li512ELi64ELi8ELi2E", "kDequantizeBlockwiseIfLi512ELi64ELi8ELi0E"


@dataclass(frozen=True)
class KernelRow:
    """One dequantization of a nested weight, blocksize 64."""

    arch: str
    dtype: str
    kernel: str
    instructions: float  # per element
    registers: int  # per thread
    spills: int  # bytes per thread in local memory


@dataclass(frozen=True)
class InstructionsReport(Report):
    triton: str
    kernels: list[KernelRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def render(self) -> Iterable[RenderableType]:
        table = Table(
            "GPU", "output", "kernel", *right_aligned("instructions per element", "registers", "bytes spilled"),
            title=f"Machine code of a dequantization (blocksize 64, nested), Triton {self.triton}",
            title_justify="left", box=box.SIMPLE_HEAD,
        )  # fmt: skip
        for row in self.kernels:
            counts = f"{row.instructions:.2f}", str(row.registers), str(row.spills)
            table.add_row(row.arch, row.dtype, row.kernel, *counts)
        yield table
        yield from self.notes


def ours(capability: Capability, dtype: torch.dtype) -> KernelRow:
    variant = Variant(compilation.warps_for(capability, 2**26), dtype)
    code = machine_code.code_of(variant, capability)
    elements = compilation.elems_per_thread(variant) * compilation.UNROLL
    return row_of(capability, dtype, OURS, code, len(code.instructions) / elements)


def theirs(capability: Capability, dtype: torch.dtype) -> KernelRow | None:
    """bitsandbytes' two kernels, counted together; None where its library holds no code for the capability.

    Its third launch, torch's addition of the offset, is not counted.
    """
    weight, absmax = (library_code(capability, name) for name in (WEIGHT.format(MANGLED[dtype]), ABSMAX))
    if weight is None or absmax is None:
        return None
    an_element = len(weight.instructions) / 16 + len(absmax.instructions) / (8 * 64)
    return row_of(capability, dtype, BITSANDBYTES, weight, an_element)


def row_of(capability: Capability, dtype: torch.dtype, kernel: str, code: Code, instructions: float) -> KernelRow:
    arch = machine_code.arch_of(capability)
    return KernelRow(arch, str(dtype).removeprefix("torch."), kernel, instructions, code.registers, code.stack)


def libraries() -> list[Path]:
    """bitsandbytes' CUDA libraries, that of torch's CUDA first, then the newest."""
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        return []
    own = f"cuda{(torch.version.cuda or '').replace('.', '')}.so"
    files = Path(spec.origin).parent.glob("libbitsandbytes_cuda*.so")
    return sorted(files, key=lambda file: (file.name.endswith(own), file.name), reverse=True)


@functools.cache
def library_code(capability: Capability, pattern: str) -> Code | None:
    arch = machine_code.arch_of(capability)
    for library in libraries():
        if f".{arch}." not in machine_code.run(machine_code.tool("cuobjdump"), "-lelf", str(library), check=False):
            continue
        names = machine_code.functions(library, arch)
        name = next((name for name in names if re.search(pattern, name)), None)
        if name is not None:
            return machine_code.disassemble_file(library, "-arch", arch, "-fun", name)[name]
    return None


def count(capabilities: Iterable[Capability], tell: Progress = silent) -> InstructionsReport:
    """Compile for each capability, and count.

    Raises:
        machine_code.Unsupported: the installed Triton cannot compile for one of them.
    """
    import triton

    report = InstructionsReport(triton.__version__)
    for capability in capabilities:
        machine_code.check(capability)
        tell(f"compiling for {machine_code.arch_of(capability)}")
        for dtype in DTYPES:
            rows = ours(capability, dtype), theirs(capability, dtype)
            report.kernels.extend(filter(None, rows))
        if None in rows:
            report.notes.append(f"No machine code of bitsandbytes for {machine_code.arch_of(capability)} is installed.")
    return report
