"""``nf4-patch bench --matmul``: X @ W.T with a 4-bit W, by rows of X: ours, theirs and dense."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import nf4_patch

from ...nf4.dequantize import reference
from ...nf4.weight import Weight
from ...patching.counters import counters
from ...patching.quant_state import weight_of
from ..llama import Shape, projections, training_dtype
from ..patch import patch
from ..report import NotAvailable, Progress, silent
from .baselines import BITSANDBYTES, OURS, UNSLOTH_MODULE, from_unsloth, original
from .dequantize import Packed, random_weights, subject_of
from .record import Bench, Check, Row, accuracy
from .timing import gpu_times, machine, over, rotation

UNSLOTH = "Unsloth GEMV"  # one row only
DEQUANTIZE = "dequantize + matmul"
THEIR_DEQUANTIZE = "theirs, dequantize + matmul"
DENSE = "dense"
ROWS = tuple(2**i for i in range(14))
Functions = dict[str, Callable[..., Any]]
CHECKED_ROWS = 512  # of X, against fp64: every row count that the fused matmul has a table for
METHOD = (
    "GPU time of one matmul of M rows, us: CUDA-graph replays over weights that overflow the L2, alternating, medians. "
    f'{OURS}: bitsandbytes\' op with enable(matmul="auto"); {BITSANDBYTES}: the same op unpatched. '
    f"{DEQUANTIZE}: our kernel, then F.linear. {DENSE}: F.linear of a 16-bit weight."
)


def exact(layout: Weight) -> torch.Tensor:
    """The weight in fp64: code * scale with no rounding to 16 bits."""
    scales = reference.block_scales(layout, False).double().repeat_interleave(layout.blocksize)
    packed = layout.bytes()
    nibbles = torch.stack((packed >> 4, packed & 15), -1).reshape(-1).long()
    return (layout.code.double()[nibbles] * scales).view(tuple(layout.shape))


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def multiply(x: torch.Tensor, packed: torch.Tensor, state: Any) -> torch.Tensor:
    """bitsandbytes' op for a nested state: what Linear4bit's forward reaches."""
    fields = state.state2.absmax, state.blocksize, state.quant_type, None, state.absmax, state.state2.code, state.offset
    return torch.ops.bitsandbytes.gemm_4bit(x, packed, list(state.shape), *fields)


def gemv() -> Callable[..., Any] | None:
    """Unsloth's own matmul of one row, unpatched; None where it is not installed or refuses this machine."""
    found: Callable[..., Any] | None = from_unsloth(
        lambda: original(UNSLOTH_MODULE, "_fast_gemv_bnb") or original(UNSLOTH_MODULE, "fast_gemv")
    )
    return found


def fused_matmul_hits() -> int:
    return sum(counter.hits for key, counter in counters.hit_counters.items() if key[2].endswith("fused matmul"))


def others(x: torch.Tensor, unsloth: Callable[..., Any] | None) -> Functions:
    """By name what else multiplies x by the packed weight of a state, with the patch off; ``unsloth`` one row only."""
    dequantize = original("bitsandbytes.functional", "dequantize_4bit")
    found: Functions = {
        BITSANDBYTES: functools.partial(multiply, x),
        DEQUANTIZE: lambda packed, state: F.linear(x, nf4_patch.dequantize_nf4(packed, state)),
        THEIR_DEQUANTIZE: lambda packed, state: F.linear(x, dequantize(packed, state)),
    }
    if len(x) == 1 and unsloth is not None:
        row = x.view(1, 1, -1)
        found[UNSLOTH] = lambda packed, state: unsloth(row, packed, state)
    return found


class Weights:
    """Packed weights of one shape, and what the first of them is."""

    def __init__(self, packed: Sequence[Packed]):
        self.packed = packed
        weight, state = packed[0]
        self.dense: torch.Tensor = original("bitsandbytes.functional", "dequantize_4bit")(weight, state)
        self.exact = exact(weight_of(weight, state))  # in fp64
        self.subject = subject_of(self.dense.shape, self.dense.dtype)

    @classmethod
    def random(cls, shape: tuple[int, int], dtype: torch.dtype) -> Weights:
        """Enough to overflow the L2."""
        return cls(random_weights(shape, dtype, max(4, min(24, rotation(shape[0] * shape[1] // 2)))))

    def rows_of_x(self, m: int) -> torch.Tensor:
        return torch.randn(m, self.dense.shape[1], dtype=self.dense.dtype, device=self.dense.device)

    def check(self, x: torch.Tensor, ours: torch.Tensor) -> Check:
        """``ours`` for x and the first weight: its error against fp64, which that of dequantize + matmul limits."""
        truth = x.double() @ self.exact.t()
        return accuracy(error(ours, truth), error(x @ self.dense.t(), truth))


def one_matmul(weights: Weights, dense: Sequence[torch.Tensor], m: int, unsloth: Callable[..., Any] | None) -> Row:
    """Check ours against fp64, then time every variant; ``dense``: 16-bit weights of the same shape."""
    x = weights.rows_of_x(m)
    before = fused_matmul_hits()
    with patch(True, matmul="auto"):
        ours = multiply(x, *weights.packed[0])
    fused = fused_matmul_hits() > before
    checks = {"fp64": weights.check(x[:CHECKED_ROWS], ours[:CHECKED_ROWS])}
    few = weights.packed if m <= 256 else weights.packed[:4]  # then X, the dense weight and the result overflow the L2
    functions: Functions = {OURS: functools.partial(multiply, x), **others(x, unsloth)}
    variants = over(few, functions)
    variants[DENSE] = [functools.partial(F.linear, x, weight) for weight in dense]
    n, k = dense[0].shape
    times = gpu_times(variants, rounds=10, inside=lambda name: patch(name == OURS, matmul="auto"))
    notes = {"fused": "yes" if fused else "no"}
    return Row(f"M={m}", "us", times, checks, sizes={"n": n, "k": k, "m": m}, notes=notes)


def require_gemm() -> None:
    """
    Raises:
        NotAvailable: bitsandbytes has no fused matmul to compare with (before 0.50).
    """
    import bitsandbytes  # noqa: F401 (registers its ops)

    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        raise NotAvailable("bitsandbytes before 0.50 has no gemm_4bit to compare with: pip install -U bitsandbytes")


def measure(models: Iterable[Shape], with_unsloth: bool = True, tell: Progress = silent) -> Bench:
    """Every projection of the models by rows of X.

    Raises:
        NotAvailable: what :func:`require_gemm` says.
    """
    require_gemm()
    unsloth = gemv() if with_unsloth else None
    chosen = dict.fromkeys(shape for model in models for shape in projections(model))
    sections: dict[str, list[Row]] = {}
    dtype = training_dtype()
    with patch(False):
        for i, shape in enumerate(chosen):
            weights = Weights.random(shape, dtype)
            dense = [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4)]
            section = sections.setdefault(weights.subject, [])
            for m in ROWS:
                tell(f"matmul {weights.subject}, {m} rows", i, len(chosen))
                section.append(one_matmul(weights, dense, m, unsloth))
            del weights, dense
            torch.cuda.empty_cache()
    return Bench(machine(), sections, dict.fromkeys(sections, METHOD))
