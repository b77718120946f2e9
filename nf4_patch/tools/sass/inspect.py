"""The machine code of the kernel for a GPU that need not be here, and what time it could take there at best.

Everything is counted from the code that ptxas made, and everything about time is a model: two bounds from data
sheets. It is checked where it can be, by ``--check`` on a GPU of the table.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import RenderableType
from rich.table import Table

from ...nf4.dequantize import launch
from ...nf4.dequantize.launch import Variant
from ..bench.shapes import CHALLENGE
from ..report import Report, Tell, silent
from . import machine_code
from .machine_code import Code, Instruction
from .portable import capability_of

MODELLED = "modelled, not measured"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OURS, BITSANDBYTES = "nf4_patch", "bitsandbytes"


class Sm(NamedTuple):
    """One streaming multiprocessor: results a cycle of each pipe, and what fits on it.

    CUDA C++ Programming Guide, "Arithmetic Instructions" and "Technical Specifications per Compute Capability";
    Turing's load/store unit takes 16 addresses and moves 64 bytes a cycle (arXiv 1903.07486), Hopper's twice that.
    """

    alu: int
    fma: int
    convert: int
    shuffle: int
    addresses: int
    bytes: int
    tensor: int  # multiply-adds of 16-bit floats, from the data sheet
    warps: int
    programs: int
    issue: int = 4
    registers: int = 65536
    shared: int = 65536


SMS = {
    (7, 5): Sm(alu=64, fma=64, convert=16, shuffle=32, addresses=16, bytes=64, tensor=512, warps=32, programs=16),
    (8, 0): Sm(alu=64, fma=64, convert=16, shuffle=32, addresses=32, bytes=128, tensor=1024, warps=64, programs=32,
               shared=167936),
    (9, 0): Sm(alu=64, fma=128, convert=64, shuffle=32, addresses=32, bytes=128, tensor=2048, warps=64, programs=32,
               shared=233472),
}  # fmt: skip


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    sms: int
    clocks: tuple[float, ...]  # GHz: highest, throttled
    bandwidths: tuple[int, ...]  # GB/s: what a copy kernel reaches, low and high, and the data sheet's peak


GPUS = (
    # 320 GB/s peak; copies reach 240 to 250. A T4 under load falls from 1.59 GHz toward 0.9 (70 W).
    Gpu("Tesla T4", (7, 5), 40, (1.59, 0.9), (240, 250, 320)),
    # One H200, same traffic without a decode: 3880 GB/s at 148 MB, 4060 at 591 MB.
    Gpu("NVIDIA H200", (9, 0), 132, (1.98,), (3880, 4060, 4800)),
)

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "2": 8, "4": 16}  # bytes a lane; LDSM.2 and .4
MMAS = {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16}  # multiply-adds of a warp


class Launch(NamedTuple):
    """One kernel of a dequantization."""

    name: str
    code: Code
    warps: int  # a program
    elements: float  # of the weight, a lane

    def occupancy(self, sm: Sm) -> float:
        """Warps that fit on an SM, of those it can hold."""
        per_warp = -(-max(self.code.registers, 1) * 32 // 256) * 256
        programs = min(sm.programs, sm.warps // self.warps, sm.registers // (per_warp * self.warps))
        if self.code.shared:
            programs = min(programs, sm.shared // self.code.shared)
        return programs * self.warps / sm.warps


def cycles(instruction: Instruction, sm: Sm) -> tuple[str, float]:
    """The pipe that an instruction of a warp keeps busy on an SM, and for how many cycles."""
    pipe = instruction.pipe
    if instruction.name == "SHFL":
        return "load/store", 32 / sm.shuffle
    if pipe in ("memory", "shared"):
        width = next((WIDTHS[modifier] for modifier in instruction.modifiers if modifier in WIDTHS), 4)
        return "load/store", max(32 / sm.addresses, 32 * width / sm.bytes)
    if instruction.name == "HMMA":
        return "tensor", MMAS[instruction.modifiers[0]] / sm.tensor
    if pipe in ("alu", "fma", "convert"):
        return pipe, 32 / getattr(sm, pipe)
    return "issue", 0.0


def pipe_cycles(launches: Iterable[Launch], sm: Sm) -> dict[str, float]:
    """Cycles that an element of the weight keeps each pipe of one SM busy."""
    total: dict[str, float] = {}
    for launch_ in launches:
        for instruction in launch_.code.instructions:
            for pipe, taken in (cycles(instruction, sm), ("issue", 1 / sm.issue)):
                total[pipe] = total.get(pipe, 0.0) + taken / (32 * launch_.elements)
    return total


def variant_of(capability: tuple[int, int], dtype: torch.dtype, blocksize: int = 64, numel: int = 2**26) -> Variant:
    """The usual weight: nested, whole programs, aligned."""
    return Variant(
        config=launch.config_for(capability, numel), dtype=dtype, offset_dtype=torch.float32, blocksize=blocksize,
        blocksize2=256, even=True, tail=False, wide=False, aligned=True,
    )  # fmt: skip


def ours(capability: tuple[int, int], dtype: torch.dtype) -> list[Launch]:
    variant = variant_of(capability, dtype)
    elements = launch.group_of(variant) * variant.config.steps
    return [Launch(OURS, machine_code.code_of(variant, capability), variant.config.num_warps, elements)]


MANGLED = {torch.float16: "6__half", torch.bfloat16: "13__nv_bfloat16", torch.float32: "f"}


def theirs(capability: tuple[int, int], dtype: torch.dtype) -> list[Launch]:
    """bitsandbytes' two kernels: absmax to fp32, then the weight. (Its third launch, torch's addition, is not counted.)

    Empty where bitsandbytes is not installed or its library holds no code for the capability.
    """
    found = []
    for name, mangled, kind, per_lane in ((BITSANDBYTES, MANGLED[dtype], 2, 16), ("its absmax", "f", 0, 8 * 64)):
        code = library_code(capability, rf"kDequantizeBlockwiseI{mangled}Li512ELi64ELi8ELi{kind}E")
        if code is None:
            return []
        found.append(Launch(name, code, 2, per_lane))
    return found


def libraries() -> list[Path]:
    """bitsandbytes' CUDA libraries, that of torch's CUDA first, then the newest."""
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        return []
    own = f"cuda{(torch.version.cuda or '').replace('.', '')}.so"
    files = Path(spec.origin).parent.glob("libbitsandbytes_cuda*.so")
    return sorted(files, key=lambda file: (file.name.endswith(own), file.name), reverse=True)


@functools.cache
def library_code(capability: tuple[int, int], pattern: str) -> Code | None:
    arch = f"sm_{machine_code.sm(capability)}"
    for library in libraries():
        if f".{arch}." not in machine_code.run(machine_code.tool("cuobjdump"), "-lelf", str(library), check=False):
            continue
        names = machine_code.functions(library, arch)
        name = next((name for name in names if re.search(pattern, name)), None)
        if name is not None:
            return machine_code.disassemble_file(library, "-arch", arch, "-fun", name)[name]
    return None


@dataclass
class KernelRow:
    capability: tuple[int, int]
    dtype: str
    who: str
    registers: int
    occupancy: float | None
    per_element: float
    by_pipe: dict[str, float]


@dataclass
class RoofRow:
    """The challenge's time on a GPU between two bounds: memory and pipes fully overlapped, or one after the other."""

    gpu: str
    who: str
    clock: float
    bandwidth: int
    memory: float  # seconds for the traffic
    pipe: str  # the busiest
    busy: float  # seconds it is busy
    best: float
    worst: float

    @property
    def binds(self) -> str:
        return "memory" if self.memory >= self.busy else self.pipe


@dataclass
class CheckRow:
    """One weight on this GPU: the bounds, and what was measured."""

    weight: str
    who: str
    best: float  # microseconds
    worst: float
    measured: float
    same_bits: bool

    @property
    def between(self) -> float:
        """0 where memory and pipes overlapped fully, 1 where one waited for the other."""
        return (self.measured - self.best) / (self.worst - self.best)


@dataclass
class ProductRow:
    """A fused product of m rows of X in fp16 with an [n, k] weight, by one kernel; microseconds."""

    gpu: str
    who: str
    clock: float
    bandwidth: int
    n: int
    k: int
    m: int
    memory: float
    pipe: str  # the busiest
    busy: float

    @property
    def best(self) -> float:
        return max(self.memory, self.busy)

    @property
    def worst(self) -> float:
        return self.memory + self.busy


@dataclass
class InspectReport(Report):
    triton: str
    kernels: list[KernelRow] = field(default_factory=list)
    products: list[ProductRow] = field(default_factory=list)
    roofs: list[RoofRow] = field(default_factory=list)
    checks: list[CheckRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 0 if self.kernels and all(row.same_bits for row in self.checks) else 1

    def render(self) -> Iterable[RenderableType]:
        yield self._kernels()
        if self.roofs:
            yield self._roofs()
            yield from self.speedups()
        if self.products:
            yield self._products()
        if self.checks:
            yield self._checks()
        yield from self.notes

    def _kernels(self) -> Table:
        title = f"Instructions an element (blocksize 64, nested), Triton {self.triton}: counted in the machine code"
        table = Table(title=title)
        pipes = machine_code.PIPE_NAMES[:-2]
        for heading in ("GPU", "output", "kernel", "registers", "warps", "in all", *pipes, "other"):
            left = heading in ("GPU", "output", "kernel")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        for row in self.kernels:
            others = sum(row.by_pipe[pipe] for pipe in machine_code.PIPE_NAMES[-2:])
            counts = [f"{taken:.2f}" for taken in (*(row.by_pipe[pipe] for pipe in pipes), others)]
            occupancy = "" if row.occupancy is None else f"{row.occupancy:.0%}"
            name = f"sm_{machine_code.sm(row.capability)}"
            table.add_row(name, row.dtype, row.who, str(row.registers), occupancy, f"{row.per_element:.2f}", *counts)
        return table

    def _roofs(self) -> Table:
        table = Table(title=f"The challenge's {challenge_bytes() / 1e9:.1f} GB ({MODELLED})")
        for heading in (
            "GPU",
            "clock",
            "bandwidth",
            "kernel",
            "memory",
            "busiest pipe",
            "overlapped",
            "in turns",
            "binds",
        ):
            table.add_column(heading, justify="left" if heading in ("GPU", "kernel", "binds") else "right")
        for row in self.roofs:
            table.add_row(
                row.gpu, f"{row.clock} GHz", f"{row.bandwidth} GB/s", row.who, f"{row.memory:.2f} s",
                f"{row.pipe} {row.busy:.2f} s", f"{row.best:.2f} s", f"{row.worst:.2f} s", row.binds,
            )  # fmt: skip
        return table

    def speedups(self) -> Iterable[str]:
        """bitsandbytes' time over ours, by each bound."""
        points: dict[tuple[str, float, int], dict[str, RoofRow]] = {}
        for row in self.roofs:
            points.setdefault((row.gpu, row.clock, row.bandwidth), {})[row.who] = row
        for (gpu, clock, bandwidth), rows in points.items():
            if len(rows) == 2:
                us, them = rows[OURS], rows[BITSANDBYTES]
                yield (
                    f"{gpu}, {clock} GHz, {bandwidth} GB/s: bitsandbytes takes {them.best / us.best:.2f} (overlapped) "
                    f"to {them.worst / us.best:.2f} times (its pipes and memory in turns, ours overlapped); {MODELLED}"
                )

    def _products(self) -> Table:
        table = Table(title=f"Products of few rows in fp16, microseconds: overlapped / in turns ({MODELLED})")
        for heading in ("GPU", "weight", "rows", "clock", "memory", OURS, BITSANDBYTES, "theirs over ours"):
            table.add_column(heading, justify="left" if heading in ("GPU", "weight") else "right")
        for us, them in itertools.pairwise(self.products):
            if (us.who, them.who) == (OURS, BITSANDBYTES):
                bounds = (f"{one.best:.0f} / {one.worst:.0f}" for one in (us, them))
                ratio = f"{them.best / us.best:.2f} / {them.worst / us.worst:.2f}"
                weight, clock, memory = f"{us.n}x{us.k}", f"{us.clock} GHz", f"{us.memory:.0f}"
                table.add_row(us.gpu, weight, str(us.m), clock, memory, *bounds, ratio)
        return table

    def _checks(self) -> Table:
        table = Table(title="The model against this GPU (measured by graph replay past the L2)")
        for heading in ("weight", "kernel", "overlapped", "in turns", "measured", "over the first", "between", "bits"):
            table.add_column(heading, justify="left" if heading in ("weight", "kernel", "bits") else "right")
        for row in self.checks:
            measured = (f"{row.measured:.1f} us", f"{row.measured / row.best - 1:+.0%}", f"{row.between:.0%}")
            if not row.same_bits:
                measured = ("", "", "")
            bits = "same" if row.same_bits else "DIFFER"
            table.add_row(row.weight, row.who, f"{row.best:.1f} us", f"{row.worst:.1f} us", *measured, bits)
        return table


def nbytes(elements: int, dtype: torch.dtype) -> float:
    """Bytes a dequantization must move: packed, absmax and second-level absmax in, the weight out."""
    return elements * (0.5 + 1 / 64 + 4 / 64 / 256 + dtype.itemsize)


def challenge_elements() -> dict[torch.dtype, int]:
    """Elements that the challenge dequantizes in each dtype: three weights of each configuration, 1000 times."""
    total: dict[torch.dtype, int] = {}
    for hidden, intermediate, _, dtype, *_ in CHALLENGE:
        total[dtype] = total.get(dtype, 0) + 3 * 1000 * hidden * intermediate
    return total


def challenge_bytes() -> float:
    return sum(nbytes(elements, dtype) for dtype, elements in challenge_elements().items())


Launches = dict[tuple[str, torch.dtype], list[Launch]]


def roof(gpu: Gpu, who: str, launches: Launches, elements: dict[torch.dtype, int], clock: float, speed: int) -> RoofRow:
    """Bounds in seconds. What bitsandbytes writes and reads again between its launches is taken to stay in the L2."""
    memory = best = worst = 0.0
    busy: dict[str, float] = {}
    for dtype, count in elements.items():
        moving = nbytes(count, dtype) / (speed * 1e9)
        pipes = {
            pipe: count * taken / (gpu.sms * clock * 1e9)
            for pipe, taken in pipe_cycles(launches[who, dtype], SMS[gpu.capability]).items()
        }
        memory += moving
        best += max(moving, *pipes.values())
        worst += moving + max(pipes.values())
        for pipe, taken in pipes.items():
            busy[pipe] = busy.get(pipe, 0.0) + taken
    pipe = max(busy, key=lambda name: busy[name])
    return RoofRow(gpu.name, who, clock, speed, memory, pipe, busy[pipe], best, worst)


def inspect(
    capabilities: Iterable[tuple[int, int]], check: bool = False, tell: Tell = silent, matmul: bool = False
) -> InspectReport:
    """Compile, count and model for each capability; ``check`` measures on the current GPU too, ``matmul`` models products.

    Raises:
        machine_code.Unsupported: the installed Triton cannot compile for one of them.
    """
    import triton

    report = InspectReport(triton.__version__)
    chosen = list(capabilities)
    launches: dict[tuple[int, int], Launches] = {}
    for done, capability in enumerate(chosen):
        tell(f"compiling for sm_{machine_code.sm(capability)}", done, len(chosen))
        counted: Launches = {}
        for dtype in DTYPES:
            for who, make in ((OURS, ours), (BITSANDBYTES, theirs)):
                counted[who, dtype] = make(capability, dtype)
                if counted[who, dtype]:
                    report.kernels.append(kernel_row(capability, dtype, counted[who, dtype]))
        launches[capability] = counted
        if not counted[BITSANDBYTES, torch.float16]:
            report.notes.append(
                f"No machine code of bitsandbytes for sm_{machine_code.sm(capability)} is installed: not compared there."
            )
    for gpu in GPUS:
        for clock in gpu.clocks if gpu.capability in launches else ():
            for speed in gpu.bandwidths:
                for who in (OURS, BITSANDBYTES):
                    if launches[gpu.capability][who, torch.float16]:
                        elements = challenge_elements()
                        report.roofs.append(roof(gpu, who, launches[gpu.capability], elements, clock, speed))
    if report.roofs:
        report.notes.append(
            f"Bounds, {MODELLED}: no launch gaps, no host, no waiting for memory. 'overlapped' is the slower of memory "
            "and the busiest pipe, 'in turns' their sum; a kernel of one phase comes near the first, one that stages "
            "through shared memory lies between the two."
        )
    if matmul:
        from . import product_roof

        report.products = [row for gpu in GPUS if gpu.capability in launches for row in product_roof.model(gpu, tell)]
    if check:
        check_here(report, launches, tell)
    return report


def kernel_row(capability: tuple[int, int], dtype: torch.dtype, launches: list[Launch]) -> KernelRow:
    """The counts of all launches of a dequantization; registers and occupancy of the one that writes the weight."""
    main = launches[0]
    by_pipe = {
        pipe: sum(one.code.by_pipe()[pipe] / one.elements for one in launches) for pipe in machine_code.PIPE_NAMES
    }
    sm = SMS.get(capability)
    return KernelRow(
        capability, str(dtype).removeprefix("torch."), main.name, main.code.registers,
        None if sm is None else main.occupancy(sm), sum(by_pipe.values()), by_pipe,
    )  # fmt: skip


def check_here(report: InspectReport, launches: dict[tuple[int, int], Launches], tell: Tell) -> None:
    """Measure the challenge's largest weight here, if this GPU is in the table, and put it beside the bounds."""
    from ..bench import dequantize as dequantization
    from ..bench import peers, timing

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    gpu = next((gpu for gpu in GPUS if name.startswith(gpu.name)), None)
    if gpu is None or gpu.capability not in launches:
        known = ", ".join(gpu.name for gpu in GPUS if gpu.capability in launches)
        report.notes.append(f"The model was not checked: here is {name}, not one of {known or 'those inspected'}.")
        return
    shape = (4096, 14336)
    for dtype in (torch.float16, torch.bfloat16):
        tell(f"measuring {dequantization.name_of(shape, dtype)}")
        dequantize: dict[str, Any] = {
            OURS: None,
            BITSANDBYTES: peers.peers(with_unsloth=False)[BITSANDBYTES].dequantize,
        }
        import nf4_patch

        dequantize[OURS] = nf4_patch.dequantize_nf4
        weights = dequantization.quantized(shape, dtype, timing.rotation(dequantization.traffic(shape, 2)))
        outs = [torch.empty(shape, dtype=dtype, device="cuda") for _ in weights]
        same = dequantization.agree(weights, {BITSANDBYTES: peers.Peer(BITSANDBYTES, dequantize[BITSANDBYTES])}, outs)
        times = timing.gpu_times(
            {
                who: [functools.partial(function, p, s, out=out) for (p, s), out in zip(weights, outs, strict=True)]
                for who, function in dequantize.items()
            }
        )
        elements = {dtype: shape[0] * shape[1]}
        for who in (OURS, BITSANDBYTES):
            if launches[gpu.capability][who, dtype]:
                bounds = roof(gpu, who, launches[gpu.capability], elements, gpu.clocks[0], gpu.bandwidths[0])
                weight = dequantization.name_of(shape, dtype)
                best, worst = bounds.best * 1e6, bounds.worst * 1e6
                report.checks.append(CheckRow(weight, who, best, worst, times[who].median, same[BITSANDBYTES]))
    report.notes.append(f"Measured on {timing.machine()}")


@click.command()
@click.option("--arch", "archs", multiple=True, metavar="SM", help="sm_75, 8.0, ...; again for more (default: sm_75).")
@click.option("--all", "everything", is_flag=True, help="Every architecture that the installed Triton compiles for.")
@click.option("--check", is_flag=True, help="Measure on this GPU, if the model knows it, and compare.")
@click.option("--matmul", is_flag=True, help="Model the fused products that are offered to calibrate, too.")
@click.pass_obj
def command(tell: Tell, archs: tuple[str, ...], everything: bool, check: bool, matmul: bool) -> InspectReport:
    """Count the kernel's machine code for a GPU that need not be here, and model its time there."""
    try:
        if everything:
            capabilities = [c for c in machine_code.CAPABILITIES if machine_code.is_supported(c)]
        else:
            capabilities = [capability_of(arch) for arch in archs] or [(7, 5)]
        if check and torch.cuda.is_available():
            here = torch.cuda.get_device_capability()
            capabilities += [here] if here not in capabilities else []
        return inspect(capabilities, check, tell, matmul)
    except (ValueError, machine_code.Unsupported) as error:
        raise click.ClickException(str(error)) from error
