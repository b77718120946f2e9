"""``experts_after_the_block.py FOLDER OUT``: a mixture is packed in a ``with`` block, and peft is imported after it."""

import sys

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch

config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head"])
with nf4_patch.enabled(experts="4bit"):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, quantization_config=config)
assert not nf4_patch.is_enabled() and "peft" not in sys.modules

from peft import LoraConfig, get_peft_model

parameters = ["experts.gate_up_proj", "experts.down_proj"]
model = get_peft_model(model, LoraConfig(r=4, target_parameters=parameters, init_lora_weights=False))
assert sum("lora_A" in name for name, _ in model.named_parameters()) == 2 * 2
stacks = [name for name, parameter in model.named_parameters() if name.endswith("original")]
before = [model.get_parameter(name).clone() for name in stacks]
assert len(before) == 2 * 2 and all(each.dtype is torch.uint8 for each in before)
model.merge_adapter()
assert not any(map(torch.equal, before, map(model.get_parameter, stacks)))
model.unmerge_adapter()
assert all(map(torch.equal, before, map(model.get_parameter, stacks)))
model.merge_and_unload().save_pretrained(sys.argv[2])
with nf4_patch.enabled(experts="4bit"):
    AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)
