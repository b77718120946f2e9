"""Train a 4-bit model with LoRA on several GPUs: with DDP, or with FSDP, which shards the packed weights among the GPUs.

    torchrun --nproc-per-node 2 examples/qlora_torchrun.py                     # DDP, a small random Llama
    torchrun --nproc-per-node 2 examples/qlora_torchrun.py --fsdp              # FSDP2 (torch's fully_shard)
    torchrun --nproc-per-node 2 examples/qlora_torchrun.py --same-bits         # plain enable(): the same bits as without the patch
    accelerate launch --config_file examples/fsdp1.yaml --num_processes 2 examples/qlora_torchrun.py
    accelerate launch --config_file examples/fsdp2.yaml --num_processes 2 examples/qlora_torchrun.py

With FSDP, every process loads and packs the model in host memory (about 40 GB for a 70B model). Then one layer at a time is copied to
the GPU and sharded there, so no GPU ever holds the whole model. A checkpoint that was saved packed with the same quant_storage is
loaded as it is.
"""  # fmt: skip

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from offline import SIZES, batches, checkpoint, compute_dtype, tokenizer_of
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.utils.other import fsdp_auto_wrap_policy
from record import Record, fingerprint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen, random-gemma, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP, without accelerate's configuration")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=1, help="per process")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument(
    "--attention", default="sdpa", choices=("sdpa", "eager"), help="with sdpa, two runs on several GPUs may differ"
)
parser.add_argument("--same-bits", action="store_true", help='enable() instead of enable("fast")')
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--plot", metavar="FILE.png")
args = parser.parse_args()

nf4_patch.enable(None if args.same_bits else "fast")

cuda = torch.cuda.is_available()
dtype = compute_dtype()
accelerator = Accelerator(cpu=not cuda)
device = accelerator.device
by_accelerate = accelerator.distributed_type is DistributedType.FSDP  # fsdp1.yaml or fsdp2.yaml
sharded = args.fsdp or by_accelerate
paths = [checkpoint(args.model, args.size) if accelerator.is_main_process else None]
path = broadcast_object_list(paths)[0]  # one process makes the random model
tokenizer = tokenizer_of(path)
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=dtype,
    bnb_4bit_quant_storage=dtype if sharded else torch.uint8,  # FSDP shards parameters of one floating dtype
)
model = AutoModelForCausalLM.from_pretrained(
    path,
    quantization_config=quantization,
    dtype=dtype,
    device_map={"": "cpu" if sharded else device},
    attn_implementation=args.attention,
)
if sharded:
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
else:
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
torch.manual_seed(0)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, lora, autocast_adapter_dtype=not sharded)
model.train()

everyone = accelerator.num_processes


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


if args.fsdp:
    mesh = init_device_mesh(device.type, (everyone,))
    for layer in model.get_base_model().model.layers:
        layer.to(device)  # moves its quant_states too; only a shard is left before the next layer follows
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # moves the rest to the GPU
    optimizer = optimizer_of(model)
elif by_accelerate and accelerator.is_fsdp2:
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
else:
    if by_accelerate:  # so that FSDP1 shards adapters and frozen weights separately
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer_of(model))
shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()] if sharded else []
record = Record()
record.extra["sharded_bytes"] = sum(shard.numel() * shard.element_size() for shard in shards)
progress = tqdm(
    batches(tokenizer, args.rows * everyone, args.tokens, args.steps, device),
    total=args.steps,
    disable=not accelerator.is_main_process,
)
for ids in progress:
    mine = ids.chunk(everyone)[accelerator.process_index]
    with torch.autocast(device.type, dtype):
        loss = model(input_ids=mine, labels=mine).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    record.step(accelerator.reduce(loss.detach(), "mean"))

record.extra["processes"] = everyone
record.extra["hits_by_process"] = accelerator.gather(torch.tensor([nf4_patch.status().hits], device=device)).tolist()
record.extra["adapter"] = fingerprint(accelerator.unwrap_model(model))  # in every process, because FSDP2 gathers
if accelerator.is_main_process:
    record.finish(json_file=args.json, plot=args.plot)
accelerator.end_training()
if "RANK" not in os.environ:
    print("This was a single process. Start the script with torchrun or accelerate launch to use several.")
