"""The patch and its cache in Unsloth: ``unsloth_eager.py TARGET first|last|between`` enables them before, after or
between the imports.
"""

import importlib
import inspect
import sys

import nf4_patch

TARGET, order = sys.argv[1:]
DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
if order == "between":
    importlib.import_module("bitsandbytes")
if order != "last":
    nf4_patch.enable(matmul="auto")
importlib.import_module("unsloth")
if order == "last":
    nf4_patch.enable(matmul="auto")

import torch
import bitsandbytes.functional as F
from target import in_package, linear, row
from nf4_patch.cache.store import cache
from nf4_patch.patching.originals import is_own
from nf4_patch.patching.placement import installed
from nf4_patch.patching.targets import TARGETS
from unsloth.kernels import utils, fast_lora
import unsloth.kernels
import unsloth.save


def quantized(shape, quant_type="nf4", nested=True):
    torch.manual_seed(0)
    return F.quantize_4bit(torch.randn(shape, dtype=torch.bfloat16), quant_type=quant_type, compress_statistics=nested)


# the newest unsloth_zoo wraps dequantize_4bit in a closure: over ours, or beneath it
nf4_patch.enable(matmul="auto")
newest = TARGET.endswith("_bnb")
assert not newest or row(DEQUANTIZE).state == ("patched" if order == "last" else "wrapped"), row(DEQUANTIZE)
packed, state = quantized((64, 128))
want = F.dequantize_4bit(packed, state)
assert row(DEQUANTIZE).hits == 1, row(DEQUANTIZE)
layer = linear(torch.device("cpu"), 128, 64, weights=torch.bfloat16)
# every module that holds the function, by value or not, reaches the kernel
holders = [utils, fast_lora, unsloth.kernels, unsloth.save]
for module in holders:
    before = row(TARGET).hits
    assert torch.equal(module.fast_dequantize(packed, state), want)
    assert row(TARGET).hits == before + 1, module.__name__
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
hits = row(TARGET).hits
fast_lora.LoRA_W.apply(X, layer.weight, layer.weight.quant_state, A, B, 0.5).float().square().sum().backward()
assert row(TARGET).hits == hits + 2, row(TARGET)
W = F.dequantize_4bit(layer.weight, layer.weight.quant_state)
plain = torch.nn.functional.linear(X, W)
assert torch.equal(fast_lora.matmul_lora(X, layer.weight, layer.weight.quant_state, None, None, None), plain)
assert row(TARGET).fallbacks == {"NOT_4BIT": 1}, row(TARGET).fallbacks
# the matmul of one row, in every holder, and that with an adapter: of a dense weight they are the original's
gemv = TARGET.replace("dequantize", "gemv")
assert row(gemv).state == row("unsloth.kernels.utils.matmul_lora").state == "patched", nf4_patch.status()
x, w, a, b = torch.randn(1, 1, 8), torch.randn(8, 4), torch.randn(2, 8), torch.randn(4, 2)
for module in (utils, unsloth.kernels):
    assert torch.equal(module.fast_gemv(x, w, None), x @ w)
assert row(gemv).fallbacks == {"NOT_4BIT": 2}, row(gemv)
assert fast_lora.matmul_lora is utils.matmul_lora
adapted = fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5)
# off: the original is back in every holder, and the wrapper stays
standing, hits = F.dequantize_4bit, row(DEQUANTIZE).hits
nf4_patch.disable()
assert torch.equal(F.dequantize_4bit(packed, state), want) and row(DEQUANTIZE).hits == hits
assert order == "last" or not newest or F.dequantize_4bit is standing
for module in holders:
    assert not in_package(module.fast_dequantize.__code__), module.__name__
for function in (utils.fast_gemv, unsloth.kernels.fast_gemv, fast_lora.matmul_lora):
    assert not in_package(function.__code__), function.__name__
assert not any(in_package(getattr(utils, name.rpartition(".")[2]).__code__) for name in (TARGET, gemv))
assert torch.equal(adapted, fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5))
nf4_patch.enable()
before = row(TARGET).hits
utils.fast_dequantize(packed, state)
F.dequantize_4bit(packed, state)
assert row(TARGET).hits == before + 1 and row(DEQUANTIZE).hits == hits + 1
computed = [target for target in TARGETS if target.library == "unsloth" and target.own]
found = {target.name: getattr(utils, target.name.rpartition(".")[2], None) for target in computed}
assert [t.name for t in computed if found[t.name] is not None and not is_own(found[t.name], t.module, *t.own)] == []
print("state", row(TARGET).state)

# the cache in Unsloth's autograd functions, checkpointed: equal gradients, and who may write shares no memory
layers = [linear(torch.device("cpu"), 128, 128, seed=seed, weights=torch.bfloat16) for seed in range(3)]
adapters = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((4, 128), (128, 4)) * 3]
values = torch.randn(2, 8, 128, dtype=torch.bfloat16)
parts = [
    (layer.weight, layer.weight.quant_state, a, b, 0.5)
    for layer, a, b in zip(layers, adapters[::2], adapters[1::2], strict=True)
]


def block(x):
    q, k, v = fast_lora.LoRA_QKV.apply(x, *(item for part in parts for item in part), False)
    return fast_lora.LoRA_W.apply(q + k * v, *parts[0])


def step(reentrant):
    x = values.clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
    loss = y.float().square().sum()
    for each in adapters:
        each.grad = None
    loss.backward()
    return [x.grad, *(each.grad for each in adapters)]


def doubled(function):
    def foreign(W, *args, **kwargs):
        w = function(W, *args, **kwargs)
        w.data.mul_(2)
        return w

    return foreign


for reentrant in (True, False):
    nf4_patch.enable(cache="off")
    want = step(reentrant)
    nf4_patch.enable(cache=2**30)
    cache.hits = cache.misses = 0
    for _ in range(3):
        assert all(map(torch.equal, step(reentrant), want))
    reads = cache.hits + cache.misses
    assert reads == 3 * 3 * 4 and cache.misses == 3, (cache.hits, reads)  # each weight is decoded once
    # so may a wrapper of somebody's, who gets memory of its own: twice the weight, at every step
    held = utils.fast_dequantize
    for module in (utils, fast_lora):
        module.fast_dequantize = doubled(held)
    nf4_patch.enable(cache="off")
    twice = step(reentrant)
    nf4_patch.enable(cache=2**30)
    for _ in range(3):
        assert all(map(torch.equal, step(reentrant), twice)) and not torch.equal(twice[0], want[0])
    for module in (utils, fast_lora):
        module.fast_dequantize = held
    nf4_patch.enable()
    assert all(map(torch.equal, step(reentrant), want))
    # a caller without the buffer may write into what it gets
    mine = [utils.fast_dequantize(layers[0].weight, layers[0].weight.quant_state).data_ptr() for _ in range(2)]
    assert cache.weights and not {cached.views[0].data_ptr() for cached in cache.weights.values()} & set(mine)
    nf4_patch.disable()
    assert not cache.weights
print("cached")
# layers that run as CUDA graphs know Unsloth's checkpoint by its names
from functools import partial
from nf4_patch.libraries.unsloth import CHECKPOINTING
from nf4_patch.patching.checkpoint import checkpoint_of
from unsloth_zoo import gradient_checkpointing as theirs

if newest:
    assert checkpoint_of(partial(theirs.unsloth_checkpoint, use_reentrant=False)).reentrant
    assert theirs.UnslothCheckpointFunction.__module__ == CHECKPOINTING
# Unsloth wraps methods of peft without functools.wraps: enable() finds ours beneath, and puts nothing on top
if newest and order == "first":
    from unsloth_zoo.temporary_patches import TEMPORARY_PATCHES

    for patch in TEMPORARY_PATCHES:
        patch()
    nf4_patch.enable()
    merge = "peft.tuners.lora.layer.ParamWrapper.merge"
    assert row(merge).state == "wrapped", row(merge)
    assert inspect.unwrap(installed[merge].current()) is not installed[merge].original
