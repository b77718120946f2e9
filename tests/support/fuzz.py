"""Random states are compared with bitsandbytes bit for bit. Malformed states must end in a named Reason.

Every tensor lies inside a larger buffer of canaries. A read outside the tensor shows in the result, and a write outside
``out`` shows in the buffer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import expected, layout_of

from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.runtime import equal_bits
from nf4_patch.nf4.weight import BLOCKSIZES, OFFSET_DTYPES, OUTPUT_DTYPES, STORAGE_DTYPES
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools import cases
from nf4_patch.tools.patch import patch
from nf4_patch.tools.report import Progress, Report, plural, provenance, require_gpu, silent

PADDING, CANARY = 256, 0xA5  # bytes before and after every tensor; as fp32 -2.9e-16, as an absmax byte 165
SPECIAL = (0.0, -0.0, 1e-45, 1e-39, 2e-38, 6e-8, 65504.0, 7e4, 3e38, math.inf, -math.inf, math.nan)
SPECIAL_ON_CPU = tuple(x for x in SPECIAL if x == 0 or not abs(x) < 1e-7)  # its bf16 convert drops subnormals
LARGEST = {"cuda": 1 << 19, "cpu": 1 << 13}  # elements of an ordinary random case
CTA = {"cuda": 1 << 14, "cpu": 1 << 12}  # whole CTAs of every kernel: no masks


class Case(NamedTuple):
    """A random state."""

    seed: int  # of its random bytes
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
    into: str  # "new", "out" (with canaries) or "buffer"
    fault: str  # "" or a name of FAULTS
    is_remembered: bool  # the well-formed state ran before the same state has its fault

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@st.composite
def states(draw: Any, device: str, blocksizes: Sequence[int] = BLOCKSIZES, faults: Sequence[str] = ()) -> Case:
    """Draw a case. States that models have are more frequent, and every other state is possible."""

    def happens(tenths: int) -> bool:
        return draw(st.integers(1, 10)) <= tenths

    rank = draw(st.sampled_from((2,) * 6 + (1,) * 2 + (3,) * 2 + (4,)))
    if happens(3):
        shape = [draw(st.integers(1, 3)) * CTA[device] // 64, *[1] * (rank - 1)]
        shape[-1] *= 64
    else:
        largest = LARGEST[device] if happens(2) else 4096
        shape = [draw(sizes(largest ** (1 / rank))) for _ in range(rank)]
    if rank > 2 and math.prod(shape) <= 8:
        shape[-1] *= 16  # one element of packed weight reads as transposed, and t() ends at rank 2
    nested, blocksize = happens(7), draw(st.sampled_from(blocksizes))
    storage = draw(st.sampled_from(STORAGE_DTYPES)) if happens(2) else torch.uint8
    if -(-math.prod(shape) // 2) % storage.itemsize:
        storage = torch.uint8
    start = 4 * draw(st.integers(0, 15)) if happens(3) else draw(st.integers(0, 63)) if happens(1) else 0
    return Case(
        seed=draw(st.integers(0, 2**32 - 1)),
        shape=tuple(shape),
        dtype=draw(st.sampled_from(OUTPUT_DTYPES)),
        blocksize=blocksize,
        nested=nested,
        quant_type=draw(st.sampled_from(("nf4", "nf4", "fp4"))),
        storage=storage,
        # a kernel is compiled for each: the rare ones at one blocksize only
        offset_dtype=draw(st.sampled_from(OFFSET_DTYPES)) if nested and blocksize == 64 else torch.float32,
        transposed=rank <= 2 and happens(3),
        start=start - start % storage.itemsize,
        special=happens(2),
        into=draw(st.sampled_from(("new",) * 2 + ("out",) * 5 + ("buffer",) * 2)),
        fault=draw(st.sampled_from(faults)) if faults and happens(3) else "",
        is_remembered=draw(st.booleans()),
    )


def sizes(largest: float) -> st.SearchStrategy[int]:
    """Draw a size from 1 to ``largest``, evenly on a logarithmic scale."""
    return st.integers(0, 1000).map(lambda thousandths: int(largest ** (thousandths / 1000)))


def drawn(count: int, seed: int, strategy: st.SearchStrategy[Any]) -> list[Any]:
    """Draw ``count`` examples that differ. The seed and the release of hypothesis decide which."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


def bytes_in(count: int, device: torch.device, start: int = 0, fill: int = CANARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a buffer of canaries, and ``count`` bytes of it that begin ``start`` bytes after an aligned address."""
    buffer = torch.full((count + 2 * PADDING + start,), CANARY, dtype=torch.uint8, device=device)
    view = buffer[PADDING + start : PADDING + start + count]
    if fill != CANARY:
        view.fill_(fill)
    return buffer, view


def placed(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return a copy of ``tensor`` in the middle of a buffer of canaries."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    _, view = bytes_in(raw.numel(), tensor.device, start)
    return view.copy_(raw).view(tensor.dtype).view(tensor.shape)


def random_state(case: Case, device: torch.device) -> tuple[torch.Tensor, Any]:
    """Return a case's packed weight and QuantState, in which every byte is random."""
    from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type

    generator = torch.Generator(device).manual_seed(case.seed)

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


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Compare shape, dtype, strides and bits. Any two NaNs are equal. On the CPU, FP4's zeros may have other signs."""

    def meta(tensor: torch.Tensor) -> tuple[Any, ...]:  # a dimension of one element has any stride
        strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        return tensor.shape, tensor.dtype, strides

    differs = ~equal_bits(got, want)
    if not got.is_cuda:
        differs &= ~((got == 0) & (want == 0)).reshape(-1)
    return meta(got) == meta(want) and not differs.any()


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


Fault = tuple[str, Callable[[Any], Any], tuple[str | None, ...]]
# Fault: the field that is changed ("packed" and "state" are the arguments themselves), how, and the Reasons it may end
# in; None: the original never looks at it, so the kernel's bits must be the original's.
FAULTS: dict[str, Fault] = {
    "absmax one short": ("absmax", lambda t: t[:-1], ("SIZE_MISMATCH",)),
    "absmax one long": ("absmax", lambda t: torch.cat((t, t[:1])), ("SIZE_MISMATCH",)),
    "absmax of another dtype": ("absmax", lambda t: t.half(), ("STATE_FIELDS",)),
    "absmax on meta": ("absmax", lambda t: t.to("meta"), ("MIXED_DEVICES",)),
    "absmax fake": ("absmax", _fake, ("TENSOR_SUBCLASS",)),
    "absmax freed": ("absmax", _freed, ("NO_STORAGE",)),
    "offset negative": ("offset", lambda t: torch._neg_view(-t), ("NOT_CONTIGUOUS",)),
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
    "packed of no dimension": ("packed", lambda t: t.reshape(-1)[0], ("STATE_FIELDS",)),
    "shape times four": ("shape", lambda s: torch.Size((4 * s[0], *s[1:])), ("SIZE_MISMATCH",)),
    "shape empty": ("shape", lambda s: torch.Size((0,)), ("SIZE_MISMATCH",)),
    "shape None": ("shape", lambda s: None, ("SIZE_MISMATCH",)),
    "blocksize 96": ("blocksize", lambda b: 96, ("BLOCKSIZE",)),
    "blocksize 0": ("blocksize", lambda b: 0, ("BLOCKSIZE",)),
    "blocksize2 3": ("state2.blocksize", lambda b: 3, ("BLOCKSIZE",)),
    "dtype float64": ("dtype", lambda d: torch.float64, ("OUTPUT_DTYPE",)),
    "dtype None": ("dtype", lambda d: None, ("OUTPUT_DTYPE",)),
    "quant_type int8": ("quant_type", lambda q: "int8", ("QUANT_TYPE",)),
    "CPU packing": ("packing_format_for_cpu", lambda flag: True, ("CPU_PACKING",)),
    "nested but said flat": ("nested", lambda nested: False, ("STATE_FIELDS",)),
    "state a list": ("state", lambda state: [state.absmax, state.shape], ("NOT_4BIT",)),
}


def broken(fault: Fault, packed: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any] | None:
    """Return the arguments with their fault, or None if the case has no such field. The state itself is changed."""
    path, change, _ = fault
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
    faults: Counter[str] = field(default_factory=Counter)  # malformed states, "fault: reason"
    mismatches: list[str] = field(default_factory=list)
    out_of_bounds: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        return self.mismatches + self.out_of_bounds + ([] if self.hits else ["no case ran in the kernel"])

    def as_dict(self) -> dict[str, Any]:  # asdict would count the pairs of a Counter
        return {**vars(self), "exit_code": self.exit_code}

    def render(self) -> Iterable[str]:
        yield from (f"{name}: {count}" for name, count in sorted(self.faults.items()))
        yield provenance(self.place)
        fallbacks = ", ".join(f"{name} {n:,}" for name, n in self.fallbacks.items()) or "none"
        yield (
            f"{plural(self.cases, 'case')} of seed {self.seed}, {plural(self.elements, 'element')}: {self.hits:,} in the kernel, "
            f"fallbacks of well-formed states: {fallbacks}; {sum(self.faults.values()):,} malformed"
        )
        yield f"mismatches: {len(self.mismatches)}, out of bounds: {len(self.out_of_bounds)}"
        yield from self.problems()[:20]


class Fuzzer:
    """Runs cases, and collects the report. One Dequantizer runs all cases, so remembered launches meet reused addresses."""

    def __init__(self, device: torch.device, oracle: str = "bitsandbytes", seed: int = 0):
        from nf4_patch.patching.dequantizer import Dequantizer  # imports the kernels

        self.device, self.oracle = device, oracle
        self.dequantizer = Dequantizer("fuzz")
        self.report = FuzzReport(cases.place_of(device), seed)

    def run(self, case: Case) -> None:
        """Run the well-formed state. If the case has a fault, also run the same state with the fault."""
        report = self.report
        packed, state = random_state(case, self.device)
        want = self.original(case, packed, state)
        report.cases += 1
        report.elements += case.numel
        if case.fault and not case.is_remembered:
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
            return reference.dequantize(layout_of(packed, state))
        if case.storage is not torch.uint8 and not packed.is_cuda:  # the CPU library takes bytes only
            packed = packed.view(torch.uint8)
        return expected(packed.clone(), state)

    def run_kernel(self, case: Case, packed: torch.Tensor, state: Any, want: torch.Tensor) -> Any:
        """Compare the result of the kernel, or return the Reason why it did not run."""
        before = packed.clone()
        out = buffer = None
        if case.into == "out":
            n = case.numel * case.dtype.itemsize
            buffer, raw = bytes_in(n, self.device, fill=0xFF)  # NaN in every dtype
            out = raw.view(case.dtype).view(case.shape)
        result = self.dequantizer.of_state(packed, state, out, into_buffer=case.into == "buffer")
        if not isinstance(result, torch.Tensor):
            return result
        if not same(result, want):
            self.report.mismatches.append(repr(case))
        if buffer is not None:
            edges = torch.cat((buffer[:PADDING], buffer[PADDING + n :]))
            if not bool((edges == CANARY).all()):
                self.report.out_of_bounds.append(f"wrote outside out: {case!r}")
        if not torch.equal(before.view(torch.uint8), packed.contiguous().view(torch.uint8)):
            self.report.out_of_bounds.append(f"wrote into the packed weight: {case!r}")
        return result

    def run_broken(self, case: Case, packed: torch.Tensor, state: Any, want: torch.Tensor) -> None:
        """Run a malformed state. The original does not run, because it might read outside its buffers."""
        changed = broken(FAULTS[case.fault], packed, state)
        if changed is None:
            return
        allowed = FAULTS[case.fault][2]
        try:
            result = self.dequantizer.of_state(*changed)
        except Exception as error:  # as the replacements do: the original would run
            result = self.dequantizer.fallbacks.failed(error)
        if isinstance(result, torch.Tensor):
            ended, fine = "the original's bits", None in allowed and same(result, want)
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
    """Run ``count`` cases of ``seed`` on the GPU.

    Args:
        blocksizes: the blocksizes to draw from. With fewer blocksizes, fewer kernels are compiled.
        oracle: "bitsandbytes", or "formula" for compute-sanitizer, because bitsandbytes' CUDA kernel (0.50.2) itself reads
            past the end of absmax if the last block is partial.
    """
    require_gpu()
    fuzzer = Fuzzer(cases.device_here(), oracle, seed)
    with patch(False):
        for number, case in enumerate(drawn(count, seed, states("cuda", blocksizes, tuple(FAULTS)))):
            if number % 64 == 0:
                tell("fuzz", number, count)
            fuzzer.run(case._replace(seed=seed * 1_000_003 + number))  # hypothesis likes to draw a number again
    return fuzzer.report


@st.composite
def products(draw: Any, dtype: torch.dtype, nested: bool) -> tuple[Case, int]:
    """Draw a well-formed state of a weight [N, K], and rows of X, for every row of the fused matmul's table for an H200.

    Only few tile counts are drawn, because a kernel is compiled for each.
    """
    n, k = draw(sizes(13000)), draw(st.sampled_from((16, 32, 64))) * draw(sizes(512))
    large = st.integers(57, 64) if n * k >= 2**24 else st.just(16)
    m = draw(st.integers(1, 8) | st.integers(9, 16) | large)
    case = draw(states("cuda"))
    start = case.start - case.start % 4  # off 4 bytes nothing of ours runs
    offset = case.offset_dtype if nested else torch.float32
    return case._replace(
        shape=(n, k), dtype=dtype, nested=nested, offset_dtype=offset, transposed=False, start=start, special=False
    ), m


def fuzz_products(count: int, seed: int, dtype: torch.dtype, nested: bool) -> Counter[str]:
    """Return how many states the fused matmul ran ("hits") and how many it refused by Reason, among states that
    dequantize supports.

    Raises:
        AssertionError: a row of X with a single 1 gave other bits than bitsandbytes' dequantization.
    """
    from nf4_patch.matmul.product import FusedMatmul
    from nf4_patch.patching.dequantizer import Dequantizer

    device, ended = cases.device_here(), Counter()
    dequantizer, multiplier = Dequantizer("fuzz"), FusedMatmul("fuzz")
    with patch(False), torch.no_grad():
        for case, m in drawn(count, seed, products(dtype, nested)):
            packed, state = random_state(case, device)
            weight = dequantizer.of_state(packed, state)
            assert isinstance(weight, torch.Tensor), (weight, case)
            want = expected(packed.clone(), state)
            columns = torch.randint(case.shape[1], (m,), device=device)
            x = torch.zeros(m, case.shape[1], dtype=dtype, device=device)
            x[torch.arange(m, device=device), columns] = 1
            got = multiplier.of_state(x, packed, state)
            if isinstance(got, torch.Tensor):
                found = "hits"
                assert torch.equal(weight, want) and torch.equal(got, want[:, columns].t()), (case, m)
            else:
                found = "unaligned" if got is Reason.MATMUL_OPERANDS and packed.data_ptr() % 16 else got.name
            ended[found] += 1
    return ended
