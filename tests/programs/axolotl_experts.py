"""The patch in axolotl's decode of the experts that are used: ``axolotl_experts.py FOLDER``."""

import sys
import types

# only the file and what it imports: the packages around it ask for axolotl's whole training stack
for depth in range(1, 6):
    name = ".".join(["axolotl", "integrations", "kernels", "libs", "scattermoe_lora"][:depth])
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{sys.argv[1]}/{name.replace('.', '/')}"]

import os
import torch
import bitsandbytes.functional as F
import nf4_patch
from nf4_patch.patching.switch import switch

nf4_patch.enable()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
from axolotl.integrations.kernels.libs.scattermoe_lora import selective_dequant as axolotl, selective_dequant_kernel

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")


def row():
    return next(t for t in nf4_patch.status().targets if t.name.endswith("_selective_dequant_bnb4"))


def stack(dtype=torch.float16, nested=True, quant_type="nf4", shape=(4, 64, 256)):  # an expert is 256 blocks
    torch.manual_seed(0)
    return F.quantize_4bit(torch.randn(shape, dtype=dtype), quant_type=quant_type, compress_statistics=nested)


def both(packed, state, ids, shape):
    got = axolotl._selective_dequant_bnb4(packed, state, ids, shape)
    switch.on = False
    stock, whole = axolotl._selective_dequant_bnb4(packed, state, ids, shape), F.dequantize_4bit(packed, state)
    switch.on = True
    assert torch.equal(got, stock) and torch.equal(got, whole[ids.long()]), (got, stock)
    return got


switch.defer = "never"
for dtype in (torch.float16, torch.float32):  # the interpreter truncates to bf16 in axolotl's kernel
    for nested in (True, False):
        for ids in ([3, 0], [2], [0, 1, 2, 3]):
            for index in (torch.int64, torch.int32):
                got = both(*stack(dtype, nested), torch.tensor(ids, dtype=index), (64, 256))
                assert got.shape == (len(ids), 64, 256) and got.dtype is dtype
assert row().hits == 24 and not row().fallbacks, row()
both(*stack(quant_type="fp4"), torch.tensor([1]), (64, 256))
assert row().hits == 25

# a block of the second level spans two experts: axolotl decodes the scales of all first
both(*stack(shape=(4, 64, 128)), torch.tensor([1, 2]), (64, 128))
assert row().fallbacks == {"EXPERT_BLOCKS": 1}, row()
switch.defer = "auto"
both(*stack(nested=False), torch.tensor([1]), (64, 256))
assert row().fallbacks["DEFERRED"] == 1, row()
nf4_patch.disable()
assert "nf4_patch" not in axolotl._selective_dequant_bnb4.__code__.co_filename
print("state", row().state)
