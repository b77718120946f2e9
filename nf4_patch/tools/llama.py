"""The layer shapes of common models and the training dtype of a GPU, for the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # only annotations need it, so an import of this module does not import torch
    import torch


class Shape(NamedTuple):
    """The sizes of a Llama model, with the field names of transformers' LlamaConfig."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 512
    max_position_embeddings: int = 2048


# MODELS holds the sizes of Llama 3.2 1B, Llama 3.1 8B, Qwen 2.5 7B and Llama 3.1 70B, in the order of Shape's fields.
MODELS = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 128256, 8192),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192),
    "qwen-7b": Shape(3584, 18944, 28, 28, 4, 152064, 8192),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128256, 8192),
}
LLAMA_8B = MODELS["llama-8b"]


def projections(model: Shape) -> list[tuple[int, int]]:
    """Return the shapes [out, in] of the projections in a decoder layer: of k and v, q and o, gate and up, and down."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    heads = hidden // model.num_attention_heads * model.num_key_value_heads
    return [(heads, hidden), (hidden, hidden), (intermediate, hidden), (hidden, intermediate)]


def training_dtype() -> torch.dtype:
    """Return bf16, or fp16 on a GPU before sm_80 (such as a T4), where PyTorch emulates bf16."""
    import torch

    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if old else torch.bfloat16
