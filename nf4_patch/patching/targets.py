"""What is replaced: one row a target. An option's rows stand in its own folder."""

from __future__ import annotations

from .option import OPTIONS
from .target import LINEAR_4BIT, TESTED_OP, OwnKernel, Target

TESTED_BITSANDBYTES = ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2", "0.50.2")
FAST_DEQUANTIZE = ("W", "quant_state", "out", "use_global_buffer")

# In the order of the fields: function, releases, tested, parameters, replace, covers.
TARGETS: list[Target] = [
    Target(
        "bitsandbytes.functional:dequantize_4bit", ">= 0.43", TESTED_BITSANDBYTES,
        (("A", "quant_state", "absmax", "out", "blocksize", "quant_type"),), ".adapters.bitsandbytes:dequantize_4bit",
        "backward of every Linear4bit, forward before 0.50; peft merge and DoRA; model.dequantize()",
        readers="bitsandbytes.autograd._functions", patch_copies=True,
    ),
    Target(
        "bitsandbytes.backends.cuda.ops:_dequant_linear_fallback", ">= 0.50", TESTED_OP,
        LINEAR_4BIT, ".adapters.bitsandbytes:dequant_linear",
        "forward of Linear4bit in training, and its recompute under gradient checkpointing",
    ),
    Target(
        "unsloth.kernels.utils:fast_dequantize", "<= 2026.9.12", ("2026.6.9", "2026.9.7"),
        (FAST_DEQUANTIZE,), ".adapters.unsloth:fast_dequantize",
        "every 4-bit weight of Unsloth's LoRA kernels, decoding and saving",
        unless="_fast_dequantize_bnb", readers="unsloth.", patch_copies=True,
    ),
    Target(
        "unsloth.kernels.utils:_fast_dequantize_bnb", ">= 2026.9.13", ("2026.9.14", "2026.10.9"),
        (FAST_DEQUANTIZE, (*FAST_DEQUANTIZE, "dtype")), ".adapters.unsloth:fast_dequantize",
        "every 4-bit weight of Unsloth's LoRA kernels, decoding and saving",
        readers="unsloth.",
        own_kernel=OwnKernel(
            used="_USE_NF4_KERNELS",
            releases=">= 2026.10",
            # H200, torch 2.11, triton 3.6.0, Unsloth 2026.10.9: 7.6 us of the host per call against 11.1 into the global
            # buffer and 9.4 against 24.0 into a new tensor; 1.02x (591 MB) to 1.35x (2.6 MB) on the GPU.
            slower_on=((9, 0),),
            advice="Unsloth from 2026.10 on trains compiled layers, which keep its own NF4 kernel: training gains only with "
            'enable(cache="auto") or a size (PyTorch >= 2.11), where these layers read weights that were dequantized once.',
        ),
    ),
    *(target for option in OPTIONS.values() for target in option.targets),
]  # fmt: skip
