"""python -m benchmarks.experts: mixtures of experts with enable(experts="4bit"), random weights in the shapes of real ones.

GPU time of a step with checkpointing: LoRA on the experts, packed and in 16 bits, next to peft's; frozen experts with LoRA on
the attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from benchmarks import main
from benchmarks.record import GPU_TIME, OURS, Check, Row
from benchmarks.side_by_side import METHOD, gib, kernel_times
from nf4_patch.nf4.routing import launch
from nf4_patch.tools.bench import trl
from nf4_patch.tools.bench.step import BUDGET, Step, optimizer_of, peft_model
from nf4_patch.tools.bench.trl import EXPERTS, unpack
from nf4_patch.tools.llama import LINEARS
from nf4_patch.tools.patch import patch
from nf4_patch.tools.report import Progress

ATTENTION = LINEARS[:4]
LAYERS = 2  # of a step
SIZES = ((1, 512), (1, 2048), (1, 4096))
CACHED, DENSE, PEFT, THEIRS = "cached", "experts in 16 bits", "peft, experts in 16 bits", "transformers' forward"


def qwen3(layers: int = LAYERS) -> Any:
    return trl.qwen3(layers, vocabulary=151936)


def gpt_oss() -> Any:
    """gpt-oss-20b: [experts, in, out], biases, gate and up interleaved."""
    from transformers import GptOssConfig

    return GptOssConfig(
        num_hidden_layers=LAYERS, num_local_experts=32, vocab_size=201088, hidden_size=2880, intermediate_size=2880,
        head_dim=64, num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def glm() -> Any:
    """GLM-4.5-Air: 2.2 billion weights of experts a layer."""
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(  # type: ignore[call-arg]  # of its attention
        hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=LAYERS,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
        first_k_dense_replace=0, vocab_size=151552, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


CONFIGURATIONS = {"Qwen3-30B-A3B": qwen3, "gpt-oss-20b": gpt_oss, "GLM-4.5-Air": glm}


class ExpertsStep(Step):
    """With the patch or without; our forward of the experts by kernels, or in PyTorch as transformers' own."""

    by_kernels = True

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        before = launch.serves
        launch.serves = before if self.by_kernels else lambda tensor: False  # type: ignore[assignment]
        try:
            with patch(self.on, cache=self.cache, experts="4bit"):
                for _ in range(2):
                    self()
                yield
        finally:
            launch.serves = before


def bytes_of(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def frozen(tell: Progress) -> Iterator[Row]:
    """Experts packed, LoRA on the attention only."""
    for name, config in CONFIGURATIONS.items():
        model = peft_model(config(), ATTENTION)
        sides = {OURS: (model, True, "off"), CACHED: (model, True, BUDGET), THEIRS: (model, True, "off")}
        yield from compared(name, sides, (model,), tell)
        del model, sides


def compared(subject: str, sides: dict[str, Any], models: tuple[Any, ...], tell: Progress) -> Iterator[Row]:
    """GPU time of a step of each side: (model, patch, cache), by name."""
    optimizers = {model: optimizer_of(model) for model in models}
    for size in SIZES:
        tell("{}: {}x{} tokens".format(subject, *size))
        steps = {
            name: ExpertsStep(model, optimizers[model], size, on, cache) for name, (model, on, cache) in sides.items()
        }
        steps[THEIRS].by_kernels = False
        notes = {}
        for name, step in steps.items():
            step.observe()
            others = sum(bytes_of(model) for model in models if model is not step.model)
            notes[f"peak memory, {name}"] = gib(step.peak - others)
        loss = {name: step.losses[0] for name, step in steps.items()}
        checks = {
            name: Check(
                abs(loss[OURS] - loss[name]) <= 2**-7 * loss[name], f"losses {loss[OURS]:.4f} and {loss[name]:.4f}"
            )
            for name in list(sides)[1:]
        }

        def patched(name: str, steps: dict[str, ExpertsStep] = steps) -> AbstractContextManager[None]:
            return steps[name].patched()

        times = kernel_times(steps, patched, rounds=3)
        sizes = dict(zip(("batch", "tokens"), size, strict=True))
        yield Row("{} {}x{}, {}".format(subject, *size, GPU_TIME), "ms", times, checks, sizes=sizes, notes=notes)


if __name__ == "__main__":
    sections = {"LoRA on experts": lora, "frozen experts": frozen}
    main(METHOD, lambda tell: {name: rows(tell) for name, rows in sections.items()})
