"""Compile the routing kernels for every GPU, and print "arch dtype kernel registers stack widths", one per line.

This runs in a separate process, because the tests' process may hold Triton's interpreter.
"""

from __future__ import annotations

import re

import machine_code
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nf4_patch.moe import kernels, launch

WIDTH = 768
CONSTANTS = {  # by kernel, those that make it longest
    kernels.combine_kernel: {"TOP_K": 8, "ADDEND": True, "WEIGHTS": True},
    kernels.weigh_kernel: {"ADDEND": True, "WEIGHTS_GRADIENT": True},
    kernels.silu_and_mul_kernel: {"ADDEND": True},
    kernels.silu_and_mul_backward_kernel: {},
}
OTHERS = {"row_of": "*i64", "slot_of": "*i64", "width": "i32", "weights": "*fp32", "weights_gradient": "*fp32"}


def code_of(kernel, constants, dtype, capability):
    values = constants | {"BLOCK": launch.BLOCK}
    names = list(kernel.arg_names)
    signature = {name: OTHERS.get(name, machine_code.POINTERS[dtype]) for name in names}
    signature |= dict.fromkeys(values, "constexpr")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in values}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in values.items()}, attributes)
    target = GPUTarget("cuda", machine_code.sm(capability), 32)
    return triton.compile(source, target=target)


for capability in machine_code.CAPABILITIES:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for kernel, constants in CONSTANTS.items():
            code = machine_code.disassemble(code_of(kernel, constants, dtype, capability).asm["cubin"])
            moved = [each.opcode for each in code.instructions if each.name in ("LDG", "STG")]
            found = "+".join(sorted({(re.search(r"\.(128|64|U8|U16|S16)\b", each) or [0, "32"])[1] for each in moved}))
            name = str(dtype).removeprefix("torch.")
            print(machine_code.sm(capability), name, kernel.__name__, code.registers, code.stack, found)
