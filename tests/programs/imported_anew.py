"""nf4_patch deleted from sys.modules and imported again: the new one replaces what the old one put there."""

import sys
import bitsandbytes.functional as F
import nf4_patch
import torch

held = [F.dequantize_4bit]  # globals would follow the patch


def again():
    for name in [name for name in sys.modules if name.split(".")[0] == "nf4_patch" and ".nf4" not in name]:
        del sys.modules[name]
    import nf4_patch

    return nf4_patch


for _ in range(2):
    nf4_patch.enable()
    held[1:] = [F.dequantize_4bit]
    nf4_patch = again()
    nf4_patch.disable()
    assert F.dequantize_4bit is held[0]
    assert not held[1].__globals__["switch"].on
nf4_patch.enable()
held[1:] = [F.dequantize_4bit]
nf4_patch = again()
nf4_patch.enable()
assert F.dequantize_4bit is not held[1] and F.dequantize_4bit.__wrapped__ is held[0]
nf4_patch.disable()
assert F.dequantize_4bit is held[0]
