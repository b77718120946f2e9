"""LoRA on packed experts in two processes: torchrun ... ddp|fsdp2|zero3|loaded. Gradients are the mean of each process's own.

*loaded*: ZeRO-3 is known to transformers (HfDeepSpeedConfig) when it packs the experts of a checkpoint.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from spread import ZERO3, spread, start
from tiny_experts import (
    adapters_of,
    experts_of,
    ids_of,
    in_4bit,
    is_parametrized,
    loaded,
    random_model,
    saved,
    with_lora,
)

import nf4_patch

way = sys.argv[1]
STORAGE = torch.bfloat16 if way == "fsdp2" else torch.uint8
DENSE = ["lm_head", ".*self_attn", "gate"]  # all but the experts
folder = Path(tempfile.mkdtemp())
saved(random_model("qwen3", torch.float32), folder)  # before there is a process group: then only the first one saves
zero3 = way in ("zero3", "loaded")
start(zero3)
if zero3:
    from deepspeed.utils import safe_get_full_grad


def made():
    config = in_4bit(bnb_4bit_quant_storage=STORAGE, llm_int8_skip_modules=DENSE)
    return with_lora(loaded(folder, dtype=torch.float32, quantization_config=config)).train()


def loss(model, rank):
    ids = (ids_of() + rank) % 96
    return model(input_ids=ids, labels=ids).loss


rank = dist.get_rank()
nf4_patch.enable(experts="4bit")
if way == "loaded":
    from transformers.integrations import HfDeepSpeedConfig

    config = HfDeepSpeedConfig(ZERO3)
alone = []
for each in range(2):
    model = made()
    loss(model, each).backward()
    alone.append({name: parameter.grad for name, parameter in adapters_of(model).items()})
model = made()
optimizer = torch.optim.SGD(list(adapters_of(model).values()), lr=0.0)
parallel = spread(model, "zero3" if zero3 else way, model.base_model.model.model.layers, optimizer)
for again in range(2):  # the second fails where a parameter got no gradient in the first
    model.zero_grad()
    if zero3:
        if again:
            parallel.step()
        parallel.backward(loss(parallel, rank))
    else:
        loss(parallel, rank).backward()
for name, parameter in adapters_of(model).items():
    mean = (alone[0][name] + alone[1][name]) / 2
    found = safe_get_full_grad(parameter) if zero3 else parameter.grad
    found = found.full_tensor() if way == "fsdp2" else found
    assert mean.any() and torch.allclose(found, mean, rtol=1e-4, atol=1e-9), name
packed = [module.parametrizations.gate_up_proj.original for module in experts_of(model) if is_parametrized(module)]
assert all(
    {"ddp": each.numel(), "fsdp2": hasattr(each, "full_tensor"), "zero3": not each.numel()}["zero3" if zero3 else way]
    for each in packed
)
reasons = {reason for target in nf4_patch.status().targets for reason in target.fallbacks}
print(f"the mean, {len(packed)} stacks, {len(reasons)} fell back", flush=True)
dist.destroy_process_group()
