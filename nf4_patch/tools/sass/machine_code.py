"""What the compiler makes of a kernel, on a machine that need not have a GPU.

Triton compiles for any capability, and its wheel carries ptxas and the disassembler. Counts are static: the
instructions of a kernel that runs from its first line to its last, as the dequantization of whole groups does (there is
no loop in it).
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ...nf4.dequantize import compilation
from ...nf4.dequantize.compilation import Variant
from ...nf4.matmul import small_m

Capability = tuple[int, int]

# By capability the first Triton whose ptxas and LLVM know it; 3.2 is the lowest that is supported.
FIRST_TRITON: dict[Capability, tuple[int, int]] = {
    (7, 5): (3, 2), (8, 0): (3, 2), (8, 6): (3, 2), (8, 9): (3, 2), (9, 0): (3, 2), (10, 0): (3, 3), (12, 0): (3, 3),
}  # fmt: skip
CAPABILITIES = tuple(FIRST_TRITON)


class Instruction(NamedTuple):
    predicate: str  # "@!P0", or ""
    opcode: str  # with its modifiers: "LDG.E.EF.SYS"
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])


class Code(NamedTuple):
    """The machine code of one kernel."""

    instructions: tuple[Instruction, ...]  # to where the last lane leaves, without the padding behind it
    registers: int  # a lane
    stack: int  # bytes a lane: spills and local arrays
    shared: int  # bytes a CTA
    ptx: str  # "" where there is none

    def count(self, *names: str) -> int:
        return sum(instruction.name in names for instruction in self.instructions)


class Unsupported(RuntimeError):
    """The installed Triton cannot compile for this capability, or the kernel knows no such one."""


def tool(name: str) -> str:
    """Path of nvdisasm, cuobjdump or ptxas in the installed Triton's wheel."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def triton_release() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def source(variant: Variant, capability: Capability) -> Any:
    """The kernel of ``variant`` as Triton's compiler takes it, specialized as a launch would specialize it."""
    from triton.compiler import ASTSource

    kernel = compilation.kernels.dequantize_kernel
    values = compilation.constants(variant, capability)
    signature = compilation.signature(variant)
    names = list(kernel.arg_names)
    divisible = [names.index(name) for name in compilation.on_16_bytes(variant)]
    if triton_release() >= (3, 3):
        signature.update(dict.fromkeys(values, "constexpr"))
        attributes: Any = {(index,): [["tt.divisibility", 16]] for index in divisible}
        return ASTSource(kernel, signature, {(names.index(k),): v for k, v in values.items()}, attributes)
    from triton.backends.compiler import AttrsDescriptor

    attributes = AttrsDescriptor.from_dict(
        {"arg_properties": {"tt.divisibility": divisible, "tt.equal_to": []}, "cls": "AttrsDescriptor"}
    )
    return ASTSource(kernel, signature, values, attributes)


def compile_variant(variant: Variant, capability: Capability) -> Any:
    """Triton's CompiledKernel of ``variant`` for ``capability``; ``asm`` holds its "ptx" and "cubin".

    Raises:
        Unsupported: the installed Triton does not know the capability, or the interpreter replaces the compiler.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if compilation.INTERPRETED:
        raise Unsupported("Triton's interpreter is on (TRITON_INTERPRET=1): unset it and start again")
    check(capability)
    options = {"num_warps": variant.config.num_warps, "enable_fp_fusion": False}
    return triton.compile(source(variant, capability), target=GPUTarget("cuda", sm(capability), 32), options=options)


POINTERS = ("x", "packed", "absmax", "code", "absmax2", "code2", "offset", "out", "bias")
NUMBERS = ("m", "n", "blocks", "shift", "shift2", "shares", "slices")


def compile_fused_matmul(ptx_source: str, warps: int, capability: Capability) -> Any:
    """Triton's CompiledKernel of a fused matmul's PTX source."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ...nf4.matmul import kernels as matmul_kernels

    signature = dict.fromkeys(POINTERS, "*u8") | dict.fromkeys(NUMBERS, "i32")
    values = small_m.constants(ptx_source)
    if triton_release() >= (3, 3):
        signature |= dict.fromkeys(values, "constexpr")
    source = ASTSource(matmul_kernels.matmul_4bit_kernel, signature, values)
    options = {"num_warps": warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", sm(capability), 32), options=options)


@functools.lru_cache(maxsize=512)
def fused_matmul_code(ptx_source: str, warps: int, capability: Capability) -> Code:
    (code,) = disassemble(compile_fused_matmul(ptx_source, warps, capability).asm["cubin"]).values()
    return code


def check(capability: Capability) -> None:
    """Raises Unsupported unless the kernel has a launch for the capability and the installed Triton compiles for it."""
    if capability not in FIRST_TRITON:
        raise Unsupported(f"{arch_of(capability)} is not supported; use one of {', '.join(map(arch_of, CAPABILITIES))}")
    if not is_supported(capability):
        first = ".".join(map(str, FIRST_TRITON[capability]))
        raise Unsupported(
            f"{arch_of(capability)} needs Triton {first}, installed is {'.'.join(map(str, triton_release()))}"
        )


def is_supported(capability: Capability) -> bool:
    """Whether the installed Triton compiles for it."""
    return capability in FIRST_TRITON and triton_release() >= FIRST_TRITON[capability]


def sm(capability: Capability) -> int:
    return 10 * capability[0] + capability[1]


def arch_of(capability: Capability) -> str:
    return f"sm_{sm(capability)}"


@functools.lru_cache(maxsize=512)
def code_of(variant: Variant, capability: Capability) -> Code:
    compiled = compile_variant(variant, capability)
    (code,) = disassemble(compiled.asm["cubin"]).values()
    return code._replace(ptx=compiled.asm["ptx"])


INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
RESOURCES = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def disassemble(cubin: bytes) -> dict[str, Code]:
    """The machine code of every kernel in a cubin, by its (mangled) name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return disassemble_file(file)


def disassemble_file(file: Path, *options: str) -> dict[str, Code]:
    """As :func:`disassemble`, for a cubin or a library; ``options`` of cuobjdump choose "-arch" and "-fun"."""
    text = run(tool("cuobjdump"), "-sass", *options, str(file))
    resources = functions(file, *options[1:2])
    listings = re.split(r"^\s*Function : (\S+)\s*$", text, flags=re.MULTILINE)[1:]
    result = {}
    for name, listing in zip(listings[::2], listings[1::2], strict=True):
        found = [
            Instruction((predicate or "").strip(), opcode, operands.strip())
            for predicate, opcode, operands in INSTRUCTION.findall(listing)
        ]
        last = max(index for index, instruction in enumerate(found) if instruction.name == "EXIT")
        if found[last].predicate:  # the others go on, back to the head of a loop
            last = next(i for i in range(last, len(found)) if found[i].opcode == "BRA" and not found[i].predicate)
        result[name] = Code(tuple(found[: last + 1]), *resources[name], ptx="")
    return result


def functions(file: Path, arch: str | None = None) -> dict[str, tuple[int, int, int]]:
    """Registers, bytes of stack and bytes of shared memory of each kernel in a cubin or library."""
    text = run(tool("cuobjdump"), "-res-usage", *(("-arch", arch) if arch else ()), str(file))
    return {
        name: (int(registers), int(stack) + int(local), int(shared))
        for name, registers, stack, shared, local in RESOURCES.findall(text)
    }


def run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


REGISTER = re.compile(r"\bR(\d+)\b")


def dependent_loads(code: Code) -> list[int]:
    """Positions of the loads whose address comes from a byte that another load fetched: code2[absmax], the second trip to memory."""
    tainted: set[str] = set()
    found = []
    for position, instruction in enumerate(code.instructions):
        registers = REGISTER.findall(instruction.operands)
        target, sources = registers[:1], registers[1:]
        if instruction.name == "LDG":
            if tainted.intersection(sources):
                found.append(position)
            byte = "U8" in instruction.modifiers and not tainted.intersection(sources)
            (tainted.update if byte else tainted.difference_update)(target)
        elif instruction.name not in ("STG", "STS"):  # computed: the result depends on every source
            (tainted.update if tainted.intersection(sources) else tainted.difference_update)(target)
        if "WIDE" in instruction.modifiers and target:  # the high half of an address never decides
            tainted.discard(str(int(target[0]) + 1))
    return found
