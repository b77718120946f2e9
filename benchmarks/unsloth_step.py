"""python -m benchmarks.unsloth_step: a QLoRA step of Unsloth with the patch on and off, with a cache and without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import main
from benchmarks.checkpoint import save
from nf4_patch.tools.bench.record import Row
from nf4_patch.tools.bench.step import BUDGET, LENGTHS, LLAMA, METHOD, OFF, RANK, Step, every_length, optimizer_of
from nf4_patch.tools.llama import LINEARS, training_dtype
from nf4_patch.tools.report import Progress


def unsloth_model() -> Any:
    from unsloth import FastLanguageModel  # before transformers, as it asks

    dtype = training_dtype()
    with tempfile.TemporaryDirectory() as folder:
        save(folder, LLAMA, dtype, "cuda")
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=2048, dtype=dtype, load_in_4bit=True, local_files_only=True
        )
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", target_modules=list(LINEARS),
        use_gradient_checkpointing=True, random_state=0,
    )  # fmt: skip


def rows(tell: Progress) -> Iterator[Row]:
    model = unsloth_model()
    full = Step(model, optimizer_of(model), LENGTHS[0], True, BUDGET)
    full.observe()
    return every_length("unsloth", model, tell, OFF | {"cache 1/2": full.taken // 2, "cache all": BUDGET})


if __name__ == "__main__":
    main({"step": METHOD}, lambda tell: {"step": rows(tell)})
