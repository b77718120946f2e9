"""A replacement that cannot be made leaves the import alone."""

import logging

logging.basicConfig()
import nf4_patch
from nf4_patch.patching import targets, hooks


def broken(self, original):
    raise RuntimeError("cannot make it")


targets.Target.make = broken
nf4_patch.enable()
import torch
import bitsandbytes.functional as F

packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
F.dequantize_4bit(packed, state)
row = {t.name: t for t in nf4_patch.status().targets}["bitsandbytes.functional.dequantize_4bit"]
assert row.state == "refused" and "an error inside nf4_patch" in row.note, row
nf4_patch.disable()
