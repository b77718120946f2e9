"""python -m benchmarks.peft_step: a QLoRA step of peft with the patch on and off, with a cache and without."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import main
from benchmarks.record import Row
from benchmarks.side_by_side import METHOD, OFF, every_length
from nf4_patch.tools.bench.step import BUDGET, LLAMA, peft_model
from nf4_patch.tools.llama import config_of
from nf4_patch.tools.report import Progress


def rows(tell: Progress) -> Iterator[Row]:
    return every_length("peft", peft_model(config_of(LLAMA)), tell, OFF | {"cache all": BUDGET})


if __name__ == "__main__":
    main({"step": METHOD}, lambda tell: {"step": rows(tell)})
