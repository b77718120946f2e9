"""The table of all replaced functions, one row per function. Rows that need an option are defined in its folder."""

from __future__ import annotations

from .option import OPTIONS
from .target import LINEAR_4BIT, TESTED_OP, Target

TESTED_BITSANDBYTES = ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2", "0.50.2")
FAST_DEQUANTIZE = ("W", "quant_state", "out", "use_global_buffer")

# The positional arguments of each row are function, releases, tested, parameters, replace and covers.
TARGETS: list[Target] = [
    Target(
        "bitsandbytes.functional:dequantize_4bit", ">= 0.43", TESTED_BITSANDBYTES,
        (("A", "quant_state", "absmax", "out", "blocksize", "quant_type"),), ".adapters.bitsandbytes:dequantize_4bit",
        "backward of every Linear4bit, and its forward before 0.50; peft's merge and DoRA; model.dequantize()",
        patch_copies=True,
    ),
    Target(
        "bitsandbytes.backends.cuda.ops:_dequant_linear_fallback", ">= 0.50", TESTED_OP,
        LINEAR_4BIT, ".adapters.bitsandbytes:dequant_linear",
        "forward of Linear4bit in training, and its recompute under gradient checkpointing",
        own=("_dequant_linear_fallback",),
    ),
    Target(
        "unsloth.kernels.utils:fast_dequantize", "<= 2026.9.12", ("2026.6.9", "2026.9.7"),
        (FAST_DEQUANTIZE,), ".adapters.unsloth:fast_dequantize",
        "every 4-bit weight of Unsloth's LoRA kernels, generation and saving",
        unless="_fast_dequantize_bnb", patch_copies=True,
    ),
    Target(
        "unsloth.kernels.utils:_fast_dequantize_bnb", ">= 2026.9.13", ("2026.9.14", "2026.10.9"),
        (FAST_DEQUANTIZE, (*FAST_DEQUANTIZE, "dtype")), ".adapters.unsloth:fast_dequantize",
        "every 4-bit weight of Unsloth's LoRA kernels, generation and saving",
    ),
    *(target for option in OPTIONS.values() for target in option.targets),
]  # fmt: skip
