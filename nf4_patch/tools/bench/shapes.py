"""The weights that are measured: the public challenge's and the projections of models that people fine-tune."""

from __future__ import annotations

import torch

from ..llama import Shape

MODELS = {
    "Llama 3.2 1B": Shape(2048, 8192, 16, heads=32, key_value_heads=8, vocabulary=128256, positions=8192),
    "Llama 3.1 8B": Shape(4096, 14336, 32, heads=32, key_value_heads=8, vocabulary=128256, positions=8192),
    "Qwen 2.5 7B": Shape(3584, 18944, 28, heads=28, key_value_heads=4, vocabulary=152064, positions=8192),
    "Llama 3.1 70B": Shape(8192, 28672, 80, heads=64, key_value_heads=8, vocabulary=128256, positions=8192),
}
LLAMA_8B, LLAMA_70B = MODELS["Llama 3.1 8B"], MODELS["Llama 3.1 70B"]

# The three configurations of the Unsloth NF4 challenge: (hidden, intermediate, seed, dtype, batch, length).
CHALLENGE = (
    (2048, 8192, 3407, torch.float16, 2, 3333),
    (1024, 4096, 3409, torch.bfloat16, 5, 777),
    (4096, 14336, 3408, torch.bfloat16, 3, 2048),
)


def projections(model: Shape) -> dict[tuple[int, int], str]:
    """[out, in] of a decoder layer's linear layers, by shape."""
    hidden, intermediate = model.hidden, model.intermediate
    return {
        (hidden // model.heads * model.key_value_heads, hidden): "k, v",
        (hidden, hidden): "q, o",
        (intermediate, hidden): "gate, up",
        (hidden, intermediate): "down",
    }


def shapes(challenge_only: bool = False) -> dict[tuple[int, int], str]:
    """[out, in] of every weight to measure and who uses it; the challenge's first, each shape once."""
    found: dict[tuple[int, int], list[str]] = {}
    for hidden, intermediate, *_ in CHALLENGE:
        found.setdefault((intermediate, hidden), []).append("challenge")
    for name, model in () if challenge_only else MODELS.items():
        for shape, layers in projections(model).items():
            found.setdefault(shape, []).append(f"{name} {layers}")
    return {shape: ", ".join(users) for shape, users in found.items()}
