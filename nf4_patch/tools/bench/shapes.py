"""The weights that are measured: the public challenge's and the projections of models that people fine-tune."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Model(NamedTuple):
    name: str
    hidden: int
    key_value: int  # rows of the key and value projections
    intermediate: int


MODELS = (
    Model("Llama 3.2 1B", 2048, 512, 8192),
    Model("Llama 3.1 8B", 4096, 1024, 14336),
    Model("Qwen 2.5 7B", 3584, 512, 18944),
    Model("Llama 3.1 70B", 8192, 1024, 28672),
)
LLAMA_8B = MODELS[1]

# The three configurations of the Unsloth NF4 challenge: (hidden, intermediate, seed, dtype, batch, length).
CHALLENGE = (
    (2048, 8192, 3407, torch.float16, 2, 3333),
    (1024, 4096, 3409, torch.bfloat16, 5, 777),
    (4096, 14336, 3408, torch.bfloat16, 3, 2048),
)


def projections(model: Model) -> dict[tuple[int, int], str]:
    """[out, in] of a decoder layer's linear layers, by shape."""
    hidden, key_value, intermediate = model[1:]
    return {
        (key_value, hidden): "k, v",
        (hidden, hidden): "q, o",
        (intermediate, hidden): "gate, up",
        (hidden, intermediate): "down",
    }


def shapes(challenge_only: bool = False) -> dict[tuple[int, int], str]:
    """[out, in] of every weight to measure and who uses it; the challenge's first, each shape once."""
    found: dict[tuple[int, int], list[str]] = {}
    for hidden, intermediate, *_ in CHALLENGE:
        found.setdefault((intermediate, hidden), []).append("challenge")
    for model in () if challenge_only else MODELS:
        for shape, layers in projections(model).items():
            found.setdefault(shape, []).append(f"{model.name} {layers}")
    return {shape: ", ".join(users) for shape, users in found.items()}
