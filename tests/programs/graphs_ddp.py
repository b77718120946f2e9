"""DDP in two processes, eagerly and with graphs. Losses and gradients are bit-identical. torchrun --nproc-per-node 2

graphs_ddp.py [unsloth] # a model of Unsloth with its own checkpoint, instead of one of peft

With peft, the profile "fast" is compared with ``lora="fused"`` too. The processes use NCCL with two GPUs, and gloo if both
share one GPU.
"""

import os
import sys
from pathlib import Path

UNSLOTH = "unsloth" in sys.argv
if UNSLOTH:
    os.environ["UNSLOTH_COMPILE_LOCATION"] = "unsloth_compiled_cache_" + os.environ["RANK"]
    import unsloth  # before transformers, as Unsloth requires

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

import nf4_patch
from benchmarks.kinds import unsloth_model
from benchmarks.models import LINEARS, Shape, build_4bit, config_of

rank, device = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
torch.cuda.set_device(device)


def model_of():
    if UNSLOTH:
        return unsloth_model(config_of(Shape(1024, 2816, 3, 8, 4, vocab_size=4096)), "unsloth")
    from peft import LoraConfig, get_peft_model

    model = build_4bit(config_of(Shape(256, 512, 3, 4, 2), torch.bfloat16), "cuda")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    config = LoraConfig(r=8, target_modules=list(LINEARS), task_type="CAUSAL_LM", lora_dropout=0.05)
    torch.manual_seed(1)
    return get_peft_model(model, config)


def training(model, profile=None, **options):
    parallel = DistributedDataParallel(model.train(), device_ids=[device], gradient_as_bucket_view=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(rank)
    numbers = []
    with nf4_patch.enabled(profile, **options):
        for step in range(6):
            for part in range(2):  # two micro-batches
                generator = torch.Generator().manual_seed(10 * step + 2 * part + rank)
                ids = torch.randint(3, 500, (2, 64), generator=generator).cuda()
                with parallel.no_sync() if not part else torch.enable_grad(), torch.autocast("cuda", torch.bfloat16):
                    loss = parallel(input_ids=ids, labels=ids, use_cache=False).loss
                    loss.backward()
                numbers.append(loss.detach().reshape(1).double())
            numbers += [parameter.grad.double().flatten() for parameter in trained]
            optimizer.step()
            optimizer.zero_grad()
        status = nf4_patch.status()
    return torch.cat(numbers), status


# before the group exists, because transformers saves a model, for Unsloth, in one process of a group only
models = [model_of() for _ in range(3 if UNSLOTH else 5)]
dist.init_process_group("nccl" if torch.cuda.device_count() > 1 else "gloo")
training(models[0])  # compiles
want, _ = training(models[1])
got, status = training(models[2], graphs="auto")
assert want.abs().sum() > 1 and torch.equal(got, want)
print(f"rank {rank}: equal, {status.graphs.replays} replays", flush=True)
if not UNSLOTH:
    want, _ = training(models[3], lora="fused")
    got, status = training(models[4], "fast")
    assert torch.equal(got, want) and status.graphs.replays, status
    # Spare memory is used only where no other process uses the GPU.
    assert torch.cuda.device_count() == 1 or (status.cache.weights and status.activations.kept), status
dist.destroy_process_group()
