"""The fused matmul in every holder of Unsloth's GEMV: ``unsloth_fused_rows.py ATTRIBUTE enabled-first|enabled-last``."""

import importlib
import sys

import nf4_patch

attribute, order = sys.argv[1:]
if order == "enabled-first":
    nf4_patch.enable(matmul="auto")
importlib.import_module("unsloth")
if order != "enabled-first":
    nf4_patch.enable(matmul="auto")

import torch
import nf4_patch
import unsloth.kernels
from unsloth.kernels import utils

name = f"unsloth.kernels.utils.{attribute}"


def row():
    return next(t for t in nf4_patch.status().targets if t.name == name)


assert row().state == "patched", nf4_patch.status()
x, w = torch.randn(1, 1, 8), torch.randn(8, 4)
for holder in (utils, unsloth.kernels):
    assert torch.equal(holder.fast_gemv(x, w, None), x @ w)
assert row().fallbacks == {"NOT_4BIT": 2}, row()
lora = next(t for t in nf4_patch.status().targets if t.name == "unsloth.kernels.utils.matmul_lora")
assert lora.state == "patched", nf4_patch.status()
from unsloth.kernels import fast_lora

assert fast_lora.matmul_lora is utils.matmul_lora
a, b = torch.randn(2, 8), torch.randn(4, 2)
got = fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5)
nf4_patch.disable()
assert torch.equal(got, fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5))
assert "nf4_patch" not in fast_lora.matmul_lora.__code__.co_filename
assert torch.equal(utils.fast_gemv(x, w, None), x @ w)
assert row().fallbacks == {"NOT_4BIT": 2}, row()
assert "nf4_patch" not in getattr(utils, attribute).__code__.co_filename
assert "nf4_patch" not in unsloth.kernels.fast_gemv.__code__.co_filename
