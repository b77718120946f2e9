"""What time a fused product of few rows could take at best on a GPU that need not be here, beside bitsandbytes' own kernel.

Bounds as in ``inspect``: the slower of memory and the busiest pipe (overlapped), and their sum (in turns). A kernel with a
loop is counted along a warp's way through its machine code: a branch is followed if unconditional and passed by otherwise,
but for those around what only the last round of a loop executes. The way round a loop is multiplied by the rounds that the
sizes give, and all of it by the warps of the busiest multiprocessor. tests/test_inspect.py finds every multiplication of a
product in it once. Not in it: launch gaps, waiting, the way of X from the L2, and bank conflicts (bitsandbytes' stores to
shared memory have some, ours none).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable
from math import ceil
from typing import NamedTuple

from ...nf4.matmul import launch as matmul
from ..report import Tell, silent
from . import machine_code
from .inspect import BITSANDBYTES, OURS, SMS, Gpu, ProductRow, Sm, cycles, library_code
from .machine_code import Code, Instruction

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))  # N, K
ROWS = (1, 4, 8, 16, 32, 64)


class Way(NamedTuple):
    """Instructions that a warp executes, and how often that happens on the busiest multiprocessor."""

    instructions: list[Instruction]
    times: float


def way(code: Code, start: int, stop: int = -1, avoid: Collection[str] = ()) -> list[Instruction]:
    """What a warp executes from ``start`` to ``stop``, a branch back or the end.

    A conditional branch is taken only if what it jumps over holds an opcode to ``avoid``.
    """
    found, at = [], start
    while at not in (stop, len(code.instructions)):
        one = code.instructions[at]
        found.append(one)
        at, to = at + 1, one.target
        if to is not None and to < at:
            break
        if to is not None and (not one.predicate or any(passed.name in avoid for passed in code.instructions[at:to])):
            at = to
    return found


def loop(code: Code) -> tuple[int, int]:
    """Positions of the head of the kernel's loop and of its last branch back."""
    back = [(one.target, at) for at, one in enumerate(code.instructions) if one.target is not None and one.target <= at]
    return min(back)[0], back[-1][1]


def ours(gpu: Gpu, config: matmul.Config, m: int, n: int, k: int) -> list[Way]:
    cut = matmul.plan(config, gpu.sms, m, n, k, True, True, False, gpu.capability)
    warps = config.along_n * config.along_k
    code = machine_code.product_code(cut.text, warps, gpu.capability)
    head, _ = loop(code)
    groups = ceil(ceil(n / config.rows) / cut.shares)  # of rows, on the busiest multiprocessor
    rounds = ceil(ceil(ceil(k / 256) / cut.slices) / config.along_k)
    every, last = way(code, head, avoid=("STG",)), way(code, head)  # the last round of a group adds up and stores
    assert len(last) > len(every) and not any(one.name == "STG" for one in every)
    programs = cut.programs / (cut.shares * cut.slices)
    return [
        Way(way(code, 0, head), programs * warps),
        Way(every, groups * (rounds - 1) * warps / config.ahead),
        Way(last, groups * warps / config.ahead),
    ]


def theirs(gpu: Gpu, m: int, n: int, k: int) -> list[Way]:
    """The kernel that bitsandbytes 0.50.2 launches for 1 to 64 rows in fp16 on a T4, from 2,560 rows of the weight on.

    Empty where its library is not installed. Its choice is in its csrc/gemm_4bit*.cu: up to 3 rows a warp a row of the
    weight, 1024 of K a round; else tiles of 32x64 or, past 32 rows, 64x128 by 8 warps, 64 of K a round.
    """
    if m <= 3:
        return looped(gpu, f"gemm_4bit_simtI6__halfLi{m}E", ceil(n / 4), 4, ceil(k / 1024))
    rows, columns = (32, 64) if m <= 32 else (64, 128)
    return looped(gpu, f"gemm_4bit_sm75_m16n8k8I6__halfLi{rows}ELi{columns}E", ceil(n / columns), 8, k // 64)


def looped(gpu: Gpu, kernel: str, programs: int, warps: int, rounds: int) -> list[Way]:
    """A kernel of bitsandbytes' library each of whose warps goes round one loop so often; empty where there is none."""
    code = library_code(gpu.capability, kernel)
    if code is None:
        return []
    head, back = loop(code)
    times = ceil(programs / gpu.sms) * warps
    return [Way(way(code, 0, head) + way(code, back + 1), times), Way(way(code, head), times * rounds)]


def busy(ways: Iterable[Way], sm: Sm) -> dict[str, float]:
    """Cycles that the busiest multiprocessor's pipes are busy."""
    total: dict[str, float] = collections.defaultdict(float)
    for instructions, times in ways:
        for instruction in instructions:
            for pipe, taken in (cycles(instruction, sm), ("issue", 1 / sm.issue)):
                total[pipe] += times * taken
    return total


def bounds(gpu: Gpu, who: str, ways: list[Way], m: int, n: int, k: int, clock: float, bandwidth: int) -> ProductRow:
    moved = n * k * (0.5 + 1 / 64 + 4 / 64 / 256) + 2 * m * (n + k)
    pipes = busy(ways, SMS[gpu.capability])
    pipe = max(pipes, key=lambda name: pipes[name])
    taken = pipes[pipe] / clock / 1e3
    return ProductRow(gpu.name, who, clock, bandwidth, n, k, m, moved / bandwidth / 1e3, pipe, taken)


def model(gpu: Gpu, tell: Tell = silent) -> list[ProductRow]:
    """Ours and theirs in turns, at the lowest bandwidth; none where there is no candidate, theirs only where it is known."""
    rows = []
    for clock, (n, k), m in itertools.product(gpu.clocks, SHAPES, ROWS):
        config = matmul.config_for(gpu.capability, m, n, k, matmul.CANDIDATES)
        if config is None:
            continue
        tell(f"modelling {m} rows of {n}x{k}")
        for who, ways in ((OURS, ours(gpu, config, m, n, k)), (BITSANDBYTES, theirs(gpu, m, n, k))):
            if ways:
                rows.append(bounds(gpu, who, ways, m, n, k, clock, gpu.bandwidths[0]))
    return rows
