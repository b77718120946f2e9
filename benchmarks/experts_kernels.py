"""python -m benchmarks.experts_kernels: where the GPU time of a mixture's step goes, next to Unsloth's step if it is installed.

Two layers, random weights in real shapes, a vocabulary of 32,000, so that the head hides little; with checkpointing where it is
not said otherwise. Unsloth compiles each layer and keeps its activations, although asked for checkpointing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import multiprocessing
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import main
from benchmarks.checkpoint import save_config
from benchmarks.experts import ATTENTION, CACHED, SIZES, THEIRS, ExpertsStep, glm, gpt_oss, qwen3
from benchmarks.record import GPU_TIME, OURS, Check, Row
from benchmarks.side_by_side import gib
from nf4_patch.tools.bench.step import BUDGET, RANK, Step, optimizer_of, peft_model
from nf4_patch.tools.bench.timing import Times, kernels
from nf4_patch.tools.bench.trl import EXPERTS
from nf4_patch.tools.patch import patch
from nf4_patch.tools.report import Progress

METHOD = "GPU time of a step: its kernels and copies, summed by what they do; the median of three steps."
VOCABULARY, ROUNDS = 32_000, 3
UNSLOTH, KEPT = "unsloth", "no checkpointing"
TRAINED = {"LoRA on experts": EXPERTS, "frozen experts": []}
QWEN3 = "Qwen3-30B-A3B"
MODELS = {QWEN3: qwen3, "gpt-oss-20b": gpt_oss, "GLM-4.5-Air": glm}
# What a kernel does, by its name: the first that is found in it.
KINDS = {
    "grouped matmuls": "GroupProblem|grouped",
    "4-bit to 16-bit": "dequant",
    "around the experts": "combine_kernel|weigh_kernel|silu_and_mul|moe|rout",
    "attention": "flash|fmha|attention|sdpa",
    "other matmuls": "gemm|nvjet|cutlass|splitK|cublas",
    "compiled by Inductor": "triton_",
    "copies and casts": "[Cc]opy|Memcpy|CatArray",
    "sorting and indexing": "[Ii]ndex|gather|scatter|[Ss]ort|[Rr]adix|[Ss]can|arange|searchsorted|bucketize",
    "sums and norms": "reduce|softmax|SoftMax|Softmax|norm|nll",
    "elementwise": "elementwise|Memset|fill",
    "optimizer": "multi_tensor",
}

Taken = tuple[list[dict[str, float]], float, str]  # the milliseconds of each round by kind, the loss, the peak memory


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "else")


def taken(step: Step) -> Taken:
    """What one side takes of the GPU, alone."""
    step.tokens = step.tokens % VOCABULARY
    step.observe()
    rounds = []
    with step.patched():
        for _ in range(ROUNDS):
            sums: dict[str, float] = defaultdict(float)
            for name, ms in kernels(step):
                sums[kind_of(name)] += ms
            rounds.append(dict(sums))
    return rounds, step.losses[0], gib(step.peak)


class Kept(ExpertsStep):
    """Without gradient checkpointing."""

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        self.model.gradient_checkpointing_disable()
        try:
            with super().patched():
                yield
        finally:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})


def sizes_of(name: str) -> list[tuple[int, int]]:
    return [SIZES[0], SIZES[-1]] if name == QWEN3 else [SIZES[-1]]


def config_of(name: str) -> Any:
    config = MODELS[name]()
    config.vocab_size = VOCABULARY
    return config


def peft_sides(name: str, targets: list[str]) -> dict[tuple[int, int], dict[str, Taken]]:
    with patch(True, experts="4bit"):
        model = peft_model(config_of(name), ATTENTION, **({"target_parameters": targets} if targets else {}))
    optimizer = optimizer_of(model)
    found: dict[tuple[int, int], dict[str, Taken]] = {}
    for size in sizes_of(name):
        sides = {side: ExpertsStep(model, optimizer, size, True) for side in (OURS, THEIRS)}
        sides[THEIRS].by_kernels = False
        sides[CACHED] = ExpertsStep(model, optimizer, size, True, BUDGET)
        sides[KEPT] = Kept(model, optimizer, size, True)
        found[size] = {side: taken(step) for side, step in sides.items()}
    return found


def unsloth_side(name: str, targets: list[str]) -> dict[tuple[int, int], Taken]:
    """The same training by Unsloth's compiled layers, experts packed; for a process of its own."""
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as folder:
        save_config(folder, config_of(name), "cuda")
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=SIZES[-1][1], dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True
        )
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", use_gradient_checkpointing=True, random_state=0,
        target_modules=[*ATTENTION, *(target.rpartition(".")[2] for target in targets)],
    )  # fmt: skip
    optimizer = optimizer_of(model)
    return {size: taken(Step(model, optimizer, size, False)) for size in sizes_of(name)}


def in_a_process(function: Any, *arguments: Any) -> Any:
    """Unsloth patches transformers for the whole process."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def rows(name: str, what: str, tell: Progress) -> Iterator[Row]:
    tell(f"{name}, {what}")
    every = in_a_process(peft_sides, name, TRAINED[what])
    if name == QWEN3 and importlib.util.find_spec("unsloth"):
        for size, side in in_a_process(unsloth_side, name, TRAINED[what]).items():
            every[size][UNSLOTH] = side
    for size, sides in every.items():
        loss = {side: found for side, (_, found, _) in sides.items()}
        checks = {
            side: Check(abs(loss[OURS] - other) <= 2**-7 * other, f"losses {loss[OURS]:.4f} and {other:.4f}")
            for side, other in loss.items()
            if side != OURS
        }
        times = {side: Times(tuple(sum(sums.values()) for sums in rounds)) for side, (rounds, _, _) in sides.items()}
        notes = {f"peak memory, {side}": peak for side, (_, _, peak) in sides.items()}
        for kind in (*KINDS, "else"):
            by_side = {
                side: Times(tuple(sums.get(kind, 0.0) for sums in rounds)).median
                for side, (rounds, _, _) in sides.items()
            }
            notes[kind] = ", ".join(f"{side} {ms:.2f}" for side, ms in by_side.items())
        sizes = dict(zip(("batch", "tokens"), size, strict=True))
        yield Row("{} {}x{}, {}".format(name, *size, GPU_TIME), "ms", times, checks, sizes=sizes, notes=notes)


def sections(tell: Progress) -> dict[str, list[Row]]:
    return {
        what: [row for name in names for row in rows(name, what, tell)]
        for what, names in {"LoRA on experts": [QWEN3], "frozen experts": [*MODELS]}.items()
    }


if __name__ == "__main__":
    main(METHOD, sections)
