"""``missing_dependency.py NAME [decode]``: import bitsandbytes where nf4_patch cannot import NAME, and decode with the original.

Other packages can import NAME: PyTorch itself may import Triton.
"""

import builtins
import logging
import sys

found = builtins.__import__


def hidden(name, globals=None, *rest, **keywords):
    if name.split(".")[0] == sys.argv[1] and (globals or {}).get("__name__", "").startswith("nf4_patch"):
        raise ImportError(f"No module named {name} (hidden by the test)")
    return found(name, globals, *rest, **keywords)


builtins.__import__ = hidden
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

assert runtime.triton is None
try:
    compilation.CompiledKernel(None, torch.device("cpu"))
except runtime.KernelUnavailable as error:
    refused = str(error)
assert "triton" in refused, refused
