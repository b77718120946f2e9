"""The cache under FSDP2 and in Unsloth's autograd functions, each in a process of its own. No GPU is needed."""

from __future__ import annotations

import pytest
import torch
from subprocess_python import python
from unsloth_releases import RELEASES, with_unsloth

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_cache_gpu.py trains on the GPU")

FSDP2 = """
import os, torch
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
import bitsandbytes as bnb, nf4_patch
from nf4_patch.patching.cache.cache import cache
torch.manual_seed(0)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = bnb.nn.Linear4bit(128, 128, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16,
                                      quant_storage=torch.bfloat16).to("cpu")
        self.adapter = torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    def forward(self, x):
        return self.base(x) + self.adapter(x)

model = torch.nn.Sequential(Layer(), Layer())
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
x = torch.randn(64, 128, dtype=torch.bfloat16)

def step():
    a = x.clone().requires_grad_()
    y = model(a)
    y.float().square().sum().backward()
    return y.detach(), a.grad

def equal(a, b):
    return all(map(torch.equal, a, b))

for mode in ("block", 2**30):
    nf4_patch.enable(cache=mode)
    before = step()
    assert equal(step(), before)
    for layer in model:  # the bytes of a shard, which FSDP gathers into the old memory with the old version
        layer.base.weight.to_local().view(torch.uint8).bitwise_xor_(255)
    got = step()
    print(mode, cache.hits, cache.misses, dict(cache.uncached))
    nf4_patch.disable()
    assert equal(got, step())
    assert not torch.equal(got[0], before[0])
"""


def test_fsdp2():
    assert "REFILLED" in python(FSDP2, interpreted=True).stdout


UNSLOTH = """
import torch, nf4_patch
import unsloth
import bitsandbytes as bnb
from unsloth.kernels import fast_lora, utils
from nf4_patch.patching.cache.cache import cache
torch.manual_seed(0)
layers = [bnb.nn.Linear4bit(128, 128, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).bfloat16().to("cpu")
          for _ in range(3)]
lora = [(torch.randn(4, 128).bfloat16().requires_grad_(), torch.randn(128, 4).bfloat16().requires_grad_())
        for _ in range(3)]
values = torch.randn(2, 8, 128, dtype=torch.bfloat16)

def block(x):
    q, k, v = fast_lora.LoRA_QKV.apply(
        x, *(item for layer, (a, b) in zip(layers, lora)
             for item in (layer.weight, layer.weight.quant_state, a, b, 0.5)), False)
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
    for mode in ("block", 2**30):
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
        assert all(first.data_ptr() != entry.dense.data_ptr() for entry in cache.entries.values())
        assert bool(cache.entries) == (mode != "block")
        assert cache.hits >= reads * 0.3, (cache.hits, reads)
        nf4_patch.disable()
        assert not cache.entries
"""


@RELEASES
def test_unsloth(release, tmp_path):
    assert "1073741824 False" in with_unsloth(release, UNSLOTH, tmp_path)
