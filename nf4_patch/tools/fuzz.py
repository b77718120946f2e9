"""Random states against bitsandbytes, bit for bit, and malformed ones that must be refused by name.

Every tensor lies in the middle of a larger buffer: what is read outside it is a pattern that shows in the
result, what is written outside it is seen in the buffer of ``out``. A case is made from its number and the
seed alone, so that a failure can be repeated by itself.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.console import RenderableType
from rich.table import Table

from ..nf4.dequantize import reference
from ..nf4.layout import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES, Layout
from .report import Report, Tell, plural, provenance, silent
from .verify import ask_bitsandbytes, place_of, unpatched, use_interpreter_without_gpu

PADDING, CANARY = 256, 0xA5  # bytes before and after every tensor; as fp32 -2.9e-16, as an absmax byte 165
SPECIAL = (0.0, -0.0, 1e-45, 1e-39, 2e-38, 6e-8, 65504.0, 7e4, 3e38, math.inf, -math.inf, math.nan)
SPECIAL_ON_CPU = tuple(x for x in SPECIAL if x == 0 or not abs(x) < 1e-7)  # its bf16 convert drops subnormals
LARGEST = {"cuda": 1 << 19, "cpu": 1 << 13}  # elements of an ordinary case
PROGRAM = {"cuda": 1 << 14, "cpu": 1 << 12}  # whole programs of every kernel: no masks


class Case(NamedTuple):
    """One state to make, and what is asked of it."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int
    nested: bool
    quant_type: str
    storage: torch.dtype
    offset_dtype: torch.dtype
    transposed: bool
    start: int  # bytes from a 256-byte boundary to the packed weight
    special: bool  # zeros, subnormals, infinities and NaN among the scales
    into: str  # "new", "out" (with canaries) or "shared"
    fault: str  # "" or a name of FAULTS

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def layout(self) -> tuple[Any, ...]:
        """What makes a layout, without sizes."""
        kinds = (len(self.shape), self.dtype, self.blocksize, self.nested, self.quant_type, self.storage)
        return (*kinds, self.offset_dtype, self.transposed, self.start % 16, self.special, self.into)


def draw(seed: int, number: int, device: str, blocksizes: Sequence[int] = BLOCKSIZES) -> Case:
    """Case ``number`` of ``seed``: weighted toward what models have, with everything else in it."""
    rng = random.Random(f"{seed} {number}")
    rank = rng.choices((1, 2, 3, 4), (2, 6, 2, 1))[0]
    if rng.random() < 0.3:
        shape = [rng.choice((1, 2, 3)) * PROGRAM[device] // 64, *[1] * (rank - 1)]
        shape[-1] *= 64
    else:
        largest = LARGEST[device] if rng.random() < 0.2 else 4096
        shape = [max(1, int(largest ** (rng.random() / rank))) for _ in range(rank)]
    if rank > 2 and math.prod(shape) <= 8:
        shape[-1] *= 16  # one element of packed weight reads as transposed, and t() ends at rank 2
    n = math.prod(shape)
    nested = rng.random() < 0.7
    blocksize = rng.choice(blocksizes)
    packed_bytes = -(-n // 2)
    storage = rng.choice(STORAGE_DTYPES) if rng.random() < 0.2 else torch.uint8
    if packed_bytes % storage.itemsize:
        storage = torch.uint8
    aligned = rng.choices((0, 4 * rng.randrange(1, 16), rng.randrange(64)), (7, 2, 1))[0]
    return Case(
        number=number,
        shape=tuple(shape),
        dtype=rng.choice(OUTPUT_DTYPES),
        blocksize=blocksize,
        nested=nested,
        quant_type=rng.choice(("nf4", "nf4", "fp4")),
        storage=storage,
        # a kernel is compiled for each: the rare ones at one blocksize only
        offset_dtype=rng.choice(OFFSET_DTYPES) if nested and blocksize == 64 else torch.float32,
        transposed=rank <= 2 and rng.random() < 0.3,
        start=aligned - aligned % storage.itemsize,
        special=rng.random() < 0.2,
        into=rng.choices(("new", "out", "shared"), (2, 5, 2))[0],
        fault=rng.choice(list(FAULTS)) if rng.random() < 0.25 else "",
    )


def bytes_in(count: int, device: torch.device, start: int = 0, fill: int = CANARY) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of canaries and the ``count`` bytes of it that begin ``start`` bytes past a boundary."""
    buffer = torch.full((count + 2 * PADDING + start,), CANARY, dtype=torch.uint8, device=device)
    view = buffer[PADDING + start : PADDING + start + count]
    if fill != CANARY:
        view.fill_(fill)
    return buffer, view


def placed(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """A copy of ``tensor`` in the middle of a buffer of canaries."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    _, view = bytes_in(raw.numel(), tensor.device, start)
    return view.copy_(raw).view(tensor.dtype).view(tensor.shape)


def make(case: Case, seed: int, device: torch.device) -> tuple[torch.Tensor, Any]:
    """The packed weight and QuantState of a case: every byte random."""
    from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type

    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + case.number)

    def uniform(count: int) -> torch.Tensor:
        values = torch.rand(count, generator=generator, device=device) + 0.01
        if case.special:
            special = torch.tensor(SPECIAL if device.type == "cuda" else SPECIAL_ON_CPU, device=device)
            which = torch.randint(2 * special.numel(), (count,), generator=generator, device=device)
            values = torch.where(which < special.numel(), special[which % special.numel()], values)
        return placed(values)

    def random_bytes(count: int, start: int = 0) -> torch.Tensor:
        return placed(torch.randint(256, (count,), generator=generator, device=device, dtype=torch.uint8), start)

    blocks = -(-case.numel // case.blocksize)
    packed = random_bytes(-(-case.numel // 2), case.start).view(case.storage).view(-1, 1)
    state2 = offset = None
    if case.nested:
        absmax = random_bytes(blocks)
        code2 = placed(create_dynamic_map().to(device))
        state2 = QuantState(uniform(-(-blocks // 256)), code=code2, blocksize=256, dtype=torch.float32)
        offset = placed(torch.tensor([0.0371], device=device, dtype=case.offset_dtype)).view(())
    else:
        absmax = uniform(blocks)
    code = get_4bit_type(case.quant_type, device=device)
    state = QuantState(
        absmax, torch.Size(case.shape), code, case.blocksize, case.quant_type, case.dtype, offset, state2
    )
    return (packed.t() if case.transposed else packed), state


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that say something: a dimension of one element has any."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit on the GPU, NaN where the other is NaN; on the CPU FP4's zeros have other signs."""
    if got.shape != want.shape or got.dtype is not want.dtype or strides(got) != strides(want):
        return False
    if got.is_cuda:
        integers = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
        equal = got.view(integers) == want.view(integers)
    else:
        equal = got == want
    return bool((equal | (got.isnan() & want.isnan())).all())


# A fault takes (packed, state) and returns them broken, or None where the case has no such field.
Fault = Callable[[torch.Tensor, Any], Any]


def _set(name: str, change: Callable[[Any], Any], second: bool = False) -> Fault:
    def fault(packed: torch.Tensor, state: Any) -> Any:
        holder = state.state2 if second else state
        if holder is None or getattr(holder, name) is None:
            return None
        setattr(holder, name, change(getattr(holder, name)))
        return packed, state

    return fault


def _say(name: str, value: Any, nested: bool = False) -> Fault:
    def fault(packed: torch.Tensor, state: Any) -> Any:
        if nested and state.state2 is None:
            return None
        setattr(state, name, value)
        return packed, state

    return fault


def _packed(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    return lambda packed, state: (change(packed), state)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.stack((tensor.reshape(-1), tensor.reshape(-1)), 1)
    return wide[:, 0] if tensor.dim() == 1 else wide[:, :1]


def _other_width(absmax: torch.Tensor) -> torch.Tensor:
    return absmax.to(torch.float16)


# Each with the Reasons it may end in; None: the original never looks at it, so the kernel's bits must be the original's.
FAULTS: dict[str, tuple[Fault, tuple[str | None, ...]]] = {
    "absmax one short": (_set("absmax", lambda t: t[:-1]), ("SIZE_MISMATCH",)),
    "absmax one long": (_set("absmax", lambda t: torch.cat((t, t[:1]))), ("SIZE_MISMATCH",)),
    "absmax of another dtype": (_set("absmax", _other_width), ("STATE_FIELDS",)),
    "absmax on meta": (_set("absmax", lambda t: t.to("meta")), ("MIXED_DEVICES",)),
    "absmax fake": (_set("absmax", _fake), ("TENSOR_SUBCLASS",)),
    "absmax freed": (_set("absmax", _freed), ("NO_STORAGE",)),
    "absmax not contiguous": (_set("absmax", _strided), ("NOT_CONTIGUOUS", None)),  # None: a single block
    "absmax None": (_set("absmax", lambda t: None), ("STATE_FIELDS",)),
    "absmax2 short": (_set("absmax", lambda t: t[:-1], True), ("SIZE_MISMATCH",)),
    "absmax2 half": (_set("absmax", lambda t: t.half(), True), ("STATE_FIELDS",)),
    "absmax2 freed": (_set("absmax", _freed, True), ("NO_STORAGE",)),
    "code2 short": (_set("code", lambda t: t[:255].clone(), True), ("SIZE_MISMATCH",)),
    "offset of two": (_set("offset", lambda t: torch.stack((t, t))), ("SIZE_MISMATCH",)),
    "offset a number": (_set("offset", float), ("STATE_FIELDS",)),
    "offset on meta": (_set("offset", lambda t: t.to("meta")), ("MIXED_DEVICES",)),
    "code short": (_set("code", lambda t: t[:15]), (None,)),
    "code of zeros": (_set("code", torch.zeros_like), (None,)),
    "code in bf16": (_set("code", lambda t: t.bfloat16()), (None,)),
    "code None": (_set("code", lambda t: None), (None,)),
    "packed one short": (_packed(lambda t: t.reshape(-1)[:-1].reshape(-1, 1)), ("SIZE_MISMATCH",)),
    "packed twice": (_packed(lambda t: torch.cat((t.reshape(-1), t.reshape(-1))).view(-1, 1)), ("SIZE_MISMATCH",)),
    "packed int8": (_packed(lambda t: t.contiguous().view(torch.uint8).view(torch.int8)), ("STORAGE_DTYPE",)),
    "packed on meta": (_packed(lambda t: t.to("meta")), ("NOT_CUDA", "MIXED_DEVICES")),
    "packed fake": (_packed(_fake), ("TENSOR_SUBCLASS",)),
    "packed freed": (_packed(_freed), ("NO_STORAGE",)),
    "packed not contiguous": (_packed(lambda t: _strided(t.reshape(-1, 1))), ("NOT_CONTIGUOUS", None)),
    "packed of no dimension": (_packed(lambda t: t.reshape(-1)[0]), ("STATE_FIELDS", "INTERNAL_ERROR")),  # the latter: a remembered byte
    "shape times four": (_set("shape", lambda s: torch.Size((4 * s[0], *s[1:]))), ("SIZE_MISMATCH",)),
    "shape empty": (_set("shape", lambda s: torch.Size((0,))), ("SIZE_MISMATCH",)),
    "shape None": (_set("shape", lambda s: None), ("SIZE_MISMATCH",)),
    "blocksize 96": (_set("blocksize", lambda b: 96), ("BLOCKSIZE",)),
    "blocksize 0": (_set("blocksize", lambda b: 0), ("BLOCKSIZE",)),
    "blocksize2 3": (_set("blocksize", lambda b: 3, True), ("BLOCKSIZE",)),
    "dtype float64": (_set("dtype", lambda d: torch.float64), ("OUTPUT_DTYPE",)),
    "dtype None": (_set("dtype", lambda d: None), ("OUTPUT_DTYPE",)),
    "quant_type int8": (_set("quant_type", lambda q: "int8"), ("QUANT_TYPE",)),
    # Flags that contradict the tensors are looked at when a weight is first seen; after that its tensors decide.
    "CPU packing": (_say("packing_format_for_cpu", True), ("CPU_PACKING", None)),
    "nested but said flat": (_say("nested", False, nested=True), ("STATE_FIELDS", None)),
    "state a list": (lambda packed, state: (packed, [state.absmax, state.shape]), ("NOT_4BIT",)),
}  # fmt: skip


@dataclass
class FuzzReport(Report):
    place: str
    seed: int
    cases: int = 0
    elements: int = 0
    hits: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)  # well-formed states, by reason
    layouts: set[tuple[Any, ...]] = field(default_factory=set)
    faults: Counter[str] = field(default_factory=Counter)  # malformed states, "fault: reason"
    mismatches: list[str] = field(default_factory=list)
    out_of_bounds: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.mismatches or self.out_of_bounds or not self.hits else 0

    def as_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("place", "seed", "cases", "elements", "hits")}
        counts = {"layouts": len(self.layouts), "fallbacks": dict(self.fallbacks), "faults": dict(self.faults)}
        failures = {"mismatches": self.mismatches, "out_of_bounds": self.out_of_bounds}
        return {**plain, **counts, **failures, "exit_code": self.exit_code}

    def render(self) -> Iterable[RenderableType]:
        table = Table(title=f"Malformed states, seed {self.seed}")
        table.add_column("fault: ended in")
        table.add_column("cases", justify="right")
        for name, count in sorted(self.faults.items()):
            table.add_row(name, str(count))
        yield table
        yield provenance(self.place)
        fallbacks = ", ".join(f"{name} {n:,}" for name, n in self.fallbacks.items()) or "none"
        yield (
            f"{plural(self.cases, 'case')} of seed {self.seed}, {plural(len(self.layouts), 'layout')}, "
            f"{plural(self.elements, 'element')}: "
            f"{self.hits:,} in the kernel, fallbacks of well-formed states: {fallbacks}; "
            f"{sum(self.faults.values()):,} malformed"
        )
        yield f"mismatches: {len(self.mismatches)}, out of bounds: {len(self.out_of_bounds)}"
        yield from self.mismatches[:20]
        yield from self.out_of_bounds[:20]


class Fuzzer:
    """Runs cases and keeps the report. One Dequantizer for all: remembered launches meet reused addresses."""

    def __init__(
        self, seed: int, device: torch.device, blocksizes: Sequence[int] = BLOCKSIZES, oracle: str = "bitsandbytes"
    ):
        from ..patching.dequantizer import Dequantizer  # imports the kernels: after use_interpreter_without_gpu

        self.seed, self.device, self.blocksizes, self.oracle = seed, device, tuple(blocksizes), oracle
        self.dequantizer = Dequantizer("nf4_patch.tools.fuzz")
        self.report = FuzzReport(place_of(device), seed)

    def run(self, number: int) -> None:
        """Case ``number``: the well-formed state always, then the same state broken where the case says so."""
        case = draw(self.seed, number, self.device.type, self.blocksizes)
        report = self.report
        packed, state = make(case, self.seed, self.device)
        want = self.original(case, packed, state)
        report.cases += 1
        report.elements += case.numel
        report.layouts.add(case.layout())
        if case.fault and number % 2:  # half the faults meet a launch that is not remembered
            return self.broken(case, packed, state, want)
        result = self.served(case, packed, state, want)
        if isinstance(result, torch.Tensor):
            report.hits += 1
        else:
            report.fallbacks[result.name] += 1
            if result.name != "MISALIGNED" or case.start % 4 == 0:
                report.mismatches.append(f"a well-formed state fell back ({result.name}): {case}")
        if case.fault:
            self.broken(case, packed, state, want)

    def original(self, case: Case, packed: torch.Tensor, state: Any) -> torch.Tensor:
        if self.oracle == "formula":
            from ..patching.quant_state import fields_of

            return reference.dequantize(Layout(packed, *fields_of(state)))
        if case.storage is not torch.uint8 and not packed.is_cuda:  # the CPU library takes bytes only
            packed = packed.view(torch.uint8)
        return ask_bitsandbytes(packed.clone(), state)

    def served(self, case: Case, packed: torch.Tensor, state: Any, want: torch.Tensor) -> Any:
        """The result, compared, or the Reason why not"""
        before = packed.clone()
        out = buffer = None
        if case.into == "out":
            n = case.numel * case.dtype.itemsize
            buffer, raw = bytes_in(n, self.device, fill=0xFF)  # NaN in every dtype
            out = raw.view(case.dtype).view(case.shape)
        result = self.dequantizer.run(packed, state, out, shared=case.into == "shared")
        if not isinstance(result, torch.Tensor):
            return result
        if not same(result, want):
            self.report.mismatches.append(str(case))
        if buffer is not None:
            edges = torch.cat((buffer[:PADDING], buffer[PADDING + n :]))
            if not bool((edges == CANARY).all()):
                self.report.out_of_bounds.append(f"wrote outside out: {case}")
        if not torch.equal(before.view(torch.uint8), packed.contiguous().view(torch.uint8)):
            self.report.out_of_bounds.append(f"wrote into the packed weight: {case}")
        return result

    def broken(self, case: Case, packed: torch.Tensor, state: Any, want: torch.Tensor) -> None:
        """The original is not asked: it may read outside its buffers, which is what the refusal prevents here."""
        fault, allowed = FAULTS[case.fault]
        if case.fault.endswith("freed") and not packed.is_cuda:
            return  # the interpreter reads host memory, and the guard is where the launch is resolved
        changed = fault(packed, state)
        if changed is None:
            return
        try:
            result = self.dequantizer.run(*changed)
        except Exception as error:  # as the replacements do: the original would run
            result = self.dequantizer.failed(error)
        if isinstance(result, torch.Tensor):
            ended, fine = "the original's bits", None in allowed and same(result, want)
        else:
            ended, misaligned = result.name, case.start % 4 != 0
            fine = ended in allowed or (ended == "MISALIGNED" and misaligned)
        self.report.faults[f"{case.fault}: {ended}"] += 1
        if not fine:
            self.report.mismatches.append(f"{case.fault} ended in {ended}: {case}")


def fuzz(
    cases: int,
    seed: int = 0,
    device: torch.device | None = None,
    blocksizes: Sequence[int] = BLOCKSIZES,
    tell: Tell = silent,
    oracle: str = "bitsandbytes",
) -> FuzzReport:
    """Run ``cases`` cases of ``seed`` on the GPU, or under Triton's interpreter where there is none.

    Args:
        blocksizes: drawn from; fewer mean fewer kernels to compile.
        oracle: "bitsandbytes", or "formula" for compute-sanitizer: bitsandbytes' CUDA kernel (0.50.2) itself reads
            past the end of absmax when the last block is partial.
    """
    use_interpreter_without_gpu()
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    fuzzer = Fuzzer(seed, device, blocksizes, oracle)
    with unpatched():
        for number in range(cases):
            if number % 64 == 0:
                tell("fuzz", number, cases)
            fuzzer.run(number)
    return fuzzer.report
