"""A QLoRA run of two Llama layers, checkpointed, 512 tokens: python checkpointed_step.py peft|liger|unsloth on|off STEPS.

Prints one JSON line: losses as hex, hits by target, fallbacks, calls that still reached the originals' kernels, and what
Dynamo counted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
library, patch, steps = sys.argv[1], sys.argv[2] == "on", int(sys.argv[3])

import nf4_patch

if patch:
    nf4_patch.enable()
if library == "unsloth":
    import unsloth

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import checkpoint
from nf4_patch.tools import llama

TOKENS = 512
LINEARS = list(llama.LINEARS)
LLAMA = llama.Shape(1024, 2816, 2, 8, 4, vocab_size=1024)


def load(folder: str):
    if library == "unsloth":
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=TOKENS, dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True
        )
        return FastLanguageModel.get_peft_model(
            model, r=16, target_modules=LINEARS, lora_alpha=16, lora_dropout=0, bias="none",
            use_gradient_checkpointing=True, random_state=3407,
        )  # fmt: skip
    if library == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(
        checkpoint.load_4bit(folder), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=16, target_modules=LINEARS, task_type="CAUSAL_LM"))


def spy_on_originals() -> dict[str, int]:
    """Count what still reaches the libraries' own 4-bit dequantization."""
    import bitsandbytes.backends.cuda.ops as cuda_ops

    calls = {}

    def count(name, module, attribute):
        original = getattr(module, attribute)

        def counted(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        calls[name] = 0
        setattr(module, attribute, counted)

    count("bitsandbytes", cuda_ops, "_dequantize_4bit_impl")
    # Read at every call (2026.9.13 and newer). Not where Dynamo compiles the layers: a spy in them moves their bits.
    if library == "unsloth" and not patch and os.environ.get("TORCHDYNAMO_DISABLE"):
        from unsloth.kernels import utils

        count("unsloth", utils, "_fast_dequantize_bnb")
    return calls


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, LLAMA)
        model = load(folder)
    model.train()
    originals = spy_on_originals()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses, first = [], None
    for _ in range(steps):
        tokens = torch.randint(4, 1024, (1, TOKENS), generator=generator).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if first is None:
            first = {t.name: t.hits for t in nf4_patch.status().targets} | originals
    status = nf4_patch.status()
    fallbacks = {t.name: t.fallbacks for t in status.targets if t.fallbacks}
    from torch._dynamo.utils import counters

    compiled = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    counts = {"first_step": first, "fallbacks": fallbacks, "errors": status.errors, "compiled": compiled}
    print(json.dumps({"losses": losses, **counts}))


main()
