"""The patch in Unsloth: ``unsloth_dequantize.py TARGET first|last|between``, enabled before, between or after the imports."""

import importlib
import sys

import nf4_patch

TARGET, order = sys.argv[1:]
if order == "between":
    importlib.import_module("bitsandbytes")
if order != "last":
    nf4_patch.enable(matmul="auto")
importlib.import_module("unsloth")
if order == "last":
    nf4_patch.enable(matmul="auto")

import torch
import bitsandbytes as bnb
import bitsandbytes.functional as F
from unsloth.kernels import utils, fast_lora
import unsloth.kernels
import unsloth.save


def rows():
    return {t.name: t for t in nf4_patch.status().targets}


def ours(function):
    return "nf4_patch" in function.__code__.co_filename


def quantized(shape, quant_type="nf4", nested=True):
    torch.manual_seed(0)
    return F.quantize_4bit(torch.randn(shape, dtype=torch.bfloat16), quant_type=quant_type, compress_statistics=nested)


packed, state = quantized((64, 128))
want = F.dequantize_4bit(packed, state)
layer = bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).bfloat16().to("cpu")
# every module that holds the function, by value or not, reaches the kernel
holders = [utils, fast_lora, unsloth.kernels, unsloth.save]
for module in holders:
    before = rows()[TARGET].hits
    assert torch.equal(module.fast_dequantize(packed, state), want)
    assert rows()[TARGET].hits == before + 1, module.__name__
assert torch.equal(utils.fast_dequantize(packed.t(), state), want.t())
# what passes through there and is not 4-bit goes to the original, untouched
dense = torch.randn(4, 4)
assert utils.fast_dequantize(dense, None) is dense
# out=, the global buffer
out = torch.empty(64, 128, dtype=torch.bfloat16)
assert torch.equal(utils.fast_dequantize(packed, state, out=out), want) and torch.equal(out, want)
assert torch.equal(utils.fast_dequantize(packed, state, use_global_buffer=True), want)
# the old path's faults are cured: flat states, fp4, fp32
for other in (quantized((64, 128), nested=False), quantized((64, 128), quant_type="fp4")):
    assert torch.equal(utils.fast_dequantize(*other), F.dequantize_4bit(*other))
# a LoRA layer, forward and backward, through Unsloth's own autograd function
X = torch.randn(2, 8, 128, dtype=torch.bfloat16, requires_grad=True)
A, B = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((4, 128), (64, 4)))
hits = rows()[TARGET].hits
fast_lora.LoRA_W.apply(X, layer.weight, layer.weight.quant_state, A, B, 0.5).float().square().sum().backward()
assert rows()[TARGET].hits == hits + 2, rows()[TARGET]
W = F.dequantize_4bit(layer.weight, layer.weight.quant_state)
plain = torch.nn.functional.linear(X, W)
assert torch.equal(fast_lora.matmul_lora(X, layer.weight, layer.weight.quant_state, None, None, None), plain)
assert rows()[TARGET].fallbacks == {"NOT_4BIT": 1}, rows()[TARGET].fallbacks
# the matmul of one row, in every holder, and that with an adapter: of a dense weight they are the original's
gemv = TARGET.replace("dequantize", "gemv")
assert rows()[gemv].state == rows()["unsloth.kernels.utils.matmul_lora"].state == "patched", nf4_patch.status()
x, w, a, b = torch.randn(1, 1, 8), torch.randn(8, 4), torch.randn(2, 8), torch.randn(4, 2)
for module in (utils, unsloth.kernels):
    assert torch.equal(module.fast_gemv(x, w, None), x @ w)
assert rows()[gemv].fallbacks == {"NOT_4BIT": 2}, rows()[gemv]
assert fast_lora.matmul_lora is utils.matmul_lora
adapted = fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5)
# off: the original is back in every holder
nf4_patch.disable()
for module in holders:
    assert not ours(module.fast_dequantize), module.__name__
for function in (utils.fast_gemv, unsloth.kernels.fast_gemv, fast_lora.matmul_lora):
    assert not ours(function), function.__name__
assert not any(ours(getattr(utils, name.rpartition(".")[2])) for name in (TARGET, gemv))
assert torch.equal(adapted, fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5))
nf4_patch.enable()
hits = rows()[TARGET].hits
utils.fast_dequantize(packed, state)
assert rows()[TARGET].hits == hits + 1
print("state", rows()[TARGET].state)
