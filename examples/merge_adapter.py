"""Merge a LoRA into its base model: into the 4-bit weights, and into dense ones.

    python examples/merge_adapter.py                                              # random base, random adapter
    python examples/merge_adapter.py --model BASE --adapter ADAPTER --out FOLDER  # real ones

Both ways dequantize every 4-bit weight once. Each is done without and with the patch; the weights must be equal.
"""  # fmt: skip

import argparse
import copy

import torch
from offline import SIZES, checkpoint, compute_dtype
from peft import LoraConfig, PeftModel, get_peft_model
from record import Record
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen, random-gemma, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="of a random model")
parser.add_argument("--adapter", help="a peft adapter; by default random weights")
parser.add_argument("--out", metavar="FOLDER", help="save the dense merged model here")
parser.add_argument("--json", metavar="FILE")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
path = checkpoint(args.model, args.size)
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=compute_dtype(),
)
base = AutoModelForCausalLM.from_pretrained(
    path, quantization_config=quantization, dtype=compute_dtype(), device_map={"": device}
)


def with_adapter(model: torch.nn.Module) -> PeftModel:
    if args.adapter:
        return PeftModel.from_pretrained(model, args.adapter)
    torch.manual_seed(0)
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config)


def into_4bit() -> torch.nn.Module:
    """Dequantize, add the adapter, quantize again."""
    return with_adapter(copy.deepcopy(base)).merge_and_unload()


def into_dense() -> torch.nn.Module:
    """Dequantize the whole model, then add the adapter to dense weights."""
    return with_adapter(copy.deepcopy(base).dequantize()).merge_and_unload()


def timed(merge) -> tuple[torch.nn.Module, float]:
    record.clock()
    model = merge()
    return model, record.clock()


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


record = Record()
rows = []
for merge in tqdm((into_4bit, into_dense)):
    nf4_patch.disable()
    expected, stock = timed(merge)
    nf4_patch.enable()
    merged, patched = timed(merge)
    rows.append({"merge": merge.__name__, "stock": stock, "patched": patched, "equal": same(expected, merged)})
    del expected

for row in rows:
    verdict = "the same weights" if row["equal"] else "OTHER WEIGHTS"
    print(f"{row['merge']:11} {row['stock']:6.2f} s -> {row['patched']:6.2f} s, {verdict}")
record.extra["merges"] = rows
record.finish(json_file=args.json)
if args.out:
    merged.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(path).save_pretrained(args.out)
if not all(row["equal"] for row in rows):
    raise SystemExit("the patch changed the weights: please report it")
