"""Runs the PTX of matmul in numpy, and reports errors that a GPU would not report.

Such errors are: a register that is read before it is written, an address that is misaligned or outside its tensor, a
divergent branch, and a wait that never ends. Another is shared memory that two warps touch without a barrier in
between. Each warp has a vector clock for this, which barriers hand on.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

import numpy as np
import torch
from matmul_emulation import tensor_core

from nf4_patch.matmul.small_m import SmallMPlan
from nf4_patch.nf4.weight import PackedWeight

LANES = np.arange(32)
FULL = np.ones(32, bool)
BITS = {".b16": 16, ".b32": 32, ".f32": 32, ".b64": 64, ".pred": 1}
SIZES = {"b32": np.uint32, "f32": np.uint32, "b16": np.uint16, "u8": np.uint8}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "bf16x2": torch.bfloat16, "f16x2": torch.float16}
INTEGERS = {
    "and": operator.and_, "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift,
    "add": operator.add, "sub": operator.sub, "min": np.minimum, "div": operator.floordiv, "rem": operator.mod,
}  # fmt: skip
FLOATS = {"mul": operator.mul, "add": operator.add, "sub": operator.sub}
COMPARISONS = {"lt": operator.lt, "ge": operator.ge, "eq": operator.eq}


def u64(value) -> np.ndarray:
    return np.asarray(value).astype(np.uint64, copy=False)


ONES = {bits: u64(2**bits - 1) for bits in (1, 16, 32, 64)}
NOTHING = np.full(32, 0x7FC00000, np.uint64)  # NaN, in lanes that never loaded
SHIFTS = u64([[0], [8], [16], [24]])


def bytes_of(value: np.ndarray) -> np.ndarray:
    """Return the bytes of each register, [4, 32], the lowest byte first."""
    return value >> SHIFTS & u64(255)


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round fp32 to the nearest 16-bit floats. Return the bits."""
    return u64(torch.from_numpy(values.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16))


def pairs(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the two 16-bit floats in each lane's registers, the low one first, [registers, 32, 2]."""
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).view(dtype).double().numpy().reshape(-1, 32, 2)


INNER = 9  # place of an adapter's inner product among the tensors of a launch


class Source:
    """Parsed PTX: (predicate, operation, operands, source) of each instruction, and labels, registers and shared arrays."""

    def __init__(self, ptx: str):
        self.code: list[tuple[str | None, list[str], list[str], str]] = []
        self.labels: dict[str, int] = {}
        self.types: dict[str, str] = {}
        self.arrays: dict[str, int] = {}
        self.shared = 0
        self.dependent = "griddepcontrol" in ptx
        for part in ptx.strip()[1:-1].replace("\n", " ").split(";"):
            self.read(part.strip())

    def read(self, source: str) -> None:
        while label := re.match(r"([A-Z]\w*):\s*", source):
            self.labels[label[1]] = len(self.code)
            source = source[label.end() :]
        if shared := re.match(r"\.shared \.align \d+ \.b(?:8|64) (.*)", source):
            for name, count in re.findall(r"(\w+)(?:\[(\d+)\])?", shared[1]):
                self.arrays[name] = self.shared
                self.shared += int(count or 8)
        elif source.startswith(".reg"):
            _, kind, names = source.split(None, 2)
            for name, count in re.findall(r"(\w+)(?:<(\d+)>)?", names):
                self.types |= {f"{name}{i}": kind for i in range(int(count))} if count else {name: kind}
        elif source:
            predicate, operation, rest = re.match(r"(?:@(!?\w+)\s+)?(\S+)\s*(.*)", source).groups()
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
            self.code.append((predicate, operation.split("."), [x.strip() for x in operands], source))


class Barrier:
    """An mbarrier. A phase is complete when ``count`` lanes have arrived. The lanes of a warp arrive together."""

    def __init__(self, count: int, warps: int):
        self.count = self.pending = count
        self.phase = 0
        self.known = self.complete = np.zeros(warps, int)  # what those who arrived knew; the same of complete phases

    def arrive(self, known: np.ndarray) -> None:
        self.known = np.maximum(self.known, known)
        self.pending -= len(LANES)
        if self.pending == 0:
            self.phase, self.pending, self.complete = self.phase + 1, self.count, self.known


class Cta:
    """One CTA. ``memory[i]`` holds a tensor's bytes, at the address (i + 1) << 32."""

    def __init__(
        self, source: Source, operands: dict[int, int], index: int, ctas: int, warps: int, memory: list[np.ndarray]
    ):
        self.source, self.operands, self.index, self.ctas = source, operands, index, ctas
        self.warps, self.memory = warps, memory
        self.shared = np.zeros(source.shared, np.uint8)
        self.epoch = 0  # bar.sync passed
        self.clock = np.eye(warps, dtype=int)  # of each warp (row): what it knows of every warp
        self.barriers: dict[int, Barrier] = {}
        self.arrivals = 0
        self.written = np.full((source.shared, 2), -1)  # (warp, its clock) of each byte
        self.loaded = np.zeros((source.shared, warps), int)  # each warp's clock

    def run(self) -> None:
        live = [Warp(self, w).run() for w in range(self.warps)]
        while True:
            stops = [next(warp, "end") for warp in live]
            while "wait" in stops:
                before = self.arrivals, stops.count("wait")
                stops = [next(warp, "end") if stop == "wait" else stop for warp, stop in zip(live, stops, strict=True)]
                assert (self.arrivals, stops.count("wait")) != before, "warps wait for what nobody does"
            assert len(set(stops)) == 1, f"warps of a CTA stop at {set(stops)}"
            if stops[0] == "end":
                return
            self.epoch += 1
            self.clock[:] = self.clock.max(0)
            self.clock += np.eye(self.warps, dtype=int)

    def load(self, warp: int, at: np.ndarray) -> np.ndarray:
        warps, clocks = np.moveaxis(self.written[at], -1, 0)
        assert (clocks <= self.clock[warp, warps]).all(), "read without a barrier after the write"
        self.loaded[at, warp] = self.clock[warp, warp]
        return self.shared[at]

    def store(self, warp: int, at: np.ndarray, value: np.ndarray) -> None:
        warps, clocks = np.moveaxis(self.written[at], -1, 0)
        known = (clocks <= self.clock[warp, warps]).all() and (self.loaded[at] <= self.clock[warp]).all()
        assert known, "written without a barrier after another warp"
        self.written[at] = warp, self.clock[warp, warp]
        self.shared[at] = value

    def barrier(self, warp: int, operation: list[str], operands: list[int], mask: np.ndarray) -> bool:
        """Run mbarrier.init or .arrive, or return whether the awaited phase is complete."""
        at = operands[0]
        match operation[1]:
            case "init":
                assert at not in self.barriers and self.epoch == 0, "initialized twice, or too late"
                self.barriers[at] = Barrier(operands[1], self.warps)
            case "arrive":
                assert mask.all(), "a lane does not arrive for itself"
                self.barriers[at].arrive(self.clock[warp])
                self.clock[warp, warp] += 1
                self.arrivals += 1
            case "try_wait" | "test_wait":
                assert self.epoch > 0, "waited for before all warps know it"
                if self.barriers[at].phase % 2 == operands[1]:
                    return False
                self.clock[warp] = np.maximum(self.clock[warp], self.barriers[at].complete)
        return True


class Warp:
    """32 lanes and their registers. A register holds one number per lane."""

    def __init__(self, cta: Cta, index: int):
        self.cta, self.index, self.types = cta, index, cta.source.types
        self.waited = not cta.source.dependent  # for the launch before this one
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": u64(32 * index + LANES),
            "%ctaid.x": u64(cta.index + 0 * LANES),
            "%nctaid.x": u64(cta.ctas + 0 * LANES),
        }

    def run(self) -> Iterator[str]:
        """Run until a barrier ("bar.sync"), or until a phase that is not complete ("wait")."""
        code, labels, at = self.cta.source.code, self.cta.source.labels, 0
        while at < len(code):
            predicate, operation, operands, source = code[at]
            at += 1
            mask = FULL
            try:
                if predicate:
                    mask = (self.get(predicate.lstrip("!"), 1) == 1) ^ predicate.startswith("!")
                match operation:
                    case ["bra", *_]:
                        assert mask.all() or not mask.any(), "the lanes of a warp part"
                        at = labels[operands[0]] if mask.all() else at
                    case ["bar", *scope, "sync"]:
                        if scope != ["warp"]:
                            yield "bar.sync"
                    case ["mbarrier", *_]:
                        if not self.mbarrier(operation, operands, mask):
                            yield "wait"
                    case _:
                        self.execute(operation, operands, mask)
            except Exception as error:
                raise AssertionError(f"{source} (warp {self.index}): {error}") from error

    def mbarrier(self, operation: list[str], operands: list[str], mask: np.ndarray) -> bool:
        """Run an mbarrier instruction. Return whether the warp need not wait."""
        operands, result = (operands[1:], operands[0]) if operation[1] != "init" else (operands, "_")
        numbers = [int(self.get(operand.strip("[]"))[0]) for operand in operands]
        complete = self.cta.barrier(self.index, operation, numbers, mask) if mask.any() else True
        if operation[1].endswith("wait"):
            self.put(result, FULL & complete, mask, 1)
        return complete

    def get(self, name: str, bits: int = 32) -> np.ndarray:
        if name not in self.registers:
            if name.startswith("$"):
                value = self.cta.operands[int(name[1:])]
            elif name in self.cta.source.arrays:
                value = self.cta.source.arrays[name]
            else:
                assert name[0].isdigit(), f"{name} is read before it is written"
                value = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
            self.registers[name] = np.full(32, value, np.uint64)  # a constant
        return self.registers[name] & ONES[bits]

    def put(self, name: str, value, mask: np.ndarray, bits: int = 32) -> None:
        if name == "$0" and name not in self.types:
            return
        assert BITS[self.types[name]] == bits, f"{name} is {self.types[name]}"
        value = u64(value.view(np.uint32) if value.dtype == np.float32 else value) & ONES[bits]
        self.registers[name] = value if mask is FULL else np.where(mask, value, self.registers.get(name, NOTHING))

    def floats(self, name: str) -> np.ndarray:
        return self.get(name).astype(np.uint32).view(np.float32)

    def move(self, operation: list[str], operands: list[str], mask: np.ndarray) -> None:
        place, names = operands if operation[0] == "st" else reversed(operands)
        base, offset = re.match(r"\[(\S+)(?: \+ (\d+))?\]", place).groups()
        names = [name.strip() for name in names.strip("{}").split(",")]
        kind, lanes = SIZES[operation[-1]], np.flatnonzero(mask)
        size = kind().itemsize
        bits = 16 if size == 2 else 32
        start = (self.get(base, 64)[lanes] + u64(int(offset or 0))).astype(np.int64)
        if not len(lanes):
            for name in names if operation[0] == "ld" else ():
                self.put(name, np.zeros(32), mask, bits)
            return
        assert not (start % (size * len(names))).any(), "misaligned"
        at = start[:, None] + np.arange(size * len(names))
        shared = "shared" in operation
        if not shared:
            (tensor,) = set(start >> 32)
            # The launch before this one writes inner, and starts this one when all launches before it have ended. x may be stale.
            early = operation[0] == "ld" and len(self.cta.memory) > INNER and tensor - 1 not in (0, INNER)
            assert self.waited or early, "while the launch before it may still write"
            buffer, at = self.cta.memory[tensor - 1], at & 0xFFFFFFFF
            assert at.max() < len(buffer), "outside its tensor"
        if operation[0] == "ld":
            found = self.cta.load(self.index, at) if shared else buffer[at]
            for i, name in enumerate(names):
                value = np.zeros(32, np.uint64)
                column = np.ascontiguousarray(found[:, size * i : size * (i + 1)])
                value[lanes] = column.view(kind)[:, 0]
                self.put(name, value, mask, bits)
        else:
            value = np.stack([self.get(name)[lanes].astype(kind) for name in names], 1).view(np.uint8)
            if shared:
                self.cta.store(self.index, at, value)
            else:
                buffer[at] = value

    def mma(self, operation: list[str], operands: list[str], mask: np.ndarray) -> None:
        d, a, b, c = ([name.strip() for name in names.strip("{}").split(",")] for names in operands)
        dtype, g, t = DTYPES[operation[-2]], LANES // 4, LANES % 4
        left, right, sums = np.zeros((16, 4 * len(a))), np.zeros((4 * len(a), 8)), np.zeros((16, 8), np.float32)
        for register, halves in enumerate(pairs(np.stack([self.get(name) for name in a]), dtype)):
            for half in (0, 1):
                left[g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)] = halves[:, half]
        for register, halves in enumerate(pairs(np.stack([self.get(name) for name in b]), dtype)):
            for half in (0, 1):
                right[2 * t + half + 8 * register, g] = halves[:, half]
        for i, name in enumerate(c):
            sums[g + 8 * (i // 2), 2 * t + i % 2] = self.floats(name)
        sums = tensor_core(*map(torch.from_numpy, (sums, left, right.T.copy()))).numpy()
        for i, name in enumerate(d):
            self.put(name, sums[g + 8 * (i // 2), 2 * t + i % 2], mask)

    def execute(self, operation: list[str], x: list[str], mask: np.ndarray) -> None:
        match operation:
            case ["mov", "b32"] if x[1].startswith("{"):
                low, high = (self.get(name.strip(), 16) for name in x[1].strip("{}").split(","))
                self.put(x[0], high << u64(16) | low, mask)
            case ["mov", *_]:
                bits = BITS[self.types.get(x[0], ".b32")]
                self.put(x[0], self.get(x[1], bits), mask, bits)
            case [name, "b32" | "u32" | "b64" | "u64" | "pred" as kind] if name in INTEGERS:
                bits = 1 if kind == "pred" else int(kind[1:])
                self.put(x[0], INTEGERS[name](self.get(x[1], bits), self.get(x[2], bits)), mask, bits)
            case ["mul" | "mad" as name, "lo" | "wide" as how, "u32" | "u64" as kind] if (how, kind) != ("wide", "u64"):
                factors, result = int(kind[1:]), 64 if how == "wide" else int(kind[1:])
                product = self.get(x[1], factors) * self.get(x[2], factors)
                self.put(x[0], product + self.get(x[3], result) if name == "mad" else product, mask, result)
            case ["cvt", "u64", "u32"]:
                self.put(x[0], self.get(x[1]), mask, 64)
            case ["cvt", "rn", "bf16x2" | "f16x2" as kind, "f32"]:
                high, low = (rounded(self.floats(name), DTYPES[kind]) for name in x[1:])
                self.put(x[0], high << u64(16) | low, mask)
            case ["cvt", "rn", "bf16" | "f16" as kind, "f32"]:
                self.put(x[0], rounded(self.floats(x[1]), DTYPES[kind]), mask, 16)
            case ["cvt", "f32", "f16"]:
                self.put(x[0], self.get(x[1], 16).astype(np.uint16).view(np.float16).astype(np.float32), mask)
            case ["mul" | "add" | "sub" as name, "rn", *_, "f32"]:
                self.put(x[0], FLOATS[name](self.floats(x[1]), self.floats(x[2])), mask)
            case ["setp", how, *more]:
                result = COMPARISONS[how](self.get(x[1]), self.get(x[2]))
                self.put(x[0], result & (self.get(x[3], 1) == 1) if "and" in more else result, mask, 1)
            case ["lop3", "b32"]:
                assert x[4] == "0xCA"
                a, b, c = map(self.get, x[1:4])
                self.put(x[0], a & b | ~a & c, mask)
            case ["prmt", "b32"]:
                pool, result = np.concatenate([bytes_of(self.get(name)) for name in x[1:3]]), u64(0)
                for i in range(4):
                    choice = self.get(x[3]) >> u64(4 * i) & u64(15)
                    byte = pool[(choice & u64(7)).astype(int), LANES]
                    byte = np.where(choice & u64(8), (byte >> u64(7)) * u64(255), byte)  # its sign, eight times
                    result = result | byte << u64(8 * i)
                self.put(x[0], result, mask)
            case ["dp4a", *_]:
                a, b = (bytes_of(self.get(name)) for name in x[1:3])
                self.put(x[0], (a * b).sum(0) + self.get(x[3]), mask)
            case ["shfl", "sync", "idx", "b32"]:
                assert mask.all() and x[3] in ("0x1f", "0x1c1f") and x[4] == "0xffffffff"
                group = int(x[3], 16) >> 8  # lanes of the same group: 0x1c, of four
                self.put(x[0], self.get(x[1])[LANES & group | self.get(x[2]).astype(int) & 31 & ~group], mask)
            case ["griddepcontrol", how]:
                self.waited |= how == "wait"
            case ["ld" | "st", *_]:
                self.move(operation, x, mask)
            case ["mma", *_]:
                self.mma(operation, x, mask)
            case _:
                raise NotImplementedError(".".join(operation))


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor's bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def launch(
    cut: SmallMPlan, x: torch.Tensor, layout: PackedWeight, bias: torch.Tensor | None = None,
    adapter: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:  # fmt: skip
    """Run a plan as a GPU would, in memory that held NaN. Return [split_k, M, N], in fp32 if split_k > 1.

    Args:
        adapter: the parts of the inner product and B, if the plan adds a LoRA adapter.
    """
    (m, _), (n, k) = x.shape, layout.shape
    dtype = torch.float32 if cut.split_k > 1 else x.dtype
    out = memory_of(torch.full((cut.split_k, m, n), float("nan"), dtype=dtype))
    operands = layout.operands()
    *inputs, last = map(memory_of, (x, *operands, operands[2] if bias is None else bias))  # unread without a bias
    memory = [*inputs, out, last, *map(memory_of, adapter)]
    step = layout.step()
    shift, shift2 = (layout.blocksize // step).bit_length() - 1, max(0, layout.blocksize2.bit_length() - 1)
    sizes = (m, n, k // step, shift, shift2, cut.sm_partitions, cut.split_k)
    values = {i + 1: (i + 1) << 32 for i in range(9)} | dict(enumerate(sizes, 10))
    values |= {i + 8: (i + 1) << 32 for i in range(9, len(memory))}
    source = Source(cut.ptx)
    for index in range(cut.ctas):
        Cta(source, values, index, cut.ctas, cut.warps, memory).run()
    return torch.from_numpy(out).view(dtype).view(cut.split_k, m, n)
