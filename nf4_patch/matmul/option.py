"""Define the option ``matmul="auto"``, which multiplies few rows by the packed weight without a dense copy of it."""

from __future__ import annotations

import functools
import sys

from ..patching.option import Option
from ..patching.target import LINEAR_4BIT, TESTED_OP, TESTED_UNSLOTH, Target

FAST_GEMV = (("X", "W", "quant_state", "out"),)
MATMUL_LORA = ("X", "W", "W_quant", "A", "B", "s", "out")

MatmulTarget = functools.partial(Target, option="matmul")


def report(mode: str | int) -> dict[str, str]:
    """Return the measurements of this process by size: whether the fused matmul runs, and the times."""
    module = sys.modules.get(f"{__package__}.choice")  # choice.py imports torch, so it is not imported here
    return module.report() if module else {}


def lines(measured: dict[str, str]) -> list[str]:
    fused = sum(outcome.startswith("the fused matmul") for outcome in measured.values())
    words = f"matmul: {fused} of {len(measured)} sizes measured on this GPU run fused; status().matmul lists them"
    return [words] if measured else []


MATMUL = Option(
    "NF4_PATCH_MATMUL", ("off", "auto"), "off",
    "auto: multiply few rows (generation, short sequences) straight from the packed weight where measured to be faster. "
    "Off by default, because results are as accurate as the original's but not bit-identical.",
    on="auto",
    targets=(
        MatmulTarget(
            "bitsandbytes.backends.cuda.ops:_gemm_4bit_kernel_impl", ">= 0.50", TESTED_OP,
            LINEAR_4BIT, ".matmul.bitsandbytes:gemm",
            'forward of Linear4bit on few rows (generation), with enable(matmul="auto") only',
        ),
        MatmulTarget(
            "bitsandbytes.functional:gemv_4bit", ">= 0.43", TESTED_OP,
            (("A", "B", "out", "transposed_A", "transposed_B", "state"),), ".matmul.bitsandbytes:gemv",
            'gemv_4bit, which Linear4bit before 0.50 calls for one row (generation), with enable(matmul="auto") only',
            patch_copies=True,
        ),
        MatmulTarget(
            "bitsandbytes.autograd._functions:matmul_4bit", ">= 0.43", TESTED_OP,
            (("A", "B", "quant_state", "out", "bias"),), ".matmul.bitsandbytes:matmul_4bit",
            'eager forward of Linear4bit on few rows without a gradient, with enable(matmul="auto") only',
            patch_copies=True,
        ),
        MatmulTarget(
            "unsloth.kernels.utils:fast_gemv", "<= 2026.9.12", ("2026.9.7",),
            FAST_GEMV, ".matmul.unsloth:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
            unless="_fast_gemv_bnb", patch_copies=True,
        ),
        MatmulTarget(
            "unsloth.kernels.utils:_fast_gemv_bnb", ">= 2026.9.13", ("2026.10.9",),
            FAST_GEMV, ".matmul.unsloth:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
        ),
        MatmulTarget(
            "unsloth.kernels.utils:_gemv_rows", ">= 2026.10.9", ("2026.10.9",),
            FAST_GEMV, ".matmul.unsloth:gemv_rows",
            'generation of 2 to UNSLOTH_GEMV_MAX_ROWS (4) sequences at once, with enable(matmul="auto") only',
        ),
        MatmulTarget(
            "unsloth.kernels.utils:matmul_lora", ">= 2026.9.7", TESTED_UNSLOTH,
            (MATMUL_LORA, (*MATMUL_LORA, "use_global_buffer")), ".matmul.unsloth:matmul_lora",
            'linear layers with LoRA on few rows (short prompts), with enable(matmul="auto") only',
            patch_copies=True,
        ),
    ),
    report=report, lines=lines,
)  # fmt: skip
