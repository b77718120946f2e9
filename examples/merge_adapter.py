"""Merge a LoRA adapter into the 4-bit weights that it was trained on, and save the sum in 16 bits under the original names.

python examples/merge_adapter.py --out merged                                  # a small random Llama and adapter, no network
python examples/merge_adapter.py --out merged --model random-qwen-moe          # the same for a mixture of experts
python examples/merge_adapter.py --out merged --model BASE --adapter ADAPTER   # BASE: the model that you trained on, or its packed checkpoint

Each 4-bit weight is dequantized once. The model is read, merged and written layer by layer, so that memory holds one layer in 16 bits.
The result needs neither bitsandbytes nor nf4_patch. The script needs transformers 5.17 or newer.
"""

import argparse
import tempfile

import torch
from layer_by_layer import Refused, merge
from offline import RANDOM, SIZES, checkpoint, compute_dtype, tokenizer_of
from peft import LoraConfig, get_peft_model
from record import Record
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch


def random_adapter(path: str, folder: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path)
    lora = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder)
    return folder


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen-moe, or any checkpoint, packed or not")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--adapter", help="folder of peft's adapter; by default, random weights")
parser.add_argument("--out", metavar="FOLDER", required=True)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--json", metavar="FILE")
args = parser.parse_args()

if not args.adapter and args.model not in RANDOM:
    parser.error("name the folder of your adapter: --adapter FOLDER")

if not nf4_patch.enable(experts="4bit"):
    parser.error(
        "nf4_patch is off, so experts would not be quantized as in the training. Unset NF4_PATCH and NF4_USE_TRITON"
    )

record, path, dtype = Record(), checkpoint(args.model, args.size), compute_dtype()
in_4_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
)  # as in training; a packed checkpoint has its own
with tempfile.TemporaryDirectory() as folder:
    adapter = args.adapter or random_adapter(path, folder)
    try:
        options = {"dtype": dtype, "quantization_config": in_4_bits, "device_map": {"": args.device}}
        weights = merge(path, adapter, args.out, tokenizer_of, **options)
    except Refused as error:
        parser.error(str(error))
print(f"{args.out}: {weights:,} weights in {dtype}")
record.finish(json_file=args.json)
nf4_patch.disable()  # otherwise it says at the exit that no experts were read
