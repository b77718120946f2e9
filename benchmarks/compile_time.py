"""python -m benchmarks.compile_time: how long torch.compile takes over a peft model, with the patch and without.

The first step of the compiled model, nothing in Inductor's caches nor in Triton's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch._inductor import utils as inductor

from benchmarks import main
from benchmarks.side_by_side import format_losses, row
from nf4_patch.tools.bench.record import OURS, UNPATCHED, Row
from nf4_patch.tools.bench.step import LENGTHS, LLAMA, Step, optimizer_of, peft_model
from nf4_patch.tools.bench.timing import alternating, wall_ms
from nf4_patch.tools.llama import config_of
from nf4_patch.tools.report import Progress

ROUNDS = 2
AGREE = 2**-8  # bf16's rounding: two compilations of stock by Inductor do not repeat to the bit either (H200)
METHOD = (
    "The first step, compiled again, the patch on and off alternating. Inductor does not repeat to the bit without us, so "
    "its losses need agree to 2**-8 only."
)


class FirstStep(Step):
    """A step of the model compiled again."""

    def __call__(self) -> torch.Tensor:
        eager = self.model
        torch._dynamo.reset()
        fresh_cache = getattr(inductor, "fresh_cache", None) or inductor.fresh_inductor_cache  # before PyTorch 2.8
        try:
            with fresh_cache():
                self.model = torch.compile(eager)
                loss = super().__call__()
                self.losses.append(loss.item())
        finally:
            self.model = eager
        return loss


def agree(ours: Iterable[float], stock: Iterable[float]) -> bool:
    """Whether all losses lie within AGREE of each other."""
    losses = sorted((*ours, *stock))
    return losses[-1] - losses[0] <= AGREE * abs(losses[0])


def rows(tell: Progress) -> Iterator[Row]:
    model = peft_model(config_of(LLAMA))
    optimizer = optimizer_of(model)
    size = LENGTHS[0]
    steps: dict[str, Step] = {name: FirstStep(model, optimizer, size, name == OURS) for name in (OURS, UNPATCHED)}
    tell(f"compile: {2 * ROUNDS + 2} compilations")
    times = alternating(steps, wall_ms, ROUNDS, lambda name: steps[name].patched())
    ours, stock = (set(steps[name].losses) for name in (OURS, UNPATCHED))
    notes = {"loss": f"{format_losses(ours)} (unpatched {format_losses(stock)})"}
    yield row("compile {}x{}".format(*size), size, times, agree(ours, stock), notes)


if __name__ == "__main__":
    main({"step": METHOD}, lambda tell: {"step": rows(tell)})
