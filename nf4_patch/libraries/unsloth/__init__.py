"""Everything that nf4_patch replaces in Unsloth."""

from __future__ import annotations

import functools

from ...patching.target import ANY, Target
from ...patching.targets import Library

TESTED = ("2026.9.7", "2026.10.9")
FAST_DEQUANTIZE = ("W", "quant_state", "out", "use_global_buffer")
FAST_GEMV = (("X", "W", "quant_state", "out"),)
MATMUL_LORA = ("X", "W", "W_quant", "A", "B", "s", "out")
NAME, MODULE = "unsloth", "unsloth.kernels.utils"
CHECKPOINTING = "unsloth_zoo.gradient_checkpointing"
# Fields that Unsloth writes into adapter_config.json. LAYOUT holds the layout of lora_B, and LAYOUTS one layout per stack.
LAYOUT, LAYOUTS, FIXED = "lora_B_layout", "unsloth_fused_expert_lora", "unsloth_fixed"

DEQUANTIZE = ".libraries.unsloth.adapters:fast_dequantize"
TIMED = ".libraries.unsloth.adapters:rows_of_tokens"
MatmulTarget = functools.partial(Target, option="matmul")

LIBRARY = Library(
    targets=(
        Target(
            f"{MODULE}:fast_dequantize", "<= 2026.9.12", ("2026.6.9", "2026.9.7"),
            (FAST_DEQUANTIZE,), DEQUANTIZE,
            "every 4-bit weight of Unsloth's LoRA kernels, generation and saving",
            unless="_fast_dequantize_bnb", patch_copies=True,
        ),
        Target(
            f"{MODULE}:_fast_dequantize_bnb", ">= 2026.9.13", ("2026.9.14", "2026.10.9"),
            (FAST_DEQUANTIZE, (*FAST_DEQUANTIZE, "dtype")), DEQUANTIZE,
            "every 4-bit weight of Unsloth's LoRA kernels, generation and saving",
        ),
        MatmulTarget(
            f"{MODULE}:fast_gemv", "<= 2026.9.12", ("2026.9.7",),
            FAST_GEMV, ".libraries.unsloth.adapters:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
            unless="_fast_gemv_bnb", patch_copies=True, own=("fast_gemv",), rows=1, timed=TIMED,
        ),
        MatmulTarget(
            f"{MODULE}:_fast_gemv_bnb", ">= 2026.9.13", ("2026.10.9",),
            FAST_GEMV, ".libraries.unsloth.adapters:fast_gemv",
            'one row of every 4-bit weight (generation), with enable(matmul="auto") only',
            own=("fast_gemv", "_fast_gemv_bnb"), rows=1, timed=TIMED,
        ),
        MatmulTarget(
            f"{MODULE}:_gemv_rows", ">= 2026.10.9", ("2026.10.9",),
            FAST_GEMV, ".libraries.unsloth.adapters:gemv_rows",
            'generation of 2 to UNSLOTH_GEMV_MAX_ROWS (4) sequences at once, with enable(matmul="auto") only',
            own=("_gemv_rows",), rows=4, timed=TIMED,
        ),
        MatmulTarget(
            f"{MODULE}:matmul_lora", ">= 2026.9.7", TESTED,
            (MATMUL_LORA, (*MATMUL_LORA, "use_global_buffer")), ".libraries.unsloth.adapters:matmul_lora",
            'linear layers with LoRA on few rows (short prompts), with enable(matmul="auto") only',
            patch_copies=True, own=("matmul_lora",),
        ),
        *(
            Target(
                f"unsloth.kernels.fast_lora:{name}.forward", ">= 2026.9.7", TESTED,
                ANY, ".libraries.bitsandbytes.adapters:observed",
                'the size of each batch, for offload="auto", with enable(offload=...) only',
                option="offload", uncounted="it only observes", required=False,
            )
            for name in ("LoRA_QKV", "LoRA_W", "LoRA_MLP")
        ),
    ),
    relays={
        MODULE: "fast_dequantize",
        "unsloth_zoo.temporary_patches.bitsandbytes_large_tensors": "dequantize_4bit",
    },
    checkpoint=(CHECKPOINTING, "unsloth_checkpoint"),
    folders=("unsloth_compiled_cache",), folder_variable="UNSLOTH_COMPILE_LOCATION",
)  # fmt: skip
