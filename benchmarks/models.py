"""Layer shapes of common models, and causal models with random 4-bit weights, for benchmarks without a download."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nf4_patch.tools import step
from nf4_patch.tools.step import build_4bit as build_4bit
from nf4_patch.tools.step import training_dtype as training_dtype

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


class Shape(NamedTuple):
    """The sizes of a Llama model, with the field names of transformers' LlamaConfig."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 512
    max_position_embeddings: int = 2048


# MODELS holds the sizes of Llama 3.2 1B, Llama 3.1 8B and Llama 3.1 70B, in the order of Shape's fields.
MODELS = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 128256, 8192),
    "llama-8b": Shape(**step.LLAMA_8B),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128256, 8192),
}
LLAMA_8B = MODELS["llama-8b"]


def projections(model: Shape) -> list[tuple[int, int]]:
    """Return the shapes [out, in] of a decoder layer's projections: k and v, q and o, gate and up, and down."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    heads = hidden // model.num_attention_heads * model.num_key_value_heads
    return [(heads, hidden), (hidden, hidden), (intermediate, hidden), (hidden, intermediate)]


def config_of(shape: Shape, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Return a LlamaConfig, in :func:`training_dtype` unless another dtype is given."""
    from transformers import LlamaConfig

    name = str(dtype or training_dtype()).removeprefix("torch.")
    options |= {"tie_word_embeddings": False, "dtype": name, "pad_token_id": 0}
    return LlamaConfig(**shape._asdict(), **options)


def qwen3(layers: int = 2, vocabulary: int = 32_000) -> Any:
    """Return the config of Qwen3-30B-A3B, which has 0.6 billion expert weights per layer."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(  # type: ignore[call-arg]
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        vocab_size=vocabulary, norm_topk_prob=True, max_position_embeddings=8192, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip


OTHERS: dict[str, tuple[str, int, dict[str, Any]]] = {  # name of a config's class, layers of the whole model, its sizes
    "gemma3": ("Gemma3TextConfig", 34, {  # Gemma-3-4B
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 262208, "sliding_window": 1024}),
    "gpt-oss": ("GptOssConfig", 24, {  # gpt-oss-20b
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128}),
    "qwen3.5": ("Qwen3_5TextConfig", 32, {  # Qwen3.5-4B
        "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 248320}),
}  # fmt: skip


def other(name: str, layers: int) -> Any:
    """Return the config of a model of OTHERS with fewer layers and a proportionally smaller vocabulary.

    The last layer has full attention.
    """
    import transformers

    kind, whole, sizes = OTHERS[name]
    kinds = ["linear_attention" if name == "qwen3.5" else "sliding_attention"] * layers
    period = 2 if name == "gpt-oss" else 4  # Gemma has 6, more than a few layers
    kinds[period - 1 :: period] = ["full_attention"] * (layers // period)
    options = {"num_hidden_layers": layers, "layer_types": kinds, "vocab_size": sizes["vocab_size"] * layers // whole}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    return getattr(transformers, kind)(**sizes | options | special)
