"""Two processes under torchrun. A shard of a packed weight is refused by name, and the gathered weight is decoded."""

import os
import torch
import torch.distributed as dist
import bitsandbytes as bnb
import bitsandbytes.functional as F
import nf4_patch
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.counters import FallbackError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

nf4_patch.enable()
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
packed, state = F.quantize_4bit(
    torch.randn(256, 512, dtype=torch.bfloat16, device="cuda"),
    quant_type="nf4",
    compress_statistics=True,
    quant_storage=torch.bfloat16,
)
whole = F.dequantize_4bit(packed, state)
holder = torch.nn.Module()
holder.weight = torch.nn.Parameter(packed, requires_grad=False)
fully_shard(holder, mesh=init_device_mesh("cuda", (2,)))


def refused(weight, reason):
    before = nf4_patch.status().hits
    try:
        F.dequantize_4bit(weight, state)
    except FallbackError as error:  # strict: the original would read past the end of the shard
        assert Reason[reason].sentence in str(error), error
    else:
        raise AssertionError("a shard was decoded")
    assert nf4_patch.status().hits == before
    assert sum(target.fallbacks.get(reason, 0) for target in nf4_patch.status().targets) == 1


refused(holder.weight, "TENSOR_SUBCLASS")  # the sharded parameter: a DTensor
refused(holder.weight.to_local(), "SIZE_MISMATCH")  # half of the bytes with the shape of the whole
before = nf4_patch.status().hits
gathered = holder.weight.full_tensor()
assert torch.equal(F.dequantize_4bit(gathered, state), whole)
assert nf4_patch.status().hits == before + 1
print("REFUSED BY NAME", rank)
dist.destroy_process_group()
