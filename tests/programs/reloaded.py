"""importlib.reload of the target and of nf4_patch while it is on, and a target imported again."""

import importlib
import sys
import bitsandbytes.functional as F
import nf4_patch
import torch
from nf4_patch.patching import hooks
from nf4_patch.patching.adapters import bitsandbytes as adapter

NAME = "bitsandbytes.functional.dequantize_4bit"


def state():
    return dict((t.name, t.state) for t in nf4_patch.status().targets)[NAME]


packed, quant = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
held = [F.dequantize_4bit]  # a global would follow the patch
nf4_patch.enable()
assert state() == "patched"
importlib.reload(hooks)
importlib.reload(adapter)  # while it is on
nf4_patch.enable()
assert state() == "patched"
assert F.dequantize_4bit.__wrapped__ is held[0]  # one replacement, not two
nf4_patch.disable()
assert F.dequantize_4bit is held[0]
nf4_patch.enable()
replaced = F.dequantize_4bit
F.dequantize_4bit = held[0]  # what a reload of the target leaves (its ops may be registered only once)
assert state() == "displaced"
nf4_patch.enable()
assert state() == "patched"
import types

fresh = types.ModuleType("bitsandbytes.functional")
fresh.__dict__.update(vars(F))
fresh.dequantize_4bit = held[0]
sys.modules["bitsandbytes.functional"] = fresh  # imported again
assert state() == "displaced", state()
nf4_patch.enable()
assert state() == "patched"
before = nf4_patch.status().hits
fresh.dequantize_4bit(packed, quant)
assert nf4_patch.status().hits == before + 1
nf4_patch.disable()
assert fresh.dequantize_4bit is held[0]
