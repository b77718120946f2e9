"""unsloth_zoo wraps dequantize_4bit in a closure, over ours or beneath it: ``unsloth_zoo_wrapper.py before|after``."""

import sys

import nf4_patch

if first := sys.argv[1] == "before":
    nf4_patch.enable()
import torch
import unsloth
import bitsandbytes.functional as F
import nf4_patch

nf4_patch.enable()


def row():
    return dict((t.name, t) for t in nf4_patch.status().targets)["bitsandbytes.functional.dequantize_4bit"]


assert row().state == ("wrapped" if first else "patched"), row()
hits = row().hits
torch.manual_seed(0)
packed, state = F.quantize_4bit(torch.randn(64, 128), quant_type="nf4", compress_statistics=True)
got = F.dequantize_4bit(packed, state)
assert row().hits == hits + 1, row()
standing = F.dequantize_4bit
nf4_patch.disable()
assert torch.equal(F.dequantize_4bit(packed, state), got) and row().hits == hits + 1
if first:
    assert F.dequantize_4bit is standing
nf4_patch.enable()
F.dequantize_4bit(packed, state)
assert row().hits == hits + 2, row()
print("wrapper")
