"""Tiny random mixtures of experts of transformers', one of each architecture, and their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.core_model_loading", reason="transformers before 5")

import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
DIMS = {**BASE, "head_dim": 16, "num_experts_per_tok": 2}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 64}
MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
LINEAR = {
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3 MoE": ("Qwen3MoeConfig", {**DIMS, "moe_intermediate_size": 128, "num_experts": 4}),
    "gpt-oss": ("GptOssConfig", {**DIMS, "num_local_experts": 4}),
    "OLMoE": ("OlmoeConfig", {**BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral": ("MixtralConfig", {**DIMS, "num_local_experts": 4}),
    "GLM-4 MoE": ("Glm4MoeConfig", {**DIMS, **GROUPS}),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        {**DIMS, **LINEAR, "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "DeepSeek-V3": ("DeepseekV3Config", {**BASE, **GROUPS, **MLA, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "Gemma 4": (
        "Gemma4TextConfig",
        {**BASE, "head_dim": 16, "global_head_dim": 16, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
         "moe_intermediate_size": 64, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
}  # fmt: skip
# Linear layers of 1 and of 4 outputs, for which bitsandbytes has no product on the CPU.
SKIPPED = ["lm_head", "shared_expert_gate", "router.proj"]
STACKS = ("gate_up_proj", "up_proj", "down_proj")


def is_stack(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 3 and name.rpartition(".")[2] in STACKS


def random_model(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    kind, values = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values | changes), dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def saved(model: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The stacks of experts, by name, of a model that is saved as transformers saves it."""
    model.save_pretrained(folder, **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if is_stack(name, parameter)}


def loaded(folder: Path, **options: Any) -> Any:
    options.setdefault("dtype", torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def in_4bit(quant_type: str = "nf4", nested: bool = True, **options: Any) -> BitsAndBytesConfig:
    options.setdefault("llm_int8_skip_modules", SKIPPED)
    options.setdefault("bnb_4bit_compute_dtype", torch.bfloat16)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=nested, **options
    )
