"""Random states against bitsandbytes, bit for bit, and malformed ones, each of which must end in a named Reason.

Every tensor lies inside a larger buffer of canaries: a read outside shows in the result, a write in the buffer of ``out``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from ..nf4.dequantize import reference
from ..nf4.layout import BLOCKSIZES, Layout
from . import cases
from .cases import Case
from .report import Progress, Report, plural, provenance, right_aligned, silent


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


# Fault: the field that is changed ("packed" and "state" are the arguments themselves), how, and the Reasons it may end
# in; None: the original never looks at it, so the kernel's bits must be the original's.
FAULTS: dict[str, tuple[str, Callable[[Any], Any], tuple[str | None, ...]]] = {
    "absmax one short": ("absmax", lambda t: t[:-1], ("SIZE_MISMATCH",)),
    "absmax one long": ("absmax", lambda t: torch.cat((t, t[:1])), ("SIZE_MISMATCH",)),
    "absmax of another dtype": ("absmax", lambda t: t.half(), ("STATE_FIELDS",)),
    "absmax on meta": ("absmax", lambda t: t.to("meta"), ("MIXED_DEVICES",)),
    "absmax fake": ("absmax", _fake, ("TENSOR_SUBCLASS",)),
    "absmax freed": ("absmax", _freed, ("NO_STORAGE",)),
    "absmax not contiguous": ("absmax", _strided, ("NOT_CONTIGUOUS", None)),  # None: a single block
    "absmax None": ("absmax", lambda t: None, ("STATE_FIELDS",)),
    "absmax2 short": ("state2.absmax", lambda t: t[:-1], ("SIZE_MISMATCH",)),
    "absmax2 half": ("state2.absmax", lambda t: t.half(), ("STATE_FIELDS",)),
    "absmax2 freed": ("state2.absmax", _freed, ("NO_STORAGE",)),
    "code2 short": ("state2.code", lambda t: t[:255].clone(), ("SIZE_MISMATCH",)),
    "offset of two": ("offset", lambda t: torch.stack((t, t)), ("SIZE_MISMATCH",)),
    "offset a number": ("offset", float, ("STATE_FIELDS",)),
    "offset on meta": ("offset", lambda t: t.to("meta"), ("MIXED_DEVICES",)),
    "code short": ("code", lambda t: t[:15], (None,)),
    "code of zeros": ("code", torch.zeros_like, (None,)),
    "code in bf16": ("code", lambda t: t.bfloat16(), (None,)),
    "code None": ("code", lambda t: None, (None,)),
    "packed one short": ("packed", lambda t: t.reshape(-1)[:-1].reshape(-1, 1), ("SIZE_MISMATCH",)),
    "packed twice": ("packed", lambda t: torch.cat((t.reshape(-1), t.reshape(-1))).view(-1, 1), ("SIZE_MISMATCH",)),
    "packed int8": ("packed", lambda t: t.contiguous().view(torch.uint8).view(torch.int8), ("STORAGE_DTYPE",)),
    "packed on meta": ("packed", lambda t: t.to("meta"), ("NOT_CUDA", "MIXED_DEVICES")),
    "packed fake": ("packed", _fake, ("TENSOR_SUBCLASS",)),
    "packed freed": ("packed", _freed, ("NO_STORAGE",)),
    "packed not contiguous": ("packed", lambda t: _strided(t.reshape(-1, 1)), ("NOT_CONTIGUOUS", None)),
    # INTERNAL_ERROR: a remembered byte
    "packed of no dimension": ("packed", lambda t: t.reshape(-1)[0], ("STATE_FIELDS", "INTERNAL_ERROR")),
    "shape times four": ("shape", lambda s: torch.Size((4 * s[0], *s[1:])), ("SIZE_MISMATCH",)),
    "shape empty": ("shape", lambda s: torch.Size((0,)), ("SIZE_MISMATCH",)),
    "shape None": ("shape", lambda s: None, ("SIZE_MISMATCH",)),
    "blocksize 96": ("blocksize", lambda b: 96, ("BLOCKSIZE",)),
    "blocksize 0": ("blocksize", lambda b: 0, ("BLOCKSIZE",)),
    "blocksize2 3": ("state2.blocksize", lambda b: 3, ("BLOCKSIZE",)),
    "dtype float64": ("dtype", lambda d: torch.float64, ("OUTPUT_DTYPE",)),
    "dtype None": ("dtype", lambda d: None, ("OUTPUT_DTYPE",)),
    "quant_type int8": ("quant_type", lambda q: "int8", ("QUANT_TYPE",)),
    # Flags that contradict the tensors are looked at when a weight is first seen; after that its tensors decide.
    "CPU packing": ("packing_format_for_cpu", lambda flag: True, ("CPU_PACKING", None)),
    "nested but said flat": ("nested", lambda nested: False, ("STATE_FIELDS", None)),
    "state a list": ("state", lambda state: [state.absmax, state.shape], ("NOT_4BIT",)),
}


def broken(fault: str, packed: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any] | None:
    """The arguments with their fault; None where the case has no such field. The state itself is changed."""
    path, change, _ = FAULTS[fault]
    if path in ("packed", "state"):
        return (change(packed), state) if path == "packed" else (packed, change(state))
    outer, _, name = path.rpartition(".")
    holder = state.state2 if outer else state
    value = getattr(holder, name, False if name == "packing_format_for_cpu" else None)
    if value is None or (name == "nested" and not value):
        return None
    setattr(holder, name, change(value))
    return packed, state


@dataclass
class FuzzReport(Report):
    place: str
    seed: int
    cases: int = 0
    elements: int = 0
    hits: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)  # well-formed states, by reason
    layouts: set[Case] = field(default_factory=set)
    faults: Counter[str] = field(default_factory=Counter)  # malformed states, "fault: reason"
    mismatches: list[str] = field(default_factory=list)
    out_of_bounds: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.mismatches or self.out_of_bounds or not self.hits else 0

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "layouts": len(self.layouts), "exit_code": self.exit_code}

    def render(self) -> Iterable[RenderableType]:
        table = Table("fault: ended in", *right_aligned("cases"), title=f"Malformed states, seed {self.seed}")
        for name, count in sorted(self.faults.items()):
            table.add_row(name, str(count))
        yield table
        yield provenance(self.place)
        fallbacks = ", ".join(f"{name} {n:,}" for name, n in self.fallbacks.items()) or "none"
        of = [plural(len(self.layouts), "layout"), plural(self.elements, "element")]
        yield (
            f"{plural(self.cases, 'case')} of seed {self.seed}, {', '.join(of)}: {self.hits:,} in the kernel, "
            f"fallbacks of well-formed states: {fallbacks}; {sum(self.faults.values()):,} malformed"
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
        self.report = FuzzReport(cases.place_of(device), seed)

    def run(self, number: int) -> None:
        """Case ``number``: the well-formed state always, then the same state broken where the case says so."""
        case = cases.draw(self.seed, number, self.device.type, self.blocksizes, list(FAULTS))
        report = self.report
        packed, state = cases.random_state(case, self.seed, self.device)
        want = self.original(case, packed, state)
        report.cases += 1
        report.elements += case.numel
        report.layouts.add(case.layout())
        if case.fault and number % 2:  # half the faults meet a launch that is not remembered
            return self.run_broken(case, packed, state, want)
        result = self.run_kernel(case, packed, state, want)
        if isinstance(result, torch.Tensor):
            report.hits += 1
        else:
            report.fallbacks[result.name] += 1
            if result.name != "MISALIGNED" or case.start % 4 == 0:
                report.mismatches.append(f"a well-formed state fell back ({result.name}): {case!r}")
        if case.fault:
            self.run_broken(case, packed, state, want)

    def original(self, case: Case, packed: torch.Tensor, state: Any) -> torch.Tensor:
        if self.oracle == "formula":
            from ..patching.quant_state import fields_of

            return reference.dequantize(Layout(packed, *fields_of(state)))
        if case.storage is not torch.uint8 and not packed.is_cuda:  # the CPU library takes bytes only
            packed = packed.view(torch.uint8)
        return cases.ask_bitsandbytes(packed.clone(), state)

    def run_kernel(self, case: Case, packed: torch.Tensor, state: Any, want: torch.Tensor) -> Any:
        """The result, compared, or the Reason why not"""
        before = packed.clone()
        out = buffer = None
        if case.into == "out":
            n = case.numel * case.dtype.itemsize
            buffer, raw = cases.bytes_in(n, self.device, fill=0xFF)  # NaN in every dtype
            out = raw.view(case.dtype).view(case.shape)
        result = self.dequantizer.run(packed, state, out, shared=case.into == "shared")
        if not isinstance(result, torch.Tensor):
            return result
        if not cases.same(result, want):
            self.report.mismatches.append(repr(case))
        if buffer is not None:
            edges = torch.cat((buffer[: cases.PADDING], buffer[cases.PADDING + n :]))
            if not bool((edges == cases.CANARY).all()):
                self.report.out_of_bounds.append(f"wrote outside out: {case!r}")
        if not torch.equal(before.view(torch.uint8), packed.contiguous().view(torch.uint8)):
            self.report.out_of_bounds.append(f"wrote into the packed weight: {case!r}")
        return result

    def run_broken(self, case: Case, packed: torch.Tensor, state: Any, want: torch.Tensor) -> None:
        """The original is not asked: it may read outside its buffers."""
        if case.fault.endswith("freed") and not packed.is_cuda:
            return  # the interpreter reads host memory, and the guard is where the launch is resolved
        changed = broken(case.fault, packed, state)
        if changed is None:
            return
        allowed = FAULTS[case.fault][2]
        try:
            result = self.dequantizer.run(*changed)
        except Exception as error:  # as the replacements do: the original would run
            result = self.dequantizer.failed(error)
        if isinstance(result, torch.Tensor):
            ended, fine = "the original's bits", None in allowed and cases.same(result, want)
        else:
            ended, misaligned = result.name, case.start % 4 != 0
            fine = ended in allowed or (ended == "MISALIGNED" and misaligned)
        self.report.faults[f"{case.fault}: {ended}"] += 1
        if not fine:
            self.report.mismatches.append(f"{case.fault} ended in {ended}: {case!r}")


def fuzz(
    count: int,
    seed: int = 0,
    blocksizes: Sequence[int] = BLOCKSIZES,
    tell: Progress = silent,
    oracle: str = "bitsandbytes",
) -> FuzzReport:
    """Run ``count`` cases of ``seed`` on the GPU, or under Triton's interpreter where there is none.

    Args:
        blocksizes: drawn from; fewer mean fewer kernels to compile.
        oracle: "bitsandbytes", or "formula" for compute-sanitizer: bitsandbytes' CUDA kernel (0.50.2) itself reads
            past the end of absmax when the last block is partial.
    """
    cases.use_interpreter_without_gpu()
    fuzzer = Fuzzer(seed, cases.device_here(), blocksizes, oracle)
    with cases.unpatched():
        for number in range(count):
            if number % 64 == 0:
                tell("fuzz", number, count)
            fuzzer.run(number)
    return fuzzer.report
