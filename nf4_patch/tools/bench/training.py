"""A QLoRA training step with the patch on and off, alternating, on the same model: peft + transformers, or Unsloth.

Random weights, LoRA r=16, gradient checkpointing, AdamW. The learning rate is 0: every step does the whole work and
leaves the loss as it was, to compare by bits. And how long torch.compile takes over the peft model: its first step,
compiled anew.
"""

from __future__ import annotations

import contextlib
import fractions
import gc
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._inductor import utils as inductor

import nf4_patch

from ...patching import hooks
from ..llama import LINEARS, Shape, build_4bit, config_of, save
from ..report import Progress
from . import experts
from .peers import OURS
from .record import DENSE, GPU_TIME, UNPATCHED, Check, Row
from .timing import Times, kernel_times, wall_times

BUDGET = "64GiB"
LENGTHS = ((1, 512), (2, 1024), (2, 2048))  # (batch, tokens)
RANK = 16
VOCABULARY = 128256
LLAMAS = {
    "Llama-3.2-1B": Shape(2048, 8192, 16, heads=32, key_value_heads=8, vocabulary=VOCABULARY, positions=8192),
    "Llama-3.2-3B": Shape(3072, 8192, 28, heads=24, key_value_heads=8, vocabulary=VOCABULARY, positions=8192),
    "Llama-3.1-8B": Shape(4096, 14336, 32, heads=32, key_value_heads=8, vocabulary=VOCABULARY, positions=8192),
}
LAYERS = 4  # of the 8B model, in every step but those of whole models
LLAMA = LLAMAS["Llama-3.1-8B"]._replace(layers=LAYERS)
ATTENTION = LINEARS[:4]


def peft_model(config: Any, targets: Iterable[str] = LINEARS) -> Any:
    from peft import LoraConfig, get_peft_model

    model = build_4bit(config)
    # Not prepare_model_for_kbit_training: its fp32 head hides the layers behind a matmul of no 4-bit weight.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    return get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(targets), task_type="CAUSAL_LM")
    )


def unsloth_model() -> Any:
    from unsloth import FastLanguageModel  # before transformers, as it asks

    with tempfile.TemporaryDirectory() as folder:
        save(folder, LLAMA, device="cuda")
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True
        )
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", target_modules=list(LINEARS),
        use_gradient_checkpointing=True, random_state=0,
    )  # fmt: skip


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """For the model in training mode, its adapters random."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:  # peft starts B at zero, which would hide the adapters from the loss
            parameter.normal_(std=0.01)
    return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)


Settings = dict[str, str | int]  # of the cache, by what they are called
OFF: Settings = {"": "off"}


class Step:
    """One training step on fixed tokens, the patch on or off; remembers the losses and the peak memory."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, batch: int, length: int, patch: bool, cache: str | int = "off"
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(batch * length)
        self.tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator).cuda()
        self.model, self.optimizer, self.patch, self.cache = model, optimizer, patch, cache
        self.losses: list[float] = []
        self.peak = self.held = self.calls = 0

    def switch(self) -> None:
        if not self.patch:
            return nf4_patch.disable()
        before = nf4_patch.status().cache.mode
        nf4_patch.enable(cache=self.cache)
        if nf4_patch.status().cache.mode not in (before, "off", "block"):
            for _ in range(2):  # fills it; the second finds what every further one finds
                self()

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def observe(self) -> None:
        """A step outside the timing: its loss, peak memory and kernel calls, and what the cache holds then."""
        self.switch()
        self()  # compiles, allocates
        torch.cuda.synchronize()
        gc.collect()  # of the model before this one
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        calls = nf4_patch.status().hits
        self.losses.append(self().item())
        self.calls = nf4_patch.status().hits - calls
        self.peak = torch.cuda.max_memory_allocated()
        self.held = sum(nf4_patch.status().cache.held.values())


class DenseStep(Step):
    """The same step with nn.Linear on the same weights, dequantized, and without the patch."""

    def __init__(self, like: Step):
        from bitsandbytes.functional import dequantize_4bit
        from bitsandbytes.nn import Linear4bit

        vars(self).update(vars(like), patch=False)
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


AGREE = 2**-8  # bf16's rounding: two compilations of stock by Inductor do not repeat to the bit either (H200)


class FirstStep(Step):
    """A step of the model compiled anew, nothing in Inductor's caches nor in Triton's."""

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


def compiling(tell: Progress, rounds: int = 2) -> Iterator[Row]:
    """Wall time of the first step of a compiled peft model with the patch and without."""
    tell(f"compile: {LAYERS} Llama-3.1-8B layers")
    with restored():
        model = peft_model(config_of(LLAMA))
        optimizer = optimizer_of(model)
        batch, length = LENGTHS[0]
        steps = {OURS: FirstStep(model, optimizer, batch, length, True),
                 UNPATCHED: FirstStep(model, optimizer, batch, length, False)}  # fmt: skip
        tell(f"compile: {2 * rounds + 2} compilations")
        times = wall_times(steps, {name: step.switch for name, step in steps.items()}, rounds, warmups=1)
        ours, stock = (sorted(set(steps[name].losses)) for name in (OURS, UNPATCHED))
        agree = max(ours[-1], stock[-1]) - min(ours[0], stock[0]) <= AGREE * abs(stock[0])
        loss = f"{format_losses(ours)} (unpatched {format_losses(stock)})"
        yield row(f"compile {batch}x{length}", batch, length, times, agree, {"loss": loss})


def format_losses(losses: Iterable[float]) -> str:
    return " / ".join(f"{loss:.6f}" for loss in sorted(losses))


def row(subject: str, batch: int, length: int, times: dict[str, Times], agree: bool, notes: dict[str, str]) -> Row:
    """A step's times, whose ratio depends on the losses that ``notes`` hold."""
    check = Check(agree, f"losses with the patch and without: {notes['loss']}")
    return Row(subject, "ms", times, {UNPATCHED: check}, sizes={"batch": batch, "tokens": length}, notes=notes)


def run(what: str, tell: Progress) -> Iterator[Row]:
    """Wall time of a step with the patch and without, GPU time, peak memory, the loss of both to the bit.

    Args:
        what: "peft", "unsloth", "moe", "cache" or "compile".
    """
    with restored():
        if what == "compile":
            yield from compiling(tell)
        elif what == "unsloth":
            yield from every_length("unsloth", unsloth_model(), tell)
        elif what == "peft":
            yield from every_length("peft", peft_model(config_of(LLAMA)), tell, {"cache all": BUDGET})
        elif what == "cache":
            yield from budgets(tell)
        else:
            yield from mixtures(tell)


def every_length(subject: str, model: Any, tell: Progress, settings: Settings | None = None) -> Iterator[Row]:
    for i, (batch, length) in enumerate(LENGTHS):
        tell(f"{subject}: {batch}x{length} tokens", i, len(LENGTHS))
        yield from side_by_side(subject, model, batch, length, OFF | (settings or {}))


def budgets(tell: Progress) -> Iterator[Row]:
    """GPU time by what the cache may take, beside 16-bit weights: four layers by length, then whole models."""
    models: dict[str, tuple[Shape, Sequence[tuple[int, int]]]] = {
        f"{LAYERS} layers of Llama-3.1-8B": (LLAMA, ((1, 256), *LENGTHS)),
        **{name: (shape, LENGTHS[:1]) for name, shape in LLAMAS.items()},
    }
    for i, (name, (shape, lengths)) in enumerate(models.items()):
        tell(f"cache: {name}", i, len(models))
        model = peft_model(config_of(shape))
        full = Step(model, optimizer_of(model), *lengths[0], True, BUDGET)
        full.observe()
        settings = OFF | {"cache block": "block"}
        settings |= {f"cache {part}": int(full.held * fractions.Fraction(part)) for part in ("1/4", "1/2", "3/4")}
        for batch, length in lengths:
            every = settings | {"cache all": BUDGET}
            rounds = 2 if shape == LLAMA else 1  # the profiler takes seconds for a step of a whole model
            yield from side_by_side(name, model, batch, length, every, wall=0, kernels=rounds, dense=True)


def mixtures(tell: Progress) -> Iterator[Row]:
    """Two layers of experts, LoRA on the attention, with checkpointing and without; and generation."""
    for name, config in experts.CONFIGURATIONS.items():
        model = peft_model(config(), ATTENTION)
        for how in ("checkpointing", "no checkpointing"):
            if how != "checkpointing":
                model.gradient_checkpointing_disable()
            for batch, length in (LENGTHS[0], LENGTHS[-1]):
                tell(f"{name}, {how}: {batch}x{length} tokens")
                settings: Settings = {how: "off", f"{how} and everything cached": BUDGET}
                yield from side_by_side(name, model, batch, length, settings, wall=10)
        del model
    for batch in (1, 8):
        tell(f"generation: batch {batch}")
        yield from experts.generation(batch)


def side_by_side(
    subject: str, model: Any, batch: int, length: int, settings: Settings, wall: int = 20, kernels: int = 2,
    dense: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """A row a setting of the cache, each beside the step without the patch: wall time, then GPU time.

    Args:
        settings: "": the cache is off and the row has no further name.
        wall, kernels: how many rounds of each clock; wall 0: GPU time only.
        dense: GPU time also of the same step on 16-bit weights.
    """
    optimizer = optimizer_of(model)
    steps = {name: Step(model, optimizer, batch, length, True, cache) for name, cache in settings.items()}
    steps[UNPATCHED] = Step(model, optimizer, batch, length, False)
    for step in steps.values():
        step.observe()
    losses = {loss for step in steps.values() for loss in step.losses}
    unpatched = gib(steps[UNPATCHED].peak)
    clocks = {"": wall_times(steps, {name: step.switch for name, step in steps.items()}, wall)} if wall else {}
    if dense:
        steps[DENSE] = DenseStep(steps[UNPATCHED])
    clocks[GPU_TIME] = kernel_times(steps, {name: step.switch for name, step in steps.items()}, kernels)
    for clock, times in clocks.items():
        for name in settings if times else ():
            found = {OURS: times[name], **{other: times[other] for other in (UNPATCHED, DENSE) if other in times}}
            step = steps[name]
            told = {"kernel calls a step": str(step.calls), "loss": format_losses(losses)}
            told["peak memory"] = f"{gib(step.peak)} (unpatched {unpatched})"
            if step.held:
                told["cache"] = gib(step.held)
            words = ", ".join(filter(None, (f"{subject} {batch}x{length}", name, clock)))
            yield row(words, batch, length, found, len(losses) == 1, told)


def gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """The patch afterwards as it was before."""
    with hooks.suspended():
        try:
            yield
        finally:
            nf4_patch.disable()
