"""``experts_by_environment.py FOLDER``: a mixture is loaded in 4 bits by a script that knows nothing of nf4_patch."""

import sys

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
    llm_int8_skip_modules=["lm_head"],
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, quantization_config=config)
packed = sum(parameter.dtype is torch.uint8 for name, parameter in model.named_parameters() if "experts" in name)
ids = torch.arange(48, device=model.device).view(2, 24) * 7 % 96
with torch.no_grad():
    print(packed, model(input_ids=ids, labels=ids).loss.item())
