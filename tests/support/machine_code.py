"""Compile a kernel to machine code and count its instructions, on a machine that need not have a GPU.

Triton compiles for any capability, and its wheel contains ptxas and the disassembler. Instructions are counted without
running, which suffices because the dequantization of whole groups has no loop.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nf4_patch.nf4.dequantize import compilation
from nf4_patch.nf4.dequantize.compilation import Variant
from nf4_patch.nf4.runtime import TRITON_RELEASE
from nf4_patch.tools.report import NotAvailable

Capability = tuple[int, int]

# By capability the first Triton whose ptxas and LLVM know it; 3.2 is the lowest that is supported.
FIRST_TRITON: dict[Capability, tuple[int, int]] = {
    (7, 5): (3, 2), (8, 0): (3, 2), (8, 6): (3, 2), (8, 9): (3, 2), (9, 0): (3, 2), (10, 0): (3, 3), (12, 0): (3, 3),
}  # fmt: skip
CAPABILITIES = tuple(FIRST_TRITON)
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}


class Instruction(NamedTuple):
    predicate: str  # "@!P0", or ""
    opcode: str  # with its modifiers: "LDG.E.EF.SYS"

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


class Code(NamedTuple):
    """The machine code of one kernel."""

    instructions: tuple[Instruction, ...]  # to where the last lane leaves, without the padding behind it
    registers: int  # a lane
    stack: int  # bytes a lane: spills and local arrays
    shared: int  # bytes a CTA
    ptx: str  # "" where there is none


class Unsupported(NotAvailable):
    """Code for this capability cannot be compiled, or cannot run, on this machine."""


def tool(name: str) -> str:
    """Return the path of nvdisasm, cuobjdump or ptxas in the installed Triton's wheel."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def source(variant: Variant, capability: Capability) -> Any:
    """Return the source of ``variant`` for Triton's compiler, specialized as a launch specializes the kernel."""
    from triton.compiler import ASTSource

    kernel = compilation.kernels.dequantize_kernel
    values = compilation.constants(variant, capability)
    absmax = "*fp32" if variant.offset_dtype is None else "*u8"
    offset, out = POINTERS[variant.offset_dtype or torch.float32], POINTERS[variant.dtype]
    types = ("*u8", absmax, "*fp32", "*fp32", "*fp32", offset, out, "i64" if variant.wide else "i32")
    names = list(kernel.arg_names)
    signature = dict(zip(names, types, strict=False))
    divisible = [names.index(name) for name in (("packed", "out") if variant.aligned else ("out",))]
    if TRITON_RELEASE >= (3, 3):
        signature.update(dict.fromkeys(values, "constexpr"))
        attributes: Any = {(index,): [["tt.divisibility", 16]] for index in divisible}
        return ASTSource(kernel, signature, {(names.index(k),): v for k, v in values.items()}, attributes)
    from triton.backends.compiler import AttrsDescriptor

    attributes = AttrsDescriptor.from_dict(
        {"arg_properties": {"tt.divisibility": divisible, "tt.equal_to": []}, "cls": "AttrsDescriptor"}
    )
    return ASTSource(kernel, signature, values, attributes)


def compile_variant(variant: Variant, capability: Capability) -> Any:
    """Return Triton's CompiledKernel of ``variant`` for ``capability``. Its ``asm`` holds "ptx" and "cubin".

    Raises:
        Unsupported: the installed Triton does not know the capability.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    check(capability)
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": False}
    return triton.compile(source(variant, capability), target=GPUTarget("cuda", sm(capability), 32), options=options)


def check(capability: Capability) -> None:
    """Raise Unsupported unless the kernel has a launch for the capability and the installed Triton compiles for it."""
    if capability not in FIRST_TRITON:
        raise Unsupported(f"{arch_of(capability)} is not supported; use one of {', '.join(map(arch_of, CAPABILITIES))}")
    if FIRST_TRITON[capability] > TRITON_RELEASE:
        first, here = (".".join(map(str, release)) for release in (FIRST_TRITON[capability], TRITON_RELEASE))
        raise Unsupported(f"{arch_of(capability)} needs Triton {first}, installed is {here}")


def sm(capability: Capability) -> int:
    return 10 * capability[0] + capability[1]


def arch_of(capability: Capability) -> str:
    return f"sm_{sm(capability)}"


def capability_of(arch: str) -> Capability:
    """Return the capability, such as (7, 5), that "sm_75", "75" or "7.5" names.

    Raises:
        Unsupported: the text names no capability.
    """
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", arch)
    if not found:
        raise Unsupported(f"{arch!r} is not an architecture; write it as sm_75, 75 or 7.5")
    return int(found[1]), int(found[2])


@functools.lru_cache(maxsize=512)
def code_of(variant: Variant, capability: Capability) -> Code:
    compiled = compile_variant(variant, capability)
    return disassemble(compiled.asm["cubin"])._replace(ptx=compiled.asm["ptx"])


INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*;", re.MULTILINE)
RESOURCES = re.compile(r"Function \S+?:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def disassemble(cubin: bytes) -> Code:
    """Return the machine code of a cubin with one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        text, usage = (run(tool("cuobjdump"), what, str(file)) for what in ("-sass", "-res-usage"))
    (resources,) = RESOURCES.findall(usage)
    registers, stack, shared, local = map(int, resources)
    found = [Instruction((predicate or "").strip(), *rest) for predicate, *rest in INSTRUCTION.findall(text)]
    last = max(index for index, instruction in enumerate(found) if instruction.name == "EXIT")
    if found[last].predicate:  # the others go on, back to the head of a loop
        last = next(i for i in range(last, len(found)) if found[i].opcode == "BRA" and not found[i].predicate)
    return Code(tuple(found[: last + 1]), registers, stack + local, shared, ptx="")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
