"""Use adapters on experts in 16 bits with peft alone: ``stock_peft.py MODEL ADAPTERS FILE ...`` writes the loss and
logits of each adapter.
"""

import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

words = iter(sys.argv[1:])
for model, adapters, file in zip(words, words, words, strict=True):
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapters)
    ids = torch.arange(48).view(2, 24) * 7 % 96
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    torch.save((output.loss, output.logits), file)
assert "nf4_patch.libraries.peft.experts" not in sys.modules
