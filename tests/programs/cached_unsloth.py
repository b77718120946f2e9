"""The cache in Unsloth's autograd functions, checkpointed: equal gradients, and who may write shares no memory."""

import torch
import nf4_patch
import unsloth
import bitsandbytes as bnb
from unsloth.kernels import fast_lora, utils
from nf4_patch.patching.cache.store import cache

torch.manual_seed(0)
layers = [
    bnb.nn.Linear4bit(128, 128, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).bfloat16().to("cpu")
    for _ in range(3)
]
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


for reentrant in (True, False):
    nf4_patch.enable(cache="off")
    want = step(reentrant)
    nf4_patch.enable(cache=2**30)
    cache.hits = cache.misses = 0
    for _ in range(3):
        assert all(map(torch.equal, step(reentrant), want))
    reads = cache.hits + cache.misses
    assert reads == 3 * 3 * 4 and cache.hits >= reads * 0.3, (cache.hits, reads)
    # a caller without the buffer may write into what it gets
    mine = [utils.fast_dequantize(layers[0].weight, layers[0].weight.quant_state).data_ptr() for _ in range(2)]
    assert cache.weights and not {cached.dense.data_ptr() for cached in cache.weights.values()} & set(mine)
    nf4_patch.disable()
    assert not cache.weights
print("cached")
