"""python -m benchmarks.unsloth_step: a QLoRA step of Unsloth with the patch on and off, with a cache and without."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import main
from benchmarks.record import Row
from benchmarks.side_by_side import METHOD, OFF, every_length
from nf4_patch.tools.bench.step import BUDGET, LENGTHS, LLAMA, Step, optimizer_of
from nf4_patch.tools.bench.trl import unsloth_model
from nf4_patch.tools.llama import config_of
from nf4_patch.tools.report import Progress


def rows(tell: Progress) -> Iterator[Row]:
    model = unsloth_model(config_of(LLAMA))
    full = Step(model, optimizer_of(model), LENGTHS[0], True, BUDGET)
    full.observe()
    return every_length("unsloth", model, tell, OFF | {"cache 1/2": full.taken // 2, "cache all": BUDGET})


if __name__ == "__main__":
    main({"step": METHOD}, lambda tell: {"step": rows(tell)})
