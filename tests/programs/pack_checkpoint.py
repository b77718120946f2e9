"""Save a random checkpoint packed: ``pack_checkpoint.py EXAMPLES FOLDER``."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

sys.path.insert(0, sys.argv[1])
from offline import checkpoint

path, folder = checkpoint("random"), sys.argv[2]
dtypes = {"bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_storage": torch.bfloat16}
packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **dtypes)
options = {"quantization_config": packed, "dtype": torch.bfloat16, "device_map": {"": "cpu"}}
AutoModelForCausalLM.from_pretrained(path, **options).save_pretrained(folder)
AutoTokenizer.from_pretrained(path).save_pretrained(folder)
