"""Checkpointed experts with bf16 storage under FSDP2 in two processes: torchrun ... over NCCL with GPUs, otherwise over gloo.

Print the errors of the gradients against the mean of each process's own gradients. A router may choose other experts if
two logits are almost equal. With *fixed* choices, which depend only on a token's place, only a fault makes a
difference.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import spread
import tiny_experts
from tiny_experts import adapters_of, in_4bit, loaded, random_model, with_lora

import nf4_patch
from nf4_patch.moe import launch
from nf4_patch.patching.reasons import Reason

rank, gpu = int(os.environ["RANK"]), torch.cuda.is_available()
device = torch.device("cuda", rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
tiny_experts.DEVICE = device
DTYPE, TOKENS, BOUND = (torch.bfloat16, 128, 0.01) if gpu else (torch.float32, 4, 1e-4)
SIZES = {"hidden_size": 512, "num_experts": 16, "num_experts_per_tok": 2} if gpu else {}
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
nf4_patch.enable(experts="4bit")
choices = {"fixed": True}
forwards = {"by kernels": lambda tensor: True, "in PyTorch": lambda tensor: False}


def choose(router, inputs, output):
    *others, ids = output
    if not choices["fixed"]:
        return output
    slots = torch.arange(ids.numel(), device=ids.device) * 5 % router.weight.shape[0]
    return *others, slots.view(ids.shape).to(ids.dtype)


def made(folder):
    packed = in_4bit(bnb_4bit_quant_storage=torch.bfloat16, bnb_4bit_compute_dtype=DTYPE)
    model = loaded(folder, quantization_config=packed, device_map={"": device}, dtype=DTYPE)
    model = with_lora(model.train())
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(choose)
    return model


def step(model, each):
    """Return the loss and the gradients of a process's tokens."""
    model.zero_grad()
    ids = (tiny_experts.ids_of(TOKENS) + each) % 96
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [parameter.grad for parameter in adapters_of(model).values()]
    return loss.item(), torch.cat([getattr(g, "full_tensor", lambda g=g: g)().float().flatten() for g in grads])


with tempfile.TemporaryDirectory() as folder:
    names = [folder]
    dist.broadcast_object_list(names, device=device)
    random_model("qwen3", DTYPE, **SIZES).save_pretrained(names[0])  # the first process alone writes
    dist.barrier()
    plain, sharded = made(names[0]), made(names[0])
    dist.barrier()
spread.sharded(sharded, sharded.base_model.model.model.layers, device.type)
stacks = [module.parametrizations.gate_up_proj.original for module in tiny_experts.experts_of(sharded)]
assert all(stack.dtype is torch.bfloat16 and hasattr(stack, "full_tensor") for stack in stacks)

worst = 0.0
for fixed in (True, False):
    for name, serves in forwards.items():
        choices["fixed"], launch.supports = fixed, serves
        alone = [step(plain, each) for each in range(2)]
        loss, found = step(sharded, rank)
        mean = (alone[0][1] + alone[1][1]) / 2
        error = ((found - mean).norm() / mean.norm()).item()
        again = ((step(plain, rank)[1] - alone[rank][1]).norm() / alone[rank][1].norm()).item()
        worst = max(worst, error if fixed else 0)
        row = {"choices": "fixed" if fixed else "the router's", "forward": name, "error": error}
        print(json.dumps(row | {"rank": rank, "loss": loss, "alone": alone[rank][0], "run to run": again}), flush=True)
assert mean.any() and worst < BOUND, worst
reasons = {reason for target in nf4_patch.status().targets for reason in target.fallbacks}
print(f"the mean, {len(stacks)} stacks, fell back: {sorted(reasons)}", flush=True)
dist.destroy_process_group()
