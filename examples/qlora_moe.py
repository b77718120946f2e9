"""Train a mixture of experts whose experts are in 4 bits too, with LoRA on the attention and the experts.

python examples/qlora_moe.py                                    # a small random Qwen3 MoE, no network
python examples/qlora_moe.py --model random-gpt-oss

For a real model, the comments show GB of GPU memory: the weights, plus adapters with their gradients and AdamW's state. Activations
come on top. At 2,048 tokens per step, the model fits into 24 GB only with Liger's loss (pip install liger-kernel). Without
Liger's loss, train on 128 tokens per step. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, with which the fit into 24 GB was measured.

python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B --checkpointing --liger-loss --tokens 2048 --attention-only        # 17 + 0.1: fits into 24
python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B --checkpointing --liger-loss --tokens 2048 --adamw-8bit            # 17 + 3.9: fits into 24
python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B --checkpointing --liger-loss --tokens 2048                         # 17 + 5.1: needs 32 or more
python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B --checkpointing --liger-loss --tokens 2048 --offload 6GiB          # fits into 24, see docs/offload.md
python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B --checkpointing --liger-loss --tokens 2048 --adamw-8bit --offload 6GiB   # fits into 16

The script needs transformers 5.17 and peft 0.17, or newer.
"""

import argparse

import bitsandbytes
import torch
from offline import SIZES, batches, checkpoint, compute_dtype, require_liger, tokenizer_of
from peft import LoraConfig, get_peft_model
from record import Record
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.liger import apply_liger_kernel

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random-qwen-moe", help="random-qwen-moe, random-gpt-oss, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
for option, value in (("--steps", 20), ("--rows", 1), ("--tokens", 128), ("--rank", 16)):
    parser.add_argument(option, type=int, default=value)
parser.add_argument(
    "--checkpointing", action="store_true", help="recompute each layer in the backward, which saves memory"
)
parser.add_argument("--liger-loss", action="store_true", help="use Liger's loss, which does not store the logits")
parser.add_argument("--attention-only", action="store_true", help="no LoRA on the experts")
parser.add_argument(
    "--adamw-8bit", action="store_true", help="use bitsandbytes' AdamW, which stores 2 bytes per parameter instead of 4"
)
parser.add_argument(
    "--offload",
    metavar="SIZE",
    help="keep at most this much of the packed layers on the GPU: 6GiB, or all for none of them; ignored on a CPU",
)
parser.add_argument("--packed", metavar="FOLDER", help="save the packed model, for more training or a merge")
parser.add_argument("--out", metavar="FOLDER", help="save the adapter; merge_adapter.py merges it into the weights")
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--plot", metavar="FILE.png")
args = parser.parse_args()
if args.liger_loss:
    require_liger(parser)

nf4_patch.enable("fast", experts="4bit", cache="off", offload=args.offload)  # no cache, because the model fills the GPU

device, dtype, path = "cuda" if torch.cuda.is_available() else "cpu", compute_dtype(), checkpoint(args.model, args.size)
in_4_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
)
tokenizer = tokenizer_of(path)
model = AutoModelForCausalLM.from_pretrained(path, quantization_config=in_4_bits, dtype=dtype, device_map={"": device})
if args.packed:
    model.save_pretrained(args.packed)
    tokenizer.save_pretrained(args.packed)
if args.checkpointing:
    model.gradient_checkpointing_enable({"use_reentrant": False})
torch.manual_seed(0)
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
experts = None if args.attention_only else ["experts.gate_up_proj", "experts.down_proj"]
lora = LoraConfig(
    r=args.rank, lora_alpha=2 * args.rank, target_modules=attention, target_parameters=experts, task_type="CAUSAL_LM"
)
model = get_peft_model(model, lora).train()
if args.liger_loss:  # transformers' Trainer has liger_kernel_config; TRL has a loss of its own
    apply_liger_kernel(model, {"fused_linear_cross_entropy": True, "rope": False, "rms_norm": False, "swiglu": False})
model.print_trainable_parameters()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
if dtype == torch.bfloat16:  # as in TRL: half the memory, and products are computed in bf16 anyway
    for parameter in trained:
        parameter.data = parameter.data.to(dtype)

if args.adamw_8bit:
    optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=1e-3)
else:
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)  # without fused, a step needs a copy of the parameters
record = Record()
for ids in batches(tokenizer, args.rows, args.tokens, args.steps, device):
    with torch.autocast(device, dtype):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    record.step(loss.detach())
states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
record.extra["bytes"] = {
    "weights": sum(p.nbytes for p in model.parameters() if not p.requires_grad),
    "adapters": sum(p.nbytes for p in trained),  # their gradients take as much again
    "optimizer": sum(value.nbytes for value in states),
}
print(", ".join(f"{name} {count / 1e9:.3f} GB" for name, count in record.extra["bytes"].items()))
if args.out:
    model.save_pretrained(args.out)
record.finish(model, args.json, args.plot)
