"""``nf4-patch bench --matmul``: X @ W.T with a 4-bit W, by rows of X: ours, theirs and dense."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import nf4_patch

from ...nf4.dequantize import reference
from ...nf4.layout import Layout
from ...patching.counters import counters
from ...patching.quant_state import fields_of
from ..llama import Shape, training_dtype
from ..patch import patch
from ..report import Progress, require_gpu, silent
from .baselines import BITSANDBYTES, OURS, UNSLOTH_MODULE, from_unsloth, original
from .dequantize import random_weights, subject_of
from .record import Bench, Row, accuracy
from .shapes import LLAMA_8B, LLAMA_70B, projections
from .timing import Call, gpu_times, machine, rotation

UNSLOTH = "Unsloth GEMV"  # one row only
DEQUANTIZE = "dequantize + matmul"
THEIR_DEQUANTIZE = "theirs, dequantize + matmul"
DENSE = "dense"
ROWS = tuple(2**i for i in range(14))
CHECKED_ROWS = 512  # of X, against fp64: every row count that the fused matmul has a table for
METHOD = (
    "GPU time of one matmul of M rows, us: CUDA-graph replays over weights that overflow the L2, alternating, medians. "
    f'{OURS}: bitsandbytes\' op with enable(matmul="auto"); {BITSANDBYTES}: the same op unpatched. '
    f"{DEQUANTIZE}: our kernel, then F.linear. {DENSE}: F.linear of a 16-bit weight."
)


def exact(layout: Layout) -> torch.Tensor:
    """The weight in fp64: code * scale with no rounding to 16 bits."""
    scales = reference.block_scales(layout, False).double().repeat_interleave(layout.blocksize)
    packed = layout.bytes()
    nibbles = torch.stack((packed >> 4, packed & 15), -1).reshape(-1).long()
    return (layout.code.double()[nibbles] * scales).view(tuple(layout.shape))


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def multiply(x: torch.Tensor, packed: torch.Tensor, state: Any) -> torch.Tensor:
    """bitsandbytes' op for a nested state: what Linear4bit's forward reaches."""
    return torch.ops.bitsandbytes.gemm_4bit(
        x, packed, list(state.shape), state.state2.absmax, state.blocksize, state.quant_type, None,
        state.absmax, state.state2.code, state.offset,
    )  # fmt: skip


def gemv() -> Callable[..., Any] | None:
    """Unsloth's own matmul of one row, unpatched; None where it is not installed or refuses this machine."""
    found: Callable[..., Any] | None = from_unsloth(
        lambda: original(UNSLOTH_MODULE, "_fast_gemv_bnb") or original(UNSLOTH_MODULE, "fast_gemv")
    )
    return found


def fused_matmul_hits() -> int:
    return sum(counter.hits for key, counter in counters.hit_counters.items() if key[2].endswith("fused matmul"))


def others(x: torch.Tensor, unsloth: Callable[..., Any] | None) -> dict[str, Callable[..., Any]]:
    """By name what else multiplies x by the packed weight of a state, with the patch off; ``unsloth`` one row only."""
    dequantize = original("bitsandbytes.functional", "dequantize_4bit")
    found: dict[str, Callable[..., Any]] = {
        BITSANDBYTES: functools.partial(multiply, x),
        DEQUANTIZE: lambda packed, state: F.linear(x, nf4_patch.dequantize_nf4(packed, state)),
        THEIR_DEQUANTIZE: lambda packed, state: F.linear(x, dequantize(packed, state)),
    }
    if len(x) == 1 and unsloth is not None:
        row = x.view(1, 1, -1)
        found[UNSLOTH] = lambda packed, state: unsloth(row, packed, state)
    return found


def one_matmul(
    weights: Sequence[tuple[torch.Tensor, Any]], dense: Sequence[torch.Tensor], truth_weight: torch.Tensor,
    m: int, unsloth: Callable[..., Any] | None,
) -> Row:  # fmt: skip
    """Check ours against fp64, then time every variant over ``weights``."""
    n, k = dense[0].shape
    x = torch.randn(m, k, dtype=dense[0].dtype, device="cuda")
    dequantize = original("bitsandbytes.functional", "dequantize_4bit")
    packed, state = weights[0]
    before = fused_matmul_hits()
    with patch(True, matmul="auto"):
        ours = multiply(x, packed, state)[:CHECKED_ROWS]
    fused = fused_matmul_hits() > before
    theirs = F.linear(x, dequantize(packed, state))[:CHECKED_ROWS]
    truth = x[:CHECKED_ROWS].double() @ truth_weight.t()
    checks = {"fp64": accuracy(error(ours, truth), error(theirs, truth))}

    few = weights if m <= 256 else weights[:4]  # then X, the 16-bit weight and the result overflow the L2 themselves

    def calls(function: Callable[..., Any]) -> list[Call]:
        return [functools.partial(function, packed, state) for packed, state in few]

    variants: dict[str, Sequence[Call]] = {
        OURS: calls(functools.partial(multiply, x)),
        **{name: calls(function) for name, function in others(x, unsloth).items()},
        DENSE: [functools.partial(F.linear, x, weight) for weight in dense],
    }
    sizes, notes = {"n": n, "k": k, "m": m}, {"fused": "yes" if fused else "no"}
    times = gpu_times(variants, rounds=10, around={OURS: functools.partial(patch, True, matmul="auto")})
    return Row(f"M={m}", "us", times, checks, sizes=sizes, notes=notes)


def check_machine() -> None:
    """Whether the fused matmul can be compared here.

    Raises:
        RuntimeError: there is no NVIDIA GPU, or bitsandbytes has no fused matmul to compare with (before 0.50).
    """
    require_gpu()
    import bitsandbytes  # noqa: F401 (registers its ops)

    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        raise RuntimeError("bitsandbytes before 0.50 has no gemm_4bit to compare with: pip install -U bitsandbytes")


def rotating(shape: tuple[int, int], dtype: torch.dtype) -> list[tuple[torch.Tensor, Any]]:
    """Enough weights to overflow the L2."""
    return random_weights(shape, dtype, max(4, min(24, rotation(shape[0] * shape[1] // 2))))


def measure(
    models: Iterable[Shape] | None = None,
    rows: Sequence[int] = ROWS,
    with_unsloth: bool = True,
    tell: Progress = silent,
) -> Bench:
    """Every projection of the models by rows of X.

    Raises:
        RuntimeError: what :func:`check_machine` says.
    """
    check_machine()
    unsloth = gemv() if with_unsloth else None
    chosen = [shape for model in models or (LLAMA_8B, LLAMA_70B) for shape in projections(model)]
    sections: dict[str, list[Row]] = {}
    dtype = training_dtype()
    with patch(False):
        for i, shape in enumerate(dict.fromkeys(chosen)):
            weights = rotating(shape, dtype)
            dense = [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4)]
            packed, state = weights[0]
            truth_weight = exact(Layout(packed, *fields_of(state)))
            section = sections.setdefault(subject_of(shape, dtype), [])
            for m in rows:
                tell(f"matmul {subject_of(shape, dtype)}, {m} rows", i, len(chosen))
                section.append(one_matmul(weights, dense, truth_weight, m, unsloth))
            del weights, dense, truth_weight
            torch.cuda.empty_cache()
    return Bench(machine(), sections, dict.fromkeys(sections, METHOD))
