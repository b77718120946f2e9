"""Merge a LoRA adapter into the 4-bit weights that it was trained on, and save the sum in 16 bits under the original names.

python examples/merge_adapter.py --out merged                                  # a small random Llama and adapter, no network
python examples/merge_adapter.py --out merged --model random-qwen-moe          # the same for a mixture of experts
python examples/merge_adapter.py --out merged --model BASE --adapter ADAPTER   # BASE: the model that you trained on, or its packed checkpoint

Each 4-bit weight is dequantized once. The result needs neither bitsandbytes nor nf4_patch. If the model in 16 bits is too large for the
GPU, save the packed model before you add LoRA (qlora_moe.py --packed BASE), and pass --device cpu.
"""

import argparse

import torch
from offline import SIZES, checkpoint, compute_dtype, tokenizer_of
from peft import LoraConfig, PeftModel, get_peft_model
from record import Record
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen-moe, or any checkpoint, packed or not")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--adapter", help="folder of peft's adapter; by default, random weights")
parser.add_argument("--out", metavar="FOLDER", required=True)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--json", metavar="FILE")
args = parser.parse_args()

nf4_patch.enable(experts="4bit")

record, path, dtype = Record(), checkpoint(args.model, args.size), compute_dtype()
in_4_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
)  # as in training
tokenizer = tokenizer_of(path)  # before the merge, which takes minutes
packed = hasattr(AutoConfig.from_pretrained(path), "quantization_config")
model = AutoModelForCausalLM.from_pretrained(
    path, dtype=dtype, device_map={"": args.device}, **({} if packed else {"quantization_config": in_4_bits})
)
model = model.dequantize()  # before the merge, because a sum with 4-bit weights would be rounded to 4 bits
if args.adapter:
    model = PeftModel.from_pretrained(model, args.adapter)
else:
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
model = model.merge_and_unload()
model.save_pretrained(args.out)
tokenizer.save_pretrained(args.out)
print(f"{args.out}: {sum(p.numel() for p in model.parameters()):,} weights in {dtype}")
record.finish(json_file=args.json)
