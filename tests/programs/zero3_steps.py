"""QLoRA steps of a small Llama under DeepSpeed ZeRO-3: torchrun zero3_steps.py on|off|cached CHECKPOINT STEPS FOLDER.

Each process writes FOLDER/RANK.json with the losses as hex, the sum of the trained parameters, hits, fallbacks, and a
description of a sharded weight. The processes use NCCL with GPUs, otherwise gloo and kernels in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

patch, checkpoint, steps, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
GPU = torch.cuda.is_available()

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from spread import start

start(True, "nccl" if GPU else "gloo")
import deepspeed
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch
from nf4_patch.patching.reasons import Reason

TOKENS = 512 if GPU else 32  # a few rows bitsandbytes multiplies in a kernel of its own, with nothing to dequantize
ZERO3 = json.loads((Path(__file__).parents[2] / "examples" / "zero3.json").read_text())
ZERO3 = {name: value for name, value in ZERO3.items() if value != "auto"}  # which a Trainer fills in
ZERO3 |= {"train_micro_batch_size_per_gpu": 1}
ZERO3["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}  # every parameter is sharded


def load(device: torch.device) -> torch.nn.Module:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": device}
    )
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for parameter in trained(model):
        parameter.data = parameter.data.bfloat16()
    return model


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def shard_is_refused(weight: torch.Tensor) -> bool:
    """Return whether the shard that is left of a weight between its uses is refused."""
    try:
        nf4_patch.dequantize_nf4(weight, weight.quant_state)
    except ValueError as error:
        return Reason.SIZE_MISMATCH.sentence in str(error)
    return False


def main() -> None:
    if patch != "off":
        nf4_patch.enable(cache="64MiB" if patch == "cached" else "off")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    model = load(device)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model), optimizer=optimizer, config=ZERO3)
    engine.train()  # as a Trainer does; in eval mode bitsandbytes repacks the weights on a CPU with AVX512-BF16
    weights = [parameter for parameter in model.parameters() if hasattr(parameter, "quant_state")]
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        ids = torch.randint(3, 512, (1, TOKENS), generator=generator).to(device)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    targets = nf4_patch.status().targets
    with deepspeed.zero.GatheredParameters(trained(model)):
        adapter = [parameter.double().sum().item().hex() for parameter in trained(model)]
    result = {
        "losses": losses,
        "adapter": adapter,
        "hits": {target.name: target.hits for target in targets if target.hits},
        "fallbacks": {target.name: target.fallbacks for target in targets if target.fallbacks},
        "cache": dataclasses.asdict(nf4_patch.status().cache),
        "elements": sum(weight.numel() for weight in weights),
        "refused": all(map(shard_is_refused, weights)),
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


main()
