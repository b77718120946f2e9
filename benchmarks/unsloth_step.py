"""python -m benchmarks.unsloth_step: a QLoRA step of Unsloth with the patch on and off, with a cache and without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import main
from benchmarks.cache import WHOLE
from benchmarks.checkpoint import save
from nf4_patch.tools.bench.record import Row
from nf4_patch.tools.bench.step import BUDGET, LENGTHS, LLAMA, METHOD, OFF, RANK, Step, optimizer_of, side_by_side
from nf4_patch.tools.llama import LINEARS, Shape, training_dtype
from nf4_patch.tools.report import Progress

ENTIRE = ("Llama-3.2-1B",)


def unsloth_model(shape: Shape = LLAMA) -> Any:
    from unsloth import FastLanguageModel  # before transformers, as it asks

    dtype = training_dtype()
    with tempfile.TemporaryDirectory() as folder:
        save(folder, shape, dtype, "cuda")
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=2048, dtype=dtype, load_in_4bit=True, local_files_only=True
        )
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", target_modules=list(LINEARS),
        use_gradient_checkpointing=True, random_state=0,
    )  # fmt: skip


def rows(tell: Progress) -> Iterator[Row]:
    models = {"unsloth": (LLAMA, LENGTHS)} | {f"unsloth {name}": (WHOLE[name], LENGTHS[:1]) for name in ENTIRE}
    for i, (name, (shape, lengths)) in enumerate(models.items()):
        tell(name, i, len(models))
        model = unsloth_model(shape)
        full = Step(model, optimizer_of(model), lengths[0], True, BUDGET)
        full.observe()
        settings = OFF | {"cache 1/2": full.held // 2, "cache all": BUDGET}
        for size in lengths:
            yield from side_by_side(name, model, size, settings, wall=20 if shape == LLAMA else 10)


if __name__ == "__main__":
    main({"step": METHOD}, lambda tell: {"step": rows(tell)})
