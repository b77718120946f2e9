"""Compile every row of Hopper's table and print "block_m shared serialized wgmmas" a line, ``serialized`` as ptxas says it.

A process of its own, because the tests' process may hold Triton's interpreter.
"""

from __future__ import annotations

import subprocess
import tempfile

import torch
import triton
from machine_code import tool
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from nf4_patch.nf4.dequantize.compilation import PTX_TYPES
from nf4_patch.nf4.matmul import hopper
from nf4_patch.nf4.matmul.hopper_kernels import hopper_kernel as kernel
from nf4_patch.nf4.matmul.tuning import HOPPER_ROWS

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.float32: "fp32"}


def compiled(config, dtype, bias):
    boxes = hopper.boxes(config.block_m, dtype)
    types = [f"tensordesc<{TYPES[kind]}{box},{layout!r}>" for box, layout, kind in boxes]
    types += ["*fp32", "*i32", "*fp32", "*" + TYPES[dtype], *["i32"] * 5, *["constexpr"] * 5]
    values = (*config, bias, hopper.decode_ptx(PTX_TYPES[dtype]))
    first = len(types) - len(values)
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("sums", "flags", "code", "bias")}
    constants = {(first + i,): value for i, value in enumerate(values)}
    source = GluonASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 1})


for config in {row.config for row in HOPPER_ROWS}:
    for dtype, bias in ((torch.bfloat16, False), (torch.float16, True)):
        code = compiled(config, dtype, bias)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(code.asm["ptx"])
            file.flush()
            command = [tool("ptxas"), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        print(config.block_m, code.metadata.shared, "serialized" in said, code.asm["ptx"].count("wgmma.mma_async"))
