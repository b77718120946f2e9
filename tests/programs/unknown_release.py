"""A newer Unsloth whose function takes another argument: its row is refused, bitsandbytes is patched."""

import sys
import types

fake = types.ModuleType("unsloth.kernels.utils")


def _fast_dequantize_bnb(W, quant_state=None, out=None, use_global_buffer=False, *, layout): ...


fake._fast_dequantize_bnb = _fast_dequantize_bnb
sys.modules["unsloth.kernels.utils"] = fake
import nf4_patch
import bitsandbytes.functional

nf4_patch.enable()
rows = {t.name: t for t in nf4_patch.status().targets}
row = rows["unsloth.kernels.utils._fast_dequantize_bnb"]
assert row.state == "refused" and "layout" in row.note, row
assert fake._fast_dequantize_bnb is _fast_dequantize_bnb
assert rows["bitsandbytes.functional.dequantize_4bit"].state == "patched"
assert rows["unsloth.kernels.utils.fast_dequantize"].state == "absent"
nf4_patch.disable()
assert fake._fast_dequantize_bnb is _fast_dequantize_bnb
