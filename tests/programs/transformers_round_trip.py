"""Quantize on load, save 4-bit, load it again, dequantize(): ``transformers_round_trip.py CHECKPOINT FOLDER DEVICE``."""

import sys

checkpoint, folder, device = sys.argv[1:]

import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM
import nf4_patch

options = dict(device_map={"": device}, dtype=torch.float32)
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = LlamaForCausalLM.from_pretrained(checkpoint, quantization_config=quantization, **options)
model.save_pretrained(folder)
again = LlamaForCausalLM.from_pretrained(folder, **options)


def dense(model):
    return {k: v.clone() for k, v in model.dequantize(dtype=torch.float32).state_dict().items()}


without = dense(model)
nf4_patch.enable()
with_patch = dense(again)
hits = nf4_patch.status().hits  # 7 weights; some releases of transformers dequantize each twice
assert hits and hits % 7 == 0, nf4_patch.status()
assert nf4_patch.status().fallbacks == 0, nf4_patch.status()
assert without.keys() == with_patch.keys()
for name in without:
    assert torch.equal(without[name], with_patch[name]), name
