"""Everything that nf4_patch replaces in Unsloth."""

from __future__ import annotations

import functools

from ...patching.target import Target
from ...patching.targets import Library

TESTED = ("2026.9.7", "2026.10.9")
FAST_DEQUANTIZE = ("W", "quant_state", "out", "use_global_buffer")
FAST_GEMV = (("X", "W", "quant_state", "out"),)
MATMUL_LORA = ("X", "W", "W_quant", "A", "B", "s", "out")
MODULE = "unsloth.kernels.utils"

MatmulTarget = functools.partial(Target, option="matmul")

UNSLOTH = Library(
    targets=(
        Target(
            f"{MODULE}:fast_dequantize", "<= 2026.9.12", ("2026.6.9", "2026.9.7"),
            (FAST_DEQUANTIZE,), ".libraries.unsloth.adapters:fast_dequantize",
            "every 4-bit weight of Unsloth's LoRA kernels, generation and saving",
            unless="_fast_dequantize_bnb", patch_copies=True,
        ),
        Target(
            f"{MODULE}:_fast_dequantize_bnb", ">= 2026.9.13", ("2026.9.14", "2026.10.9"),
            (FAST_DEQUANTIZE, (*FAST_DEQUANTIZE, "dtype")), ".libraries.unsloth.adapters:fast_dequantize",
            "every 4-bit weight of Unsloth's LoRA kernels, generation and saving",
        ),
        MatmulTarget(
            f"{MODULE}:fast_gemv", "<= 2026.9.12", ("2026.9.7",),
            FAST_GEMV, ".libraries.unsloth.adapters:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
            unless="_fast_gemv_bnb", patch_copies=True, own=("fast_gemv",),
        ),
        MatmulTarget(
            f"{MODULE}:_fast_gemv_bnb", ">= 2026.9.13", ("2026.10.9",),
            FAST_GEMV, ".libraries.unsloth.adapters:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
            own=("fast_gemv", "_fast_gemv_bnb"),
        ),
        MatmulTarget(
            f"{MODULE}:_gemv_rows", ">= 2026.10.9", ("2026.10.9",),
            FAST_GEMV, ".libraries.unsloth.adapters:gemv_rows",
            'generation of 2 to UNSLOTH_GEMV_MAX_ROWS (4) sequences at once, with enable(matmul="auto") only',
            own=("_gemv_rows",),
        ),
        MatmulTarget(
            f"{MODULE}:matmul_lora", ">= 2026.9.7", TESTED,
            (MATMUL_LORA, (*MATMUL_LORA, "use_global_buffer")), ".libraries.unsloth.adapters:matmul_lora",
            'linear layers with LoRA on few rows (short prompts), with enable(matmul="auto") only',
            patch_copies=True, own=("matmul_lora",),
        ),
    ),
)  # fmt: skip
