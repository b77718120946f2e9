"""A mixture of experts in 4 bits: two Qwen3-30B-A3B layers with random weights, LoRA on the attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..llama import load_4bit

SIZES = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def save(folder: str | Path, vocabulary: int, device: str = "cuda", **sizes: Any) -> None:
    """As save_pretrained leaves it, in bf16: 1.2 billion weights of experts."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(vocab_size=vocabulary, dtype="bfloat16", **{**SIZES, **sizes})
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def load(folder: str | Path, rank: int, device: Any = 0) -> Any:
    """Linear layers by transformers, the 3-D weights of the experts by bitsandbytes' own helper."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from peft import LoraConfig, get_peft_model

    model = load_4bit(folder, device=device)
    for module in list(model.modules()):
        for name in [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]:
            replace_parameter_4bit(module, name, compress_statistics=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=attention, task_type="CAUSAL_LM"))
