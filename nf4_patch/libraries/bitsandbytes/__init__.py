"""Everything that nf4_patch replaces in bitsandbytes."""

from __future__ import annotations

from ...patching.target import Target
from ...patching.targets import Library

TESTED = ("0.45.5", "0.46.1", "0.47.0", "0.48.2", "0.49.2", "0.50.2")
TESTED_AUTOGRAD = ("0.49.2", "0.50.2")
TESTED_OP = ("0.50.2",)
SECOND_LEVEL = ("absmax_8bit", "absmax_code", "absmax_offset")
LINEAR_4BIT = (("A", "B", "shapeB", "absmax", "blocksize", "quant_type", "bias", *SECOND_LEVEL),)
NAME = "bitsandbytes"
FUNCTIONS = "bitsandbytes.functional"
LAYERS = "bitsandbytes.nn.modules"
AUTOGRAD = "bitsandbytes.autograd._functions"
OPS = "bitsandbytes.backends.cuda.ops"
PARAMETRIZE = "bitsandbytes.nn.parametrize"
STATE = ".quant_state.bitsandbytes__"  # A QuantState's key in a checkpoint is the weight's key + STATE + quant_type.
# The keys of a QuantState's parts in a checkpoint are the weight's key + "." + one of these fields.
FIELDS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *(STATE[1:] + kind for kind in ("nf4", "fp4")))

LIBRARY = Library(
    targets=(
        Target(
            f"{FUNCTIONS}:dequantize_4bit", ">= 0.43", TESTED,
            (("A", "quant_state", "absmax", "out", "blocksize", "quant_type"),), ".libraries.bitsandbytes.adapters:dequantize_4bit",
            "backward of every Linear4bit, and its forward before 0.50; peft's merge and DoRA; model.dequantize()",
            patch_copies=True,
        ),
        Target(
            f"{OPS}:_dequant_linear_fallback", ">= 0.50", TESTED_OP,
            LINEAR_4BIT, ".libraries.bitsandbytes.adapters:dequant_linear",
            "forward of Linear4bit in training, and its recompute under gradient checkpointing",
            own=("_dequant_linear_fallback",),
        ),
        Target(
            f"{OPS}:_gemm_4bit_kernel_impl", ">= 0.50", TESTED_OP,
            LINEAR_4BIT, ".libraries.bitsandbytes.adapters:gemm",
            'forward of Linear4bit on few rows (generation), with enable(matmul="auto") only',
            option="matmul", own=("_gemm_4bit_kernel_impl",), rows=64, timed=".libraries.bitsandbytes.adapters:call_gemm",
        ),
        Target(
            f"{FUNCTIONS}:gemv_4bit", ">= 0.43", TESTED_OP,
            (("A", "B", "out", "transposed_A", "transposed_B", "state"),), ".libraries.bitsandbytes.adapters:gemv",
            'gemv_4bit, which Linear4bit before 0.50 calls for one row (generation), with enable(matmul="auto") only',
            option="matmul", patch_copies=True, own=("gemv_4bit",), rows=1, timed=".libraries.bitsandbytes.adapters:call_gemv",
        ),
        Target(
            f"{AUTOGRAD}:matmul_4bit", ">= 0.43", TESTED_OP,
            (("A", "B", "quant_state", "out", "bias"),), ".libraries.bitsandbytes.adapters:matmul_4bit",
            'eager forward of Linear4bit on few rows without a gradient, with enable(matmul="auto") only',
            option="matmul", patch_copies=True, own=("matmul_4bit",),
            # matmul_4bit runs one of these functions on the GPU.
            computes=(f"{FUNCTIONS}:gemv_4bit", f"{OPS}:_gemm_4bit_kernel_impl", f"{OPS}:_dequant_linear_fallback"),
        ),
        Target(
            f"{AUTOGRAD}:MatMul4Bit.forward", ">= 0.43", TESTED_AUTOGRAD,
            (("ctx", "A", "B", "out", "bias", "quant_state"),), ".libraries.bitsandbytes.adapters:observed",
            'the size of each batch, for cache="auto" and offload="auto", with enable(cache=...) or enable(offload=...) only',
            option="cache", or_option="offload", uncounted="it only observes",
        ),
    ),
    modules={"4-bit functions": FUNCTIONS, "4-bit layers": LAYERS, "4-bit autograd": AUTOGRAD, "4-bit parametrization": PARAMETRIZE},
)  # fmt: skip
