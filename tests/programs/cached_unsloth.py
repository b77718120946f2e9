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
lora = [
    (torch.randn(4, 128).bfloat16().requires_grad_(), torch.randn(128, 4).bfloat16().requires_grad_()) for _ in range(3)
]
values = torch.randn(2, 8, 128, dtype=torch.bfloat16)


def block(x):
    q, k, v = fast_lora.LoRA_QKV.apply(
        x,
        *(
            item
            for layer, (a, b) in zip(layers, lora, strict=False)
            for item in (layer.weight, layer.weight.quant_state, a, b, 0.5)
        ),
        False,
    )
    layer, (a, b) = layers[0], lora[0]
    return fast_lora.LoRA_W.apply(q + k * v, layer.weight, layer.weight.quant_state, a, b, 0.5)


def step(reentrant):
    x = values.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant).float().square().sum().backward()
    grads = [x.grad, *(t.grad.clone() for pair in lora for t in pair)]
    for pair in lora:
        for t in pair:
            t.grad = None
    return grads


for reentrant in (True, False):
    nf4_patch.enable(cache="off")
    want = step(reentrant)
    for mode in (2**30,):
        nf4_patch.enable(cache=mode)
        cache.hits = cache.misses = 0
        for _ in range(3):
            assert all(map(torch.equal, step(reentrant), want)), mode
        reads = cache.hits + cache.misses
        assert reads == 3 * 3 * 4, reads
        print(mode, reentrant, cache.hits / reads)
        # a caller without the buffer may write into what it gets
        first, second = (utils.fast_dequantize(layers[0].weight, layers[0].weight.quant_state) for _ in range(2))
        assert first.data_ptr() != second.data_ptr()
        assert all(first.data_ptr() != cached.dense.data_ptr() for cached in cache.weights.values())
        assert cache.weights
        assert cache.hits >= reads * 0.3, (cache.hits, reads)
        nf4_patch.disable()
        assert not cache.weights
