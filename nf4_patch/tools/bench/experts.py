"""Mixtures of experts in 4 bits, random weights in the shapes of real ones: a step of training, and generation."""

from __future__ import annotations

import time
from typing import Any

import torch

import nf4_patch

from ..llama import build_4bit
from .peers import OURS
from .record import RATE, Check, Row
from .timing import Times

LAYERS = 2  # of a step
TOKENS, PROMPT = 16, 16  # of a sequence that is generated
UNPATCHED = "unpatched"


def qwen3(layers: int = LAYERS) -> Any:
    """Qwen3-30B-A3B: 0.6 billion weights of experts a layer."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(  # type: ignore[call-arg]  # of its attention
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=8192, vocab_size=151936, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def gpt_oss(layers: int = LAYERS) -> Any:
    """gpt-oss-20b: [experts, in, out], biases, gate and up interleaved."""
    from transformers import GptOssConfig

    return GptOssConfig(
        num_hidden_layers=layers, num_local_experts=32, vocab_size=201088, hidden_size=2880, intermediate_size=2880,
        head_dim=64, num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


CONFIGURATIONS = {"Qwen3-30B-A3B": qwen3, "gpt-oss-20b": gpt_oss}


@torch.no_grad()
def generation(batch: int, layers: int = 16, rounds: int = 4) -> Row:
    """Tokens a second of ``generate`` with Qwen3's shapes, greedy, the patch on and off alternating."""
    model = build_4bit(qwen3(layers)).eval()
    prompt = torch.randint(3, 1000, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).cuda()
    rates: dict[str, list[float]] = {OURS: [], UNPATCHED: []}
    tokens = set()
    for round_ in range(-1, rounds):
        for name, taken in rates.items():
            nf4_patch.enable() if name == OURS else nf4_patch.disable()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            found = model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
            torch.cuda.synchronize()
            if round_ >= 0:  # the first compiles
                taken.append(batch * TOKENS / (time.perf_counter() - begin))
            tokens.add(tuple(found.flatten().tolist()))
    times = {name: Times(tuple(taken)) for name, taken in rates.items()}
    check = Check(len(tokens) == 1, f"{len(tokens)} different texts with the patch and without")
    return Row(f"generation, {layers} layers, batch {batch}", RATE, times, {UNPATCHED: check}, sizes={"batch": batch})
