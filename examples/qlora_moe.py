"""QLoRA of a mixture of experts: the experts in 4 bits too, LoRA on the attention and on the experts.

python examples/qlora_moe.py                                    # a small random Qwen3 MoE, no network
python examples/qlora_moe.py --model random-gpt-oss
python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B         # a real one: 32 GB of the GPU's memory
python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B --offload 6GiB  # 24 GB: packed experts wait in host memory

It needs transformers 5.17 and peft 0.17, or newer.
"""

import argparse

import torch
from offline import SIZES, batches, checkpoint, compute_dtype
from peft import LoraConfig, get_peft_model
from record import Record
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random-qwen-moe", help="random-qwen-moe, random-gpt-oss, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="of a random model")
for option, value in (("--steps", 20), ("--rows", 1), ("--tokens", 128)):
    parser.add_argument(option, type=int, default=value)
parser.add_argument("--offload", help="packed experts in host memory: all, or a size that stays on the GPU, as 6GiB")
parser.add_argument("--checkpointing", action="store_true", help="recompute every layer in the backward")
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--plot", metavar="FILE.png")
args = parser.parse_args()

nf4_patch.enable(experts="4bit", offload=args.offload)

device, dtype, path = "cuda" if torch.cuda.is_available() else "cpu", compute_dtype(), checkpoint(args.model, args.size)
in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
model = AutoModelForCausalLM.from_pretrained(path, quantization_config=in_4_bits, dtype=dtype, device_map={"": device})
if args.checkpointing:
    model.gradient_checkpointing_enable({"use_reentrant": False})
torch.manual_seed(0)
attention, experts = ["q_proj", "k_proj", "v_proj", "o_proj"], ["experts.gate_up_proj", "experts.down_proj"]
lora = LoraConfig(r=16, lora_alpha=32, target_modules=attention, target_parameters=experts, task_type="CAUSAL_LM")
model = get_peft_model(model, lora).train()
model.print_trainable_parameters()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
record = Record()
for ids in batches(AutoTokenizer.from_pretrained(path), args.rows, args.tokens, args.steps, device):
    with torch.autocast(device, dtype):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    record.step(loss.detach())
record.finish(model, args.json, args.plot)
