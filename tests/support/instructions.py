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
import triton
from machine_code import Capability, Code

from nf4_patch.nf4.dequantize import compilation
from nf4_patch.nf4.dequantize.compilation import Variant
from nf4_patch.tools.report import Progress, Report, silent

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

    def render(self) -> Iterable[str]:
        yield f"Machine code of a dequantization (blocksize 64, nested), Triton {self.triton}"
        for row in self.kernels:
            kernel = f"{row.arch:7} {row.dtype:9} {row.kernel:13}"
            yield f"{kernel} {row.instructions:6.2f} instructions per element, {row.registers} registers, {row.spills} bytes spilled"
        yield from self.notes


def rows_of(capability: Capability, dtype: torch.dtype) -> list[KernelRow]:
    """Ours; and bitsandbytes', where its library holds code for the capability.

    Its two kernels are counted together, its third launch, torch's addition of the offset, is not.
    """
    variant = Variant(compilation.warps_for(capability, 2**26), dtype)
    code = machine_code.code_of(variant, capability)
    elements = compilation.elems_per_thread(variant) * compilation.UNROLL
    found = [("nf4_patch", code, len(code.instructions) / elements)]
    weight, absmax = (library_code(capability, name) for name in (WEIGHT.format(MANGLED[dtype]), ABSMAX))
    if weight and absmax:
        found.append(("bitsandbytes", weight, len(weight.instructions) / 16 + len(absmax.instructions) / (8 * 64)))
    arch, name = machine_code.arch_of(capability), str(dtype).removeprefix("torch.")
    return [KernelRow(arch, name, kernel, count, code.registers, code.stack) for kernel, code, count in found]


@functools.cache
def library_code(capability: Capability, pattern: str) -> Code | None:
    """From bitsandbytes' CUDA libraries: that of torch's CUDA first, then the newest."""
    arch, spec = machine_code.arch_of(capability), importlib.util.find_spec("bitsandbytes")
    files = Path(spec.origin).parent.glob("libbitsandbytes_cuda*.so") if spec and spec.origin else ()
    own = f"cuda{(torch.version.cuda or '').replace('.', '')}.so"
    for library in sorted(files, key=lambda file: (file.name.endswith(own), file.name), reverse=True):
        if f".{arch}." in machine_code.run(machine_code.tool("cuobjdump"), "-lelf", str(library), check=False):
            for name in filter(re.compile(pattern).search, machine_code.functions(library, arch)):
                return machine_code.disassemble_file(library, "-arch", arch, "-fun", name)[name]
    return None


def count(capabilities: Iterable[Capability], tell: Progress = silent) -> InstructionsReport:
    """Compile for each capability, and count.

    Raises:
        machine_code.Unsupported: the installed Triton cannot compile for one of them.
    """
    report = InstructionsReport(triton.__version__)
    for capability in capabilities:
        machine_code.check(capability)
        arch = machine_code.arch_of(capability)
        tell(f"compiling for {arch}")
        rows = [row for dtype in MANGLED for row in rows_of(capability, dtype)]
        report.kernels.extend(rows)
        if len(rows) < 2 * len(MANGLED):
            report.notes.append(f"No machine code of bitsandbytes for {arch} is installed.")
    return report
