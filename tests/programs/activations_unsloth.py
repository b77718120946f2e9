"""Kept activations under Unsloth's checkpoint: activations_unsloth.py. Losses and adapters equal those of recomputed layers.

On a CPU, Unsloth's checkpoint moves nothing to host memory, but also calls its own reentrant function.
"""

import sys
import types

import torch
import unsloth  # before transformers, as Unsloth requires
from unsloth_zoo import gradient_checkpointing

from heap import Memory
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import nf4_patch
from nf4_patch.activations.layers import activations
from nf4_patch.patching.checkpoint import checkpoint_of

LAYERS, STEPS = 4, 4
# Its buffers are on a GPU. No input is large enough for them.
gradient_checkpointing.initialize_unsloth_gradient_checkpointing = lambda dtype=None: None
vars(gradient_checkpointing).update(
    FIRST_PASS=True, LAST_GC_INDEX=0, CURRENT_GC_INDEX=0, MINIMUM_SIZE=2**40, BACKWARD_PASS=True, CPU_BUFFERS=[], GPU_BUFFERS=[],
    GPU_BUFFERS_B=None, USE_UNSLOTH_GC=False, FP32_OFFLOAD_EXACT=False, USE_DOUBLE_BUFFER=False,
)  # fmt: skip
Memory(types.SimpleNamespace(setattr=setattr), 2**32)


def training(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=128, num_hidden_layers=LAYERS, use_cache=False)
    model = LlamaForCausalLM(config).to(DTYPE)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    layers = model.get_base_model().model.layers
    skipped = layers[1]
    skipped.gradient_checkpointing = False  # as checkpoint_skip_layers leaves a layer
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    nf4_patch.enable(**options)
    numbers = []
    for step in range(STEPS):
        ids = torch.randint(3, 128, (2, 96), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        numbers += [loss.detach(), *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, nf4_patch.status().activations, checkpoint_of(layers[0]._gradient_checkpointing_func)


for name in ("unsloth", "True"):
    for DTYPE in (torch.bfloat16, torch.float32):
        if name == "unsloth":
            gradient_checkpointing.patch_unsloth_smart_gradient_checkpointing()
        else:
            gradient_checkpointing.unpatch_unsloth_smart_gradient_checkpointing()
        want, _, checkpoint = training(activations="off")
        got, found, _ = training(activations="1GiB")
        assert all(map(torch.equal, got, want)) and len(got) == len(want)
        assert sum(activations.taken.values()) == 0
        print(name, DTYPE, tuple(checkpoint[:2]), found.kept, found.layers, sorted(found.why), flush=True)
