"""Kinds of models for benchmarks of training steps: LoRA with peft on random 4-bit weights, Liger, Unsloth.

Liger and Unsloth patch a whole process, so every process builds models of one kind only.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from benchmarks.checkpoint import save_config
from benchmarks.models import EXPERTS, LINEARS
from benchmarks.training import RANK, peft_model
from nf4_patch.tools.patch import patch

STOCK, LIGER, DENSE, UNSLOTH = "peft", "liger", "16-bit experts", "unsloth"
LIBRARIES = {UNSLOTH: "unsloth", LIGER: "liger_kernel"}  # that a kind of model needs


def unsloth_model(config: Any, checkpointing: Any = True, skips: Any = 0) -> Any:
    """Build Unsloth's model. ``checkpointing`` and ``skips`` are the arguments of get_peft_model that its users can set."""
    from unsloth import FastLanguageModel  # before transformers, as Unsloth requires

    with tempfile.TemporaryDirectory() as folder:
        save_config(folder, config, "cuda")
        torch.cuda.empty_cache()
        length = min(4096, config.max_position_embeddings)
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=length, dtype=config.dtype, load_in_4bit=True, local_files_only=True
        )
    experts = [name.rpartition(".")[2] for name in EXPERTS] if hasattr(config, "num_experts") else []
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", use_gradient_checkpointing=checkpointing, random_state=0,
        target_modules=[*LINEARS[:4], *experts] if experts else list(LINEARS), checkpoint_skip_layers=skips,
    )  # fmt: skip


def model_of(kind: str, config: Any) -> Any:
    """Build a model with LoRA on all linear layers or, for a mixture, on the attention and the experts."""
    if kind == UNSLOTH:
        return unsloth_model(config)
    mixture = hasattr(config, "num_experts")
    with patch(mixture, experts="4bit"):
        options: dict[str, Any] = {"target_parameters": EXPERTS} if mixture else {}
        model = peft_model(config, LINEARS[:4] if mixture else LINEARS, **options)
    if kind == DENSE:
        unpack(model)
    if kind == LIGER:  # as in transformers' Trainer; Liger does not support 4-bit experts
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, {"swiglu": not mixture, "fused_linear_cross_entropy": True})
    return model


def unpack(model: Any) -> None:
    """Dequantize the experts to 16 bits."""
    from torch.nn.utils import parametrize

    for module in model.modules():
        for name in list(getattr(module, "parametrizations", ())):
            weight = getattr(module, name)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
