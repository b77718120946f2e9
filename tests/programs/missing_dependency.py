"""``missing_dependency.py NAME [decode]``: bitsandbytes is imported where NAME cannot be, and decodes by the original."""

import logging
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ImportError(f"No module named {name} (blocked by the test)")


sys.meta_path.insert(0, Blocked())
logging.basicConfig()
if decode := sys.argv[2:] == ["decode"]:
    import nf4_patch

    nf4_patch.enable()
import bitsandbytes.functional as F

print("imported")
if not decode:
    sys.exit()
import torch

packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
nf4_patch.disable()
want = F.dequantize_4bit(packed, state)
nf4_patch.enable()
assert torch.equal(F.dequantize_4bit(packed, state), want)
assert torch.equal(nf4_patch.dequantize_nf4(packed, state), want)
from nf4_patch.nf4.dequantize import compilation, launch
from nf4_patch.nf4 import runtime

assert runtime.triton is None and not compilation.INTERPRETED
try:
    compilation.CompiledKernel(None, torch.device("cpu"))
except runtime.KernelUnavailable as error:
    refused = str(error)
assert "triton" in refused, refused
