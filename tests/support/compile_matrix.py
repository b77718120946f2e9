"""Compile the kernel for a list of GPUs and print its machine code as JSON: ``python compile_matrix.py main|full``.

This runs in a separate process, because the tests' process may interpret the kernels, and because PYTHONPATH chooses
the Triton that compiles.
"""

from __future__ import annotations

import itertools
import json
import re
import sys

import machine_code
import torch
import triton

from nf4_patch.nf4.dequantize import compilation
from nf4_patch.nf4.dequantize.compilation import Variant

SIZES = (2**20, 2**26)  # elements: each side of every bound in compilation.NUM_WARPS
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALTERNATING = set(zip(machine_code.CAPABILITIES, itertools.cycle(DTYPES), strict=False))
USUAL = {"blocksize": 64, "nested": True, "whole": "even", "aligned": True}


def variant(capability, dtype, numel, blocksize, nested, whole, aligned):
    return Variant(
        num_warps=compilation.warps_for(capability, numel), dtype=dtype, offset_dtype=torch.float32 if nested else None,
        blocksize=blocksize, blocksize2=256 if nested else 0, even=whole == "even", tail=whole == "tail",
        wide=False, aligned=aligned,
    )  # fmt: skip


def cases(kind: str):
    """Yield (capability, variant) for the usual weight with each row of the launch table, and more variants for sm_75.

    "main" alternates the dtypes between the GPUs. Only sm_75 and sm_90 get all dtypes.
    """
    wide = kind == "full"
    for capability, dtype, numel in itertools.product(machine_code.CAPABILITIES, DTYPES, SIZES[not wide :]):
        if wide or capability in ((7, 5), (9, 0)) or (capability, dtype) in ALTERNATING:
            yield capability, variant(capability, dtype, numel, **USUAL)
    if not wide:
        changes = [{"blocksize": 32}, {"nested": False}, {"whole": "ragged"}, {"whole": "tail"}, {"aligned": False}]
        for dtype, change in zip(itertools.cycle(DTYPES), changes, strict=False):
            yield (7, 5), variant((7, 5), dtype, 2**26, **USUAL | change)
        return
    for dtype, blocksize, nested, whole in itertools.product(
        DTYPES, (32, 64, 128, 4096), (True, False), ("even", "ragged", "tail")
    ):
        if whole == "even" or blocksize < 128 or nested:
            yield (7, 5), variant((7, 5), dtype, 2**26, blocksize, nested, whole, aligned=True)
    for capability, dtype in itertools.product(machine_code.CAPABILITIES, DTYPES):
        yield capability, variant(capability, dtype, 2**26, **USUAL | {"aligned": False})
        for blocksize, nested, whole in ((32, True, "even"), (4096, False, "ragged")):
            yield capability, variant(capability, dtype, 2**26, blocksize, nested, whole, aligned=True)


def row(capability, variant) -> dict:
    code = machine_code.code_of(variant, capability)
    return {
        "arch": machine_code.sm(capability),
        "dtype": str(variant.dtype).removeprefix("torch."),
        "nested": variant.offset_dtype is not None,
        "tail": variant.tail,
        "steps": compilation.UNROLL,
        "registers": code.registers,
        "stack": code.stack,
        "shared": code.shared,
        "names": sorted({i.name for i in code.instructions}),
        "loads": [i.opcode for i in code.instructions if i.name == "LDG"],
        "fadd": sum(i.name == "FADD" for i in code.instructions),
        "ptx_fma": len(re.findall(r"\bfma\.", code.ptx)),
        "target": re.findall(r"^\.target (\w+)", code.ptx, re.MULTILINE)[0],
    }


def main(kind: str) -> None:
    rows, unsupported, seen = [], [], set()
    for capability, case in cases(kind):
        if (capability, case) in seen:
            continue
        seen.add((capability, case))
        try:
            rows.append(row(capability, case))
        except machine_code.Unsupported as error:
            unsupported.append([machine_code.sm(capability), str(error)])
    print(json.dumps({"triton": triton.__version__, "rows": rows, "unsupported": unsupported}))


if __name__ == "__main__":
    main(sys.argv[1])
