"""python -m benchmarks.experts: mixtures of experts with enable(experts="4bit"), with random weights in the shapes of real models.

It measures the GPU time of a step with checkpointing and LoRA on the attention. One side uses nf4_patch's kernels
around the products, and another side uses PyTorch. ``python -m benchmarks.recipe --mixture`` measures LoRA on the
experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from benchmarks import gib, kernel_times, main, models
from benchmarks.record import GPU_TIME, OURS, Check, Row
from benchmarks.training import BUDGET, Step, optimizer_of, peft_model
from nf4_patch.moe import launch
from nf4_patch.tools.patch import patch
from nf4_patch.tools.report import Progress

LAYERS = 2  # per model
SIZES = ((1, 512), (1, 2048), (1, 4096))
CACHED, THEIRS = "cached", "transformers' forward"
SIDES: dict[str, str] = {OURS: "off", CACHED: BUDGET, THEIRS: "off"}  # values of cache=
METHOD = "A QLoRA step, alternating between the sides. GPU time is the sum of its kernels and copies."


def qwen3(layers: int = LAYERS) -> Any:
    return models.qwen3(layers, vocabulary=151936)


def gpt_oss() -> Any:
    """Return the config of gpt-oss-20b. Its stacks are [experts, in, out] and have biases, and gate and up are interleaved."""
    from transformers import GptOssConfig

    return GptOssConfig(
        num_hidden_layers=LAYERS, num_local_experts=32, vocab_size=201088, hidden_size=2880, intermediate_size=2880,
        head_dim=64, num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def glm() -> Any:
    """Return the config of GLM-4.5-Air, which has 2.2 billion expert weights per layer."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(  # type: ignore[call-arg]  # of its attention
        hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=LAYERS,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
        first_k_dense_replace=0, vocab_size=151552, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


CONFIGURATIONS = {"Qwen3-30B-A3B": qwen3, "gpt-oss-20b": gpt_oss, "GLM-4.5-Air": glm}


class ExpertsStep(Step):
    """A step whose experts run with nf4_patch's kernels, or in PyTorch like transformers' forward."""

    by_kernels = True

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        before = launch.supports
        launch.supports = before if self.by_kernels else lambda tensor: False  # type: ignore[assignment]
        try:
            with patch(self.on, cache=self.cache, experts="4bit"):
                for _ in range(2):
                    self()
                yield
        finally:
            launch.supports = before


def patched(steps: dict[str, ExpertsStep], name: str) -> AbstractContextManager[None]:
    return steps[name].patched()


def rows(tell: Progress) -> Iterator[Row]:
    """Yield a row per model and size, with the GPU time of a step of each side."""
    for subject, config in CONFIGURATIONS.items():
        model = peft_model(config(), models.LINEARS[:4])
        optimizer = optimizer_of(model)
        for size in SIZES:
            tell("{}: {}x{} tokens".format(subject, *size))
            steps = {name: ExpertsStep(model, optimizer, size, True, cache) for name, cache in SIDES.items()}
            steps[THEIRS].by_kernels = False
            for step in steps.values():
                step.observe()
            notes = {f"peak memory, {name}": gib(step.peak) for name, step in steps.items()}
            ours, *others = ((name, step.losses[0]) for name, step in steps.items())
            checks = {
                name: Check(abs(ours[1] - loss) <= 2**-7 * loss, f"losses {ours[1]:.4f} and {loss:.4f}")
                for name, loss in others
            }
            times = kernel_times(steps, partial(patched, steps), rounds=3)
            sizes = dict(zip(("batch", "tokens"), size, strict=True))
            yield Row("{} {}x{}, {}".format(subject, *size, GPU_TIME), "ms", times, checks, sizes=sizes, notes=notes)


if __name__ == "__main__":
    main(METHOD, lambda tell: {"frozen experts": rows(tell)})
