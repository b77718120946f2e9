"""The cache under FSDP2: if bytes are gathered into the old memory, they are decoded again."""

import os
import torch

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
from target import linear, same
import nf4_patch
from nf4_patch.cache.store import cache

torch.manual_seed(0)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = linear(torch.device("cpu"), 128, 128, quant_storage=torch.bfloat16)
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


nf4_patch.enable(cache=2**30)
before = step()
assert same(step(), before)
for layer in model:  # the bytes of a shard, which FSDP gathers into the old memory with the old version
    layer.base.weight.to_local().view(torch.uint8).bitwise_xor_(255)
got = step()
print(dict(cache.uncached))
nf4_patch.disable()
assert same(got, step()) and not torch.equal(got[0], before[0])
