"""hub_kernel.py FOLDER [KERNELS]: load the repository in FOLDER with Hugging Face's `kernels`, and compare its bits with bitsandbytes.

KERNELS is the folder that `kernels` is installed in. bitsandbytes would download kernels of its own if it found the package, so
bitsandbytes is imported first.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import bitsandbytes
import quick_interpreter
import torch

folder, *installed = sys.argv[1:]
sys.path[:0] = installed
from kernels import get_local_kernel

GPU = torch.cuda.is_available()
with mock.patch.dict(os.environ, {} if GPU else {"TRITON_INTERPRET": "1"}):
    kernel = get_local_kernel(Path(folder))
assert not kernel.__name__.startswith("nf4_patch") and kernel.__file__.startswith(folder)
used = {name: module for name, module in sys.modules.items() if name.startswith(f"{kernel.__name__}.")}
assert all(module.__file__.startswith(folder) for module in used.values()) and len(used) > 10

import oracle

from nf4_patch.nf4.runtime import same_bits

same = same_bits if GPU else torch.equal  # the CPU library gives FP4's minus zero the other sign

if not GPU:
    quick_interpreter.Interpreted.always = True
    runtime = quick_interpreter.exchange_device(f"{kernel.__name__}.nf4")
    launch = used[f"{kernel.__name__}.nf4.dequantize.launch"]  # was imported before the exchange
    for name in ("current_device", "current_stream", "empty_strided_cuda", "fits"):
        setattr(launch, name, getattr(runtime, name))

device = torch.device("cuda" if GPU else "cpu")
states = [oracle.every_pair(torch.bfloat16, device)] + [
    oracle.quantized(shape, dtype, device, blocksize, nested, quant_type, storage)
    for shape, dtype, blocksize, nested, quant_type, storage in (
        ((256, 128), torch.float16, 64, True, "nf4", torch.uint8),
        ((129, 8), torch.bfloat16, 64, False, "fp4", torch.uint8),
        ((33, 77), torch.float32, 128, True, "nf4", torch.uint8),
        ((64, 256), torch.bfloat16, 64, True, "nf4", torch.bfloat16),
    )
]  # fmt: skip
for packed, state in states:
    want = oracle.expected(packed, state)
    assert same(kernel.dequantize_4bit(packed, state), want)
    out = torch.full(tuple(state.shape), float("nan"), dtype=state.dtype, device=device)
    assert kernel.dequantize_4bit(packed, state, out=out) is out and same(out, want)
packed, state = states[1]
assert same(kernel.dequantize_4bit(packed.t(), state), oracle.expected(packed.t(), state))


def error(*arguments, **keywords):
    try:
        kernel.dequantize_4bit(*arguments, **keywords)
    except ValueError as found:
        return str(found)
    return ""


assert "(NOT_4BIT)" in error(packed, None)
assert "(SIZE_MISMATCH): packed torch.uint8" in error(packed[:-1], state)
assert "(OUT_MISMATCH)" in error(packed, state, out=packed)
print(f"{len(states)} states: the same bits, loaded by kernels")
