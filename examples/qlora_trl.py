"""Train a 4-bit model with LoRA and TRL's SFTTrainer. One line switches the patch on.

    python examples/qlora_trl.py                                 # a small random Llama, no network
    python examples/qlora_trl.py --model meta-llama/Llama-3.2-1B # a real one
    python examples/qlora_trl.py --recipe --tokens 512           # every switch of docs/recipes.md (pip install liger-kernel)
    python examples/qlora_trl.py --model Qwen/Qwen3-32B --offload 4GiB  # most of the model waits in host memory
"""  # fmt: skip

import argparse
import tempfile

import torch
from datasets import Dataset
from offline import SIZES, checkpoint, compute_dtype, require_liger, require_triton, text, tokenizer_of
from peft import LoraConfig
from record import Record
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen, random-gemma, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument(
    "--recipe", action="store_true", help="set every switch that docs/recipes.md lists for a dense model"
)
parser.add_argument(
    "--offload", metavar="SIZE", help='"all", or the GPU memory for packed weights, see docs/offload.md'
)
parser.add_argument("--out", metavar="FOLDER", help="save the adapter; merge_adapter.py merges it into the weights")
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--plot", metavar="FILE.png")
args = parser.parse_args()
require_triton(parser)
profile, switches = None, {}
if args.recipe:
    profile = "fast"
    switches = {"use_liger_kernel": True, "pad_to_multiple_of": 64}
    require_liger(parser)
    if not torch.cuda.is_available():
        del switches["use_liger_kernel"]  # Liger's kernels need a GPU

import nf4_patch; nf4_patch.enable(profile, offload=args.offload)  # fmt: skip  # the one line

device = "cuda" if torch.cuda.is_available() else "cpu"
path = checkpoint(args.model, args.size)
tokenizer = tokenizer_of(path)
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=compute_dtype(),
)
model = AutoModelForCausalLM.from_pretrained(
    path, quantization_config=quantization, dtype=compute_dtype(), device_map={"": device}
)
record = Record()
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": text() * 8}),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="nf4-patch-trl-"),
        max_steps=args.steps,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=1,
        max_length=args.tokens,
        packing=True,
        packing_strategy="wrapped",
        gradient_checkpointing=True,
        learning_rate=1e-3,
        use_cpu=device == "cpu",
        bf16=compute_dtype() is torch.bfloat16,
        fp16=compute_dtype() is torch.float16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=0,
        **switches,
    ),
    callbacks=[record],
)
trainer.train()
if args.out:
    trainer.save_model(args.out)
record.finish(trainer.model, args.json, args.plot)
