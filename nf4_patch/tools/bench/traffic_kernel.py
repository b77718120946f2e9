"""The traffic ceiling: the bytes of a 4-bit dequantization with no decode, as fast as Triton moves them.

A 32-bit word in, four words out, as a packed word of 8 nibbles becomes 8 elements of 16 bits. No dequantization
that reads and writes these bytes is expected to be faster; what it is slower by, its decode costs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

# (num_warps, words a lane): the fastest of them on this GPU and size is the ceiling.
SHAPES = ((4, 1), (4, 2), (8, 2), (16, 2))


@triton.jit
def move(words, out, LANES: tl.constexpr, STEPS: tl.constexpr):
    """words: int32 [n]; out: int32 [4 n]; a CTA moves STEPS * LANES words, both loads before the stores."""
    tl.static_assert(STEPS == 1 or STEPS == 2)
    first = tl.program_id(0).to(tl.int64) * (LANES * STEPS)
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 4 * LANES)
    word = tl.load(words + first + lane, eviction_policy="evict_first")
    if STEPS == 2:
        word2 = tl.load(words + first + LANES + lane, eviction_policy="evict_first")
    four = tl.reshape(tl.join(tl.join(word, word), tl.join(word, word)), [4 * LANES])
    tl.store(out + first * 4 + column, four, eviction_policy="evict_first")
    if STEPS == 2:
        four = tl.reshape(tl.join(tl.join(word2, word2), tl.join(word2, word2)), [4 * LANES])
        tl.store(out + (first + LANES) * 4 + column, four, eviction_policy="evict_first")


def mover(packed: torch.Tensor, out: torch.Tensor, num_warps: int, steps: int) -> Callable[[], object]:
    """A call that moves the bytes of ``packed`` into ``out`` (16-bit elements), whole CTAs of them."""
    words, target = packed.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    lanes = 32 * num_warps
    grid = (words.numel() // (lanes * steps),)
    return lambda: move[grid](words, target, lanes, steps, num_warps=num_warps)


READ_WORDS = 4096  # a CTA: 16 KiB


@triton.jit
def read(words, out, LANES: tl.constexpr):
    """words: int32 [n]; out: int32 [n / LANES], the largest word of each CTA: the bytes are read and go nowhere."""
    word = tl.load(words + tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES), eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.max(word, axis=0))


def reader(packed: torch.Tensor) -> Callable[[], object]:
    """A call that reads ``packed`` once, whole CTAs of it: no matmul with the packed weight takes less."""
    words = packed.view(-1).view(torch.int32)
    ctas = words.numel() // READ_WORDS
    out = torch.empty(ctas, dtype=torch.int32, device=packed.device)
    return lambda: read[(ctas,)](words, out, READ_WORDS, num_warps=8)
