"""Define the option ``matmul="auto"``, which multiplies few rows by the packed weight without a dense copy of it."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from ..patching.option import Option
from ..patching.target import LINEAR_4BIT, TESTED_OP, TESTED_UNSLOTH, Target

FAST_GEMV = (("X", "W", "quant_state", "out"),)
MATMUL_LORA = ("X", "W", "W_quant", "A", "B", "s", "out")

# bitsandbytes' matmul_4bit runs one of these functions on the GPU.
INNER = (
    "bitsandbytes.functional:gemv_4bit",
    "bitsandbytes.backends.cuda.ops:_gemm_4bit_kernel_impl",
    "bitsandbytes.backends.cuda.ops:_dequant_linear_fallback",
)

MatmulTarget = functools.partial(Target, option="matmul")


@dataclass(frozen=True)
class MatmulStatus:
    """One measurement of the fused matmul: a weight [out_features, in_features], and x of at most ``rows`` rows."""

    device: int
    rows: int
    out_features: int
    in_features: int
    fused: bool  # whether the fused matmul was faster, and runs
    us: dict[str, float]  # median GPU time in us, by the name of the timed function

    def __str__(self) -> str:
        times = ", ".join(f"{name} {us:.1f} us" for name, us in self.us.items())
        size = f"GPU {self.device}, up to {self.rows} rows x {self.out_features}x{self.in_features}"
        return f"{size}: {'the fused matmul' if self.fused else 'the original'} runs ({times})"


def report(mode: str | int) -> tuple[MatmulStatus, ...]:
    """Return the measurements of this process."""
    module = sys.modules.get(f"{__package__}.choice")  # choice.py imports torch, so it is not imported here
    return module.report() if module else ()


def lines(measured: tuple[MatmulStatus, ...]) -> list[str]:
    fused = sum(each.fused for each in measured)
    return [f"  {fused} of {len(measured)} measured sizes run fused"] if measured else []


def used(measured: tuple[MatmulStatus, ...]) -> int:
    """Return how many products ran in a fused matmul, at any target."""
    from ..patching.counters import counters

    return sum(counter.hits for (*_, kernel), counter in list(counters.hit_counters.items()) if kernel)


MATMUL = Option(
    "NF4_PATCH_MATMUL", ("off", "auto"), "off",
    "auto: multiply few rows (generation, short sequences) straight from the packed weight where measured to be faster. "
    "Off by default, because results are as accurate as the original's but not bit-identical.",
    on="auto", fast="auto", calls="products",
    targets=(
        MatmulTarget(
            "bitsandbytes.backends.cuda.ops:_gemm_4bit_kernel_impl", ">= 0.50", TESTED_OP,
            LINEAR_4BIT, ".matmul.bitsandbytes:gemm",
            'forward of Linear4bit on few rows (generation), with enable(matmul="auto") only',
            own=("_gemm_4bit_kernel_impl",),
        ),
        MatmulTarget(
            "bitsandbytes.functional:gemv_4bit", ">= 0.43", TESTED_OP,
            (("A", "B", "out", "transposed_A", "transposed_B", "state"),), ".matmul.bitsandbytes:gemv",
            'gemv_4bit, which Linear4bit before 0.50 calls for one row (generation), with enable(matmul="auto") only',
            patch_copies=True, own=("gemv_4bit",),
        ),
        MatmulTarget(
            "bitsandbytes.autograd._functions:matmul_4bit", ">= 0.43", TESTED_OP,
            (("A", "B", "quant_state", "out", "bias"),), ".matmul.bitsandbytes:matmul_4bit",
            'eager forward of Linear4bit on few rows without a gradient, with enable(matmul="auto") only',
            patch_copies=True, own=("matmul_4bit",), computes=INNER,
        ),
        MatmulTarget(
            "unsloth.kernels.utils:fast_gemv", "<= 2026.9.12", ("2026.9.7",),
            FAST_GEMV, ".matmul.unsloth:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
            unless="_fast_gemv_bnb", patch_copies=True, own=("fast_gemv",),
        ),
        MatmulTarget(
            "unsloth.kernels.utils:_fast_gemv_bnb", ">= 2026.9.13", ("2026.10.9",),
            FAST_GEMV, ".matmul.unsloth:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
            own=("fast_gemv", "_fast_gemv_bnb"),
        ),
        MatmulTarget(
            "unsloth.kernels.utils:_gemv_rows", ">= 2026.10.9", ("2026.10.9",),
            FAST_GEMV, ".matmul.unsloth:gemv_rows",
            'generation of 2 to UNSLOTH_GEMV_MAX_ROWS (4) sequences at once, with enable(matmul="auto") only',
            own=("_gemv_rows",),
        ),
        MatmulTarget(
            "unsloth.kernels.utils:matmul_lora", ">= 2026.9.7", TESTED_UNSLOTH,
            (MATMUL_LORA, (*MATMUL_LORA, "use_global_buffer")), ".matmul.unsloth:matmul_lora",
            'linear layers with LoRA on few rows (short prompts), with enable(matmul="auto") only',
            patch_copies=True, own=("matmul_lora",),
        ),
    ),
    report=report, lines=lines, used=used,
)  # fmt: skip
