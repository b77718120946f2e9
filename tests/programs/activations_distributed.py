"""Kept activations in two processes: activations_distributed.py ddp|fsdp1|fsdp2. Each process keeps another number of layers.

Losses, gradients and adapters are bit-identical to those of recomputed layers. Sharded layers recompute.
"""

import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import quick_interpreter

quick_interpreter.install()
from heap import Memory
from spread import spread, start

import nf4_patch

way = sys.argv[1]
LAYERS, STEPS = 4, 4
start(False)
rank = dist.get_rank()
Memory(types.SimpleNamespace(setattr=setattr), 2**32)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def training(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, num_hidden_layers=LAYERS, use_cache=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)).train()
    layers = model.base_model.model.model.layers
    if way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        parallel = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    else:
        parallel = spread(model, way, layers, None)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    nf4_patch.enable(**options)
    numbers = []
    for step in range(STEPS):
        for part in range(2):
            torch.manual_seed(10 * step + part + rank)
            ids = torch.randint(3, 128, (2, 64))
            loss = parallel(input_ids=ids, labels=ids).loss
            loss.backward()
            numbers.append(loss.detach())
        numbers += [getattr(p.grad, "_local_tensor", p.grad).clone() for p in trained(model) if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, nf4_patch.status().activations


want, _ = training(activations="off")
got, found = training(activations="1GiB" if rank else "4MiB")
assert len(got) == len(want) and all(map(torch.equal, got, want))
print(f"\nrank {rank}: equal, {found.kept} of {found.layers} kept, {sorted(found.why)}", flush=True)
dist.destroy_process_group()
