"""QLoRA of a mixture of experts: the experts' weights in 4 bits too, LoRA on the attention.

    python examples/qlora_moe.py                                    # a small random Qwen3 MoE, no network
    python examples/qlora_moe.py --model random-gpt-oss
    python examples/qlora_moe.py --model Qwen/Qwen3-30B-A3B         # a real one: 61 GB of host memory, 24 GB of the GPU's
    python examples/qlora_moe.py --model openai/gpt-oss-20b         # published in MXFP4: 42 GB of host memory
    NF4_PATCH=0 python examples/qlora_moe.py                        # the same without the patch

transformers' load_in_4bit leaves fused experts (3-D parameters) in 16 bits. Here the model is loaded on the host, and
bitsandbytes (0.48 and newer) packs the experts of one layer after another on the GPU, so that only one layer is ever there in
16 bits.
The host holds the experts in 16 bits: 2 bytes per parameter.
"""  # fmt: skip

import argparse

import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from offline import SIZES, batches, checkpoint, compute_dtype
from peft import LoraConfig, get_peft_model
from record import Record
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Mxfp4Config

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random-qwen-moe", help="random-qwen-moe, random-gpt-oss, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="of a random model")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=1)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--checkpointing", action="store_true", help="recompute every layer in the backward")
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--plot", metavar="FILE.png")
args = parser.parse_args()

nf4_patch.enable()

device = "cuda" if torch.cuda.is_available() else "cpu"
path = checkpoint(args.model, args.size)
tokenizer = AutoTokenizer.from_pretrained(path)
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=compute_dtype(),
)
published = getattr(AutoConfig.from_pretrained(path), "quantization_config", None) or {}
if (
    published.get("quant_method") == "mxfp4"
):  # gpt-oss: its experts are decoded on the host, its attention stays in 16 bits
    quantization = Mxfp4Config(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(
    path, quantization_config=quantization, dtype=compute_dtype(), device_map={"": "cpu"}
)
for layer in model.model.layers:
    layer.to(device)
    for module in list(layer.modules()):
        for name in [name for name, parameter in module._parameters.items() if parameter is not None]:
            if module._parameters[name].dim() == 3:
                replace_parameter_4bit(module, name, compress_statistics=True)
model.to(device)
if args.checkpointing:
    model.gradient_checkpointing_enable({"use_reentrant": False})
torch.manual_seed(0)
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=attention, task_type="CAUSAL_LM"))
model.print_trainable_parameters()
model.train()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
record = Record()
progress = tqdm(batches(tokenizer, args.rows, args.tokens, args.steps, device), total=args.steps)
for ids in progress:
    with torch.autocast(device, compute_dtype()):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    record.step(loss.detach())
    progress.set_postfix(loss=f"{record.losses[-1]:.4f}")

record.finish(model, args.json, args.plot)
