"""Import the target again, and all of nf4_patch while it is on and weights are cached."""

import importlib
import logging.handlers
import sys
import types
import bitsandbytes.functional as F
import nf4_patch
import torch
from nf4_patch.patching import hooks

NAME = "bitsandbytes.functional.dequantize_4bit"
warnings = logging.handlers.BufferingHandler(100)
logging.getLogger("nf4_patch").addHandler(warnings)
stock = F.dequantize_4bit
packed, quant = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
want = stock(packed, quant)


def state():
    return dict((t.name, t.state) for t in nf4_patch.status().targets)[NAME]


nf4_patch.enable()
fresh = types.ModuleType("bitsandbytes.functional")
fresh.__dict__.update(vars(F))
fresh.dequantize_4bit = stock
sys.modules["bitsandbytes.functional"] = fresh  # a second import of the target
assert state() == "displaced", state()
nf4_patch.enable()
assert state() == "patched"
before = nf4_patch.status().hits
assert torch.equal(fresh.dequantize_4bit(packed, quant), want) and nf4_patch.status().hits == before + 1
nf4_patch.disable()
assert fresh.dequantize_4bit is stock
sys.modules["bitsandbytes.functional"] = F

importlib.reload(hooks)
nf4_patch.enable(cache="1MiB")
ours = F.dequantize_4bit
assert ours.__wrapped__ is stock and not warnings.buffer  # one replacement, not two
for name in [name for name in sys.modules if name.split(".")[0] == "nf4_patch" and ".nf4" not in name]:
    del sys.modules[name]
second = importlib.import_module("nf4_patch")
for call in (second.enable, second.disable, second.enable):
    assert not call() and not second.is_enabled() and F.dequantize_4bit is ours
    assert torch.equal(F.dequantize_4bit(packed, quant), want)
assert ["restart the process" in warning.getMessage() for warning in warnings.buffer] == [True]
hooks.disable()  # of the first import
assert F.dequantize_4bit is stock
assert second.enable() and F.dequantize_4bit is not ours and F.dequantize_4bit.__wrapped__ is stock
assert torch.equal(F.dequantize_4bit(packed, quant), want) and second.status().hits == 1
second.disable()
assert F.dequantize_4bit is stock and len(warnings.buffer) == 1
