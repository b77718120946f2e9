"""python -m benchmarks.cache: GPU time of a QLoRA step of whole models, by size of the weight cache and with 16-bit weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import gib, kernel_times, main
from benchmarks.models import LLAMA_8B, MODELS, config_of
from benchmarks.record import DENSE, GPU_TIME, OURS, UNPATCHED, Check, Row
from benchmarks.training import BUDGET, Size, Step, optimizer_of, peft_model
from nf4_patch.tools.report import Progress

METHOD = (
    f"A QLoRA step, alternating between the patch on ({OURS}) and off. GPU time is the sum of its kernels and copies."
    f" {DENSE}: nn.Linear on the dequantized weights."
)
LENGTHS = ((1, 512), (1, 2048))  # (batch, tokens)
WHOLE = {"Llama-3.2-1B": MODELS["llama-1b"], "Llama-3.1-8B": LLAMA_8B}


class DenseStep(Step):
    """A step without the patch, with nn.Linear on the dequantized weights."""

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


def compared(subject: str, model: torch.nn.Module, size: Size, settings: dict[str, str | int]) -> Iterator[Row]:
    """Yield a row for each cache setting ("" is off). Each is compared with the step without the patch and with the dense step."""
    optimizer = optimizer_of(model)
    steps = {name: Step(model, optimizer, size, True, cache) for name, cache in settings.items()}
    steps[UNPATCHED] = Step(model, optimizer, size, False)
    for step in steps.values():
        step.observe()
    losses = {loss for step in steps.values() for loss in step.losses}
    said = " / ".join(f"{loss:.6f}" for loss in sorted(losses))
    checks = {UNPATCHED: Check(len(losses) == 1, f"losses with the patch and without: {said}")}
    steps[DENSE] = DenseStep(steps[UNPATCHED])
    # one round, because the profiler takes seconds for a step of a whole model
    times = kernel_times(steps, lambda name: steps[name].patched(), rounds=1)
    others = {name: times[name] for name in (UNPATCHED, DENSE) if name in times}
    for name in settings if times else ():
        step = steps[name]
        notes = {"kernel calls a step": str(step.calls), "loss": said}
        notes["peak memory"] = f"{gib(step.peak)} (unpatched {gib(steps[UNPATCHED].peak)})"
        if step.taken:
            notes["cache"] = gib(step.taken)
        words = ", ".join(filter(None, ("{} {}x{}".format(subject, *size), name, GPU_TIME)))
        sizes = dict(zip(("batch", "tokens"), size, strict=True))
        yield Row(words, "ms", {OURS: times[name], **others}, checks, sizes=sizes, notes=notes)


def rows(tell: Progress) -> Iterator[Row]:
    for i, (name, shape) in enumerate(WHOLE.items()):
        tell(f"cache: {name}", i, len(WHOLE))
        model = peft_model(config_of(shape))
        full = Step(model, optimizer_of(model), LENGTHS[0], True, BUDGET)
        full.observe()
        for size in LENGTHS:
            yield from compared(name, model, size, {"": "off", "cache 1/2": full.taken // 2, "cache all": BUDGET})


if __name__ == "__main__":
    main(METHOD, lambda tell: {"step": rows(tell)})
