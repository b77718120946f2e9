"""Train a 4-bit model with LoRA, using transformers, peft and a plain loop.

    python examples/qlora_peft.py                                 # a small random Llama, no network
    python examples/qlora_peft.py --model meta-llama/Llama-3.2-1B # a real one
    python examples/qlora_peft.py --same-bits                     # plain enable(): losses and adapter keep their bits
    NF4_PATCH=0 python examples/qlora_peft.py                     # the same training without the patch
"""  # fmt: skip

import argparse

import torch
from offline import SIZES, batches, checkpoint, compute_dtype, tokenizer_of
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from record import Record
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen, random-gemma, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=1)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--compile", action="store_true", help="torch.compile the whole model")
parser.add_argument(
    "--attention", help="attention of transformers; eager adds in a fixed order in the backward, the default is faster"
)
parser.add_argument("--cache", help="memory for dequantized weights: auto, or a size such as 6GiB")
parser.add_argument("--same-bits", action="store_true", help='enable() instead of enable("fast")')
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--plot", metavar="FILE.png")
args = parser.parse_args()

nf4_patch.enable(None if args.same_bits else "fast", cache=args.cache)

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
    path,
    quantization_config=quantization,
    dtype=compute_dtype(),
    device_map={"": device},
    attn_implementation=args.attention,
)
model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
torch.manual_seed(0)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
model.print_trainable_parameters()
model.train()
forward = torch.compile(model) if args.compile else model

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler(device, enabled=compute_dtype() is torch.float16)  # small gradients would vanish in fp16
record = Record()
progress = tqdm(batches(tokenizer, args.rows, args.tokens, args.steps, device), total=args.steps)
for ids in progress:
    with torch.autocast(device, compute_dtype()):
        loss = forward(input_ids=ids, labels=ids).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    record.step(loss.detach())
    progress.set_postfix(loss=f"{record.losses[-1]:.4f}")

record.finish(model, args.json, args.plot)
