"""python -m benchmarks.cache: GPU time of a QLoRA step of whole models by what the weight cache may take, next to 16-bit weights."""

from __future__ import annotations

import fractions
from collections.abc import Iterator

import torch

from benchmarks import main
from benchmarks.record import Row
from benchmarks.side_by_side import METHOD, OFF, Settings, side_by_side
from nf4_patch.tools.bench.step import BUDGET, Step, optimizer_of, peft_model
from nf4_patch.tools.llama import LLAMA_8B, MODELS, Shape, config_of
from nf4_patch.tools.report import Progress

LENGTHS = ((1, 512), (1, 2048))  # (batch, tokens)
WHOLE = {
    "Llama-3.2-1B": MODELS["llama-1b"],
    "Llama-3.2-3B": Shape(3072, 8192, 28, 24, 8, 128256, 8192),
    "Llama-3.1-8B": LLAMA_8B,
}


class DenseStep(Step):
    """The same step with nn.Linear on the same weights, dequantized, and without the patch."""

    def __init__(self, like: Step):
        from bitsandbytes.functional import dequantize_4bit
        from bitsandbytes.nn import Linear4bit

        vars(self).update(vars(like), on=False)
        adapters = [m for m in self.model.modules() if isinstance(getattr(m, "base_layer", None), Linear4bit)]
        self.layers = []  # (adapter, 4-bit layer, dense layer)
        for adapter in adapters:
            packed = adapter.base_layer
            dense = torch.nn.Linear(packed.in_features, packed.out_features, packed.bias is not None, device="meta")
            weight = dequantize_4bit(packed.weight, packed.weight.quant_state)
            dense.weight, dense.bias = torch.nn.Parameter(weight, requires_grad=False), packed.bias
            self.layers.append((adapter, packed, dense))

    def __call__(self) -> torch.Tensor:
        for adapter, _, dense in self.layers:
            adapter.base_layer = dense
        try:
            return super().__call__()
        finally:
            for adapter, packed, _ in self.layers:
                adapter.base_layer = packed


def rows(tell: Progress) -> Iterator[Row]:
    for i, (name, shape) in enumerate(WHOLE.items()):
        tell(f"cache: {name}", i, len(WHOLE))
        model = peft_model(config_of(shape))
        full = Step(model, optimizer_of(model), LENGTHS[0], True, BUDGET)
        full.observe()
        settings: Settings = OFF | {
            f"cache {part}": int(full.taken * fractions.Fraction(part)) for part in ("1/4", "1/2", "3/4")
        }
        settings |= {"cache all": BUDGET}
        for size in LENGTHS:  # one round: the profiler takes seconds for a step of a whole model
            yield from side_by_side(name, model, size, settings, wall=0, kernels=1, dense=DenseStep)


if __name__ == "__main__":
    main({"step": METHOD + " 16-bit weights: nn.Linear on the dequantized weights."}, lambda tell: {"step": rows(tell)})
