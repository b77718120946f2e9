"""python -m benchmarks.matmul: X @ W.T for the 4-bit weights of a Llama 8B, by rows of X, compared with other functions
and 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import main
from benchmarks.models import LLAMA_8B, projections, training_dtype
from benchmarks.products import DEQUANTIZE, Functions, Weights, gemv, multiply, others, require_gemm
from benchmarks.record import BITSANDBYTES, OURS, Check, Row, accuracy
from benchmarks.timing import gpu_times, over
from nf4_patch.patching.counters import counters
from nf4_patch.tools.patch import dequantize_4bit, patch
from nf4_patch.tools.report import Progress

THEIR_DEQUANTIZE = "theirs, dequantize + matmul"
DENSE = "dense"
ROWS = tuple(2**i for i in range(7))
METHOD = (
    "GPU time of one matmul of M rows, us: medians of alternating CUDA-graph replays over weights that overflow the L2 cache. "
    f'{OURS}: bitsandbytes\' op with enable(matmul="auto"); {BITSANDBYTES}: the same op unpatched. '
    f"{DEQUANTIZE}: our kernel, then F.linear. {DENSE}: F.linear with a 16-bit weight."
)


def fused_matmul_hits() -> int:
    return sum(counter.hits for key, counter in counters.hit_counters.items() if key[3] == "fused matmul")


def one_matmul(weights: Weights, dense: Sequence[torch.Tensor], m: int, unsloth: Callable[..., Any] | None) -> Row:
    """Check nf4_patch's result against fp64, then time every variant. ``dense`` has 16-bit weights of the same shape."""
    x = weights.rows_of_x(m)
    before = fused_matmul_hits()
    with patch(True, matmul="auto"):
        ours = multiply(x, *weights.packed[0])
    fused = fused_matmul_hits() > before
    checks: dict[str, Check] = {"fp64": accuracy(*weights.errors(x, ours))}
    theirs = dequantize_4bit()
    functions: Functions = {OURS: functools.partial(multiply, x), **others(x, unsloth)}
    functions[THEIR_DEQUANTIZE] = lambda packed, state: F.linear(x, theirs(packed, state))
    variants = over(weights.packed, functions)
    variants[DENSE] = [functools.partial(F.linear, x, weight) for weight in dense]
    n, k = dense[0].shape
    times = gpu_times(variants, rounds=10, inside=lambda name: patch(name == OURS, matmul="auto"))
    notes = {"fused": "yes" if fused else "no"}
    return Row(f"M={m}", "us", times, checks, sizes={"n": n, "k": k, "m": m}, notes=notes)


@patch(False)
def of_shape(shape: tuple[int, int], unsloth: Callable[..., Any] | None, tell: Progress) -> tuple[str, list[Row]]:
    """Return the name of a weight shape and its rows."""
    weights = Weights.random(shape, training_dtype())
    dense = [torch.randn(shape, dtype=training_dtype(), device="cuda") for _ in range(4)]
    rows = []
    for i, m in enumerate(ROWS):
        tell(f"matmul {weights.subject}, {m} rows", i, len(ROWS))
        rows.append(one_matmul(weights, dense, m, unsloth))
    return weights.subject, rows


def sections(tell: Progress) -> Iterator[tuple[str, list[Row]]]:
    require_gemm()
    unsloth = gemv()
    for shape in projections(LLAMA_8B):
        yield of_shape(shape, unsloth, tell)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(METHOD, lambda tell: dict(sections(tell)))
