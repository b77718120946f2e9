"""python -m benchmarks.experts: mixtures of experts in 4 bits, random weights in the shapes of real ones.

A step of training with peft, LoRA on the attention, with checkpointing and without; and generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks import main
from nf4_patch.tools.bench import trl
from nf4_patch.tools.bench.record import GPU_TIME, OURS, RATE, UNPATCHED, Check, Row
from nf4_patch.tools.bench.step import BUDGET, LENGTHS, METHOD, Settings, peft_model, side_by_side
from nf4_patch.tools.bench.timing import Times, alternating, kernel_times, wall_ms
from nf4_patch.tools.llama import LINEARS, build_4bit
from nf4_patch.tools.patch import patch
from nf4_patch.tools.report import Progress

ATTENTION = LINEARS[:4]
LAYERS = 2  # of a step
GENERATION_LAYERS = 16
TOKENS, PROMPT = 16, 16  # of a sequence that is generated


def qwen3(layers: int = LAYERS) -> Any:
    return trl.qwen3(layers, vocabulary=151936)


def gpt_oss() -> Any:
    """gpt-oss-20b: [experts, in, out], biases, gate and up interleaved."""
    from transformers import GptOssConfig

    return GptOssConfig(
        num_hidden_layers=LAYERS, num_local_experts=32, vocab_size=201088, hidden_size=2880, intermediate_size=2880,
        head_dim=64, num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


CONFIGURATIONS = {"Qwen3-30B-A3B": qwen3, "gpt-oss-20b": gpt_oss}


@torch.no_grad()
def generation(batch: int) -> Iterator[Row]:
    """Tokens a second of ``generate`` with Qwen3's shapes, greedy, the patch on and off alternating; and GPU time."""
    model = build_4bit(qwen3(GENERATION_LAYERS)).eval()
    prompt = torch.randint(3, 1000, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).cuda()
    texts = set()

    def generate() -> None:
        found = model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        texts.add(tuple(found.flatten().tolist()))

    sides = {OURS: generate, UNPATCHED: generate}

    def patched(name: str) -> AbstractContextManager[None]:
        return patch(name == OURS)

    walls = alternating(sides, wall_ms, 4, patched)
    rates = {name: Times(tuple(1e3 * batch * TOKENS / ms for ms in taken.values)) for name, taken in walls.items()}
    clocks = {"": (RATE, rates), f", {GPU_TIME}": ("ms", kernel_times(sides, patched, rounds=2))}
    check = Check(len(texts) == 1, f"{len(texts)} different texts with the patch and without")
    for words, (unit, times) in clocks.items():
        if times:
            subject = f"generation, {GENERATION_LAYERS} layers, batch {batch}{words}"
            yield Row(subject, unit, times, {UNPATCHED: check}, sizes={"batch": batch})


def training(tell: Progress) -> Iterator[Row]:
    for name, config in CONFIGURATIONS.items():
        model = peft_model(config(), ATTENTION)
        for how in ("checkpointing", "no checkpointing"):
            if how != "checkpointing":
                model.gradient_checkpointing_disable()
            for size in (LENGTHS[0], LENGTHS[-1]):
                tell("{}, {}: {}x{} tokens".format(name, how, *size))
                settings: Settings = {how: "off", f"{how} and everything cached": BUDGET}
                yield from side_by_side(name, model, size, settings, wall=10)
        del model


def rows(tell: Progress) -> Iterator[Row]:
    yield from training(tell)
    for batch in (1, 8):
        tell(f"generation: batch {batch}")
        yield from generation(batch)


if __name__ == "__main__":
    main({"step": METHOD}, lambda tell: {"step": rows(tell)})
