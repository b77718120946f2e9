"""LoRA in one function in two processes: torchrun ... ddp|fsdp1|wrapped|fsdp2|zero3. Compare losses and gradients with peft's own.

*wrapped* is FSDP1 with peft's own policy, which wraps every lora_A and lora_B. It runs over gloo on the CPU, in Triton's interpreter. The input of every layer is bf16.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from spread import spread, start

import nf4_patch
from benchmarks.checkpoint import Shape, save

way = sys.argv[1]
STEPS, LENGTH = 3, 160  # more rows than are multiplied straight from the packed weight
TARGET = "peft.tuners.lora.bnb.Linear4bit.forward"
folder = tempfile.mkdtemp()
save(folder, Shape(128, 256, 2, 4, 2))  # before there is a process group: then only the first one saves
start(way == "zero3")
rank = dist.get_rank()


def made():
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for parameter in trained(model):
        torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def distributed(model, optimizer):
    layers = model.base_model.model.model.layers
    if way not in ("fsdp1", "wrapped"):
        return spread(model, way, layers, optimizer, bf16={"enabled": True})
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(layers[0])}) if way == "fsdp1" else fsdp_auto_wrap_policy(model)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def local(tensors):
    """Return the parts of the tensors that this process holds."""
    return torch.cat([getattr(each, "_local_tensor", each).detach().double().flatten() for each in tensors])


def training():
    """Return the losses, and the adapters' gradients of the first step.

    Under ZeRO-3, return the trained adapters instead of gradients.
    """
    model = made()
    zero3 = way == "zero3"
    optimizer = torch.optim.SGD(trained(model), lr=1.0)
    parallel = distributed(model, optimizer)
    optimizer = parallel if zero3 else torch.optim.SGD(trained(model), lr=1.0)
    generator = torch.Generator().manual_seed(rank)
    losses, gradients = [], []
    for step in range(STEPS):
        torch.manual_seed(step)  # of dropout
        ids = torch.randint(3, 512, (1, LENGTH), generator=generator)
        loss = parallel(input_ids=ids, labels=ids, use_cache=False).loss
        parallel.backward(loss) if zero3 else loss.backward()
        gradients = gradients or [parameter.grad for parameter in trained(model) if parameter.grad is not None]
        optimizer.step()
        if not zero3:
            optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses).double(), local([p.ds_tensor for p in trained(model)] if zero3 else gradients)


want = training()
nf4_patch.enable(lora="fused")
got = training()
(row,) = (target for target in nf4_patch.status().targets if target.name == TARGET)
losses, tensors = (((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))
assert want[1].norm() > 0.01 and losses < 5e-4 and tensors < 0.04, (losses, tensors)
hit = "hit" if row.hits else "not hit"
print(f"{hit}, fell back: {sorted(row.fallbacks)}, equal: {not losses + tensors}", flush=True)
dist.destroy_process_group()
