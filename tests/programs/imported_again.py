"""What is imported again: modules of nf4_patch reloaded, the target, and all of nf4_patch while weights are cached."""

import importlib
import sys
import types
import bitsandbytes.functional as F
import nf4_patch
import torch
from nf4_patch.patching import hooks
from nf4_patch.patching.adapters import bitsandbytes as adapter

NAME = "bitsandbytes.functional.dequantize_4bit"
held = [F.dequantize_4bit]  # a global would follow the patch
packed, quant = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
packed = torch.nn.Parameter(packed, requires_grad=False)


def state():
    return dict((t.name, t.state) for t in nf4_patch.status().targets)[NAME]


nf4_patch.enable()
assert state() == "patched"
importlib.reload(hooks)
importlib.reload(adapter)  # while it is on
nf4_patch.enable()
assert state() == "patched" and F.dequantize_4bit.__wrapped__ is held[0]  # one replacement, not two
nf4_patch.disable()
assert F.dequantize_4bit is held[0]
nf4_patch.enable()
F.dequantize_4bit = held[0]  # what a reload of the target leaves (its ops may be registered only once)
assert state() == "displaced"
nf4_patch.enable()
assert state() == "patched"

# all of nf4_patch: its disable() and its enable() go for what the old one put there, which would hold its weights for good
for switch in ("disable", "disable", "enable"):
    from nf4_patch.patching.cache import reads

    nf4_patch.enable(cache="1MiB")
    held[1:] = [F.dequantize_4bit]
    reads.inside.bitsandbytes = True
    F.dequantize_4bit(packed, quant)
    assert len(reads.cache.weights) == 1
    for name in [name for name in sys.modules if name.split(".")[0] == "nf4_patch" and ".nf4" not in name]:
        del sys.modules[name]
    import nf4_patch

    getattr(nf4_patch, switch)()
    assert not held[1].__nf4_patch__[1].on and not reads.cache.weights and not reads.cache.on
    assert F.dequantize_4bit is not held[1]
    assert getattr(F.dequantize_4bit, "__wrapped__", F.dequantize_4bit) is held[0]
nf4_patch.disable()
assert F.dequantize_4bit is held[0]

nf4_patch.enable()
fresh = types.ModuleType("bitsandbytes.functional")
fresh.__dict__.update(vars(F))
fresh.dequantize_4bit = held[0]
sys.modules["bitsandbytes.functional"] = fresh  # the target
assert state() == "displaced", state()
nf4_patch.enable()
assert state() == "patched"
before = nf4_patch.status().hits
fresh.dequantize_4bit(packed, quant)
assert nf4_patch.status().hits == before + 1
nf4_patch.disable()
assert fresh.dequantize_4bit is held[0]
