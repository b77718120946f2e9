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


packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
packed = torch.nn.Parameter(packed, requires_grad=False)
for _ in range(2):
    nf4_patch.enable(cache="1MiB")
    held[1:] = [F.dequantize_4bit]
    from nf4_patch.patching.cache import reads

    reads.inside.bitsandbytes = True
    F.dequantize_4bit(packed, state)
    assert len(reads.cache.weights) == 1
    nf4_patch = again()
    nf4_patch.disable()
    assert F.dequantize_4bit is held[0]
    assert not held[1].__nf4_patch__[1].on
    assert not reads.cache.weights and not reads.cache.on  # it would hold its weights for good
nf4_patch.enable(cache="1MiB")
held[1:] = [F.dequantize_4bit]
from nf4_patch.patching.cache import reads

reads.inside.bitsandbytes = True
F.dequantize_4bit(packed, state)
assert len(reads.cache.weights) == 1
nf4_patch = again()
nf4_patch.enable()
assert not reads.cache.weights and not reads.cache.on  # enable() of the new import switches the earlier one off
assert F.dequantize_4bit is not held[1] and F.dequantize_4bit.__wrapped__ is held[0]
nf4_patch.disable()
assert F.dequantize_4bit is held[0]
