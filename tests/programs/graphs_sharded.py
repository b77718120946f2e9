"""FSDP with graphs and without. Losses and gradients are bit-identical. torchrun --nproc-per-node 2 graphs_sharded.py WAY ...

*fsdp1* and *fsdp2* shard each decoder layer separately, and *whole1* and *whole2* shard the model as a whole. *wrapped* shards with peft's policy for FSDP1, which also wraps every lora_A and lora_B. The processes use gloo on the CPU, or NCCL with two GPUs.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("support", "graphs", "..")]
import pytest
import test_graphed_layers as graphed
from recorders import install
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from spread import sharded
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.checkpoint import save

folder = tempfile.mkdtemp()
save(folder, graphed.SHAPE)  # before there is a process group: then only the first one saves
dist.init_process_group("nccl" if graphed.GPU else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if graphed.GPU else torch.device("cpu")
if graphed.GPU:
    torch.cuda.set_device(device)
else:
    install(pytest.MonkeyPatch())
# the helper's own writes numbers into the adapters, which is an error for those of FSDP2
graphed.optimizer_of = lambda model, lr: torch.optim.AdamW(graphed.trained(model), lr=lr)


def made(way):
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    options = {"quantization_config": quantization, "dtype": torch.bfloat16, "device_map": {"": device}}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    model = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    torch.manual_seed(1)
    for parameter in graphed.trained(model):
        torch.nn.init.normal_(parameter, std=0.1)
    layers = graphed.layers_of(model)
    if way in ("fsdp2", "whole2"):
        return sharded(model, layers if way == "fsdp2" else [], device.type)
    policy = {
        "fsdp1": ModuleWrapPolicy({type(layers[0])}),
        "wrapped": fsdp_auto_wrap_policy(model),
        "whole1": None,
    }[way]
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def step_of(model, optimizer, step):
    ids = graphed.tokens(2 * step + rank)
    return graphed.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)


for way in sys.argv[1:]:
    found = graphed.compared(lambda way=way: made(way), step_of)
    assert any(g is not None and getattr(g, "_local_tensor", g).any() for g in found["gradients"][-1])
    print(f"{way}: equal, {found['replays']} replays, {sorted(found['reasons'])}", flush=True)
dist.destroy_process_group()
