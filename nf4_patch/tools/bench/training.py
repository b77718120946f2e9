"""A QLoRA training step with the patch on and off, alternating, on the same model: peft + transformers, or Unsloth.

Four Llama-3.1-8B decoder layers with random weights, LoRA r=16 on all linear layers, or with peft a mixture of experts
(``experts``); gradient checkpointing, AdamW. The learning rate is 0: every step does the whole work and leaves the loss as it was, to compare by bits.
And how long torch.compile takes over the peft model: its first step, compiled anew.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import utils as inductor

import nf4_patch

from ..llama import LINEARS, Shape, load_4bit, save
from ..report import Tell
from . import experts
from .peers import OURS
from .record import Check, Row
from .timing import Times, wall_times

UNPATCHED = "unpatched"
CACHED, BUDGET = "all cached", "64GiB"
LENGTHS = ((1, 512), (2, 1024), (2, 2048))  # (batch, tokens)
RANK = 16
LAYERS = 4
VOCABULARY = 128256
LLAMA = Shape(4096, 14336, LAYERS, heads=32, key_value_heads=8, vocabulary=VOCABULARY, positions=8192)


def peft_model(folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    model = load_4bit(folder)
    # Not prepare_model_for_kbit_training: its fp32 head hides the layers behind a matmul of no 4-bit weight.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    return get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    )


def unsloth_model(folder: Path) -> Any:
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=True, local_files_only=True
    )
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", target_modules=list(LINEARS),
        use_gradient_checkpointing=True, random_state=0,
    )  # fmt: skip


def expert_model(folder: Path) -> Any:
    return experts.load(folder, RANK)


TRAINERS: dict[str, Callable[[Path], Any]] = {"peft": peft_model, "unsloth": unsloth_model, "moe": expert_model}


def prepare(trainer: str) -> tuple[Any, torch.optim.Optimizer]:
    """The model in training mode with random adapters, and its optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        if trainer == "unsloth":
            import unsloth  # noqa: F401 (before transformers, as it asks)
        if trainer == "moe":
            experts.save(folder, VOCABULARY)
        else:
            save(folder, LLAMA, device="cuda")
        torch.cuda.empty_cache()
        model = TRAINERS[trainer](Path(folder))
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:  # peft starts B at zero, which would hide the adapters from the loss
            parameter.normal_(std=0.01)
    return model, torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)


class Step:
    """One training step on fixed tokens, the patch on or off; remembers the losses and the peak memory."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, batch: int, length: int, patch: bool, cache: str | None = None
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(batch * length)
        self.tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator).cuda()
        self.model, self.optimizer, self.patch, self.cache = model, optimizer, patch, cache
        self.losses: list[float] = []
        self.peak = 0

    def switch(self) -> None:
        if not self.patch:
            return nf4_patch.disable()
        nf4_patch.enable(cache=self.cache)
        cache = nf4_patch.status().cache
        if cache.mode != "off" and not cache.weights:
            self()  # fills it

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def observe(self) -> None:
        """One step outside the timing: its loss and peak memory."""
        self.switch()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.losses.append(self().item())
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())


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


def compiling(tell: Tell, rounds: int = 2) -> Iterator[Row]:
    """Wall time of the first step of a compiled peft model with the patch and without."""
    tell(f"compile: loading {LAYERS} Llama-3.1-8B layers")
    with restored():
        model, optimizer = prepare("peft")
        batch, length = LENGTHS[0]
        steps = {OURS: FirstStep(model, optimizer, batch, length, True),
                 UNPATCHED: FirstStep(model, optimizer, batch, length, False)}  # fmt: skip
        tell(f"compile: {2 * rounds + 2} compilations")
        times = wall_times(steps, {name: step.switch for name, step in steps.items()}, rounds, warmups=1)
        ours, stock = (sorted(set(steps[name].losses)) for name in (OURS, UNPATCHED))
        agree = max(ours[-1], stock[-1]) - min(ours[0], stock[0]) <= AGREE * abs(stock[0])
        loss = f"{seen(ours)} (unpatched {seen(stock)})"
        yield row(f"compile {batch}x{length}", batch, length, times, agree, {"loss": loss})


def seen(losses: Iterable[float]) -> str:
    return " / ".join(f"{loss:.6f}" for loss in sorted(losses))


def row(
    subject: str, batch: int, length: int, times: dict[str, Times], agree: bool, notes: dict[str, str]
) -> Row:  # fmt: skip
    """A step's times, whose ratio depends on the losses that ``notes`` hold."""
    check = Check(agree, f"losses with the patch and without: {notes['loss']}")
    return Row(subject, "ms", times, {UNPATCHED: check}, sizes={"batch": batch, "tokens": length}, notes=notes)


def run(trainer: str, tell: Tell, rounds: int = 20) -> Iterator[Row]:
    """Each length: wall time of a step with the patch and without, peak memory, the loss of both to the bit."""
    if trainer == "compile":
        yield from compiling(tell)
        return
    tell(f"{trainer}: loading {LAYERS} Llama-3.1-8B layers")
    with restored():
        model, optimizer = prepare(trainer)
        for i, (batch, length) in enumerate(LENGTHS):
            tell(f"{trainer}: {batch}x{length} tokens", i, len(LENGTHS))
            yield one_length(trainer, model, optimizer, batch, length, rounds)


def one_length(trainer: str, model: Any, optimizer: torch.optim.Optimizer, batch: int, length: int, rounds: int) -> Row:
    steps = {
        OURS: Step(model, optimizer, batch, length, True),
        UNPATCHED: Step(model, optimizer, batch, length, False),
        CACHED: Step(model, optimizer, batch, length, True, BUDGET),
    }
    for step in steps.values():
        step.switch()
        step()  # compiles, allocates
        step.observe()
        step.observe()
    steps[OURS].switch()
    hits = nf4_patch.status().hits
    steps[OURS].observe()
    hits = nf4_patch.status().hits - hits
    times = wall_times(steps, {name: step.switch for name, step in steps.items()}, rounds)
    losses = {loss for step in steps.values() for loss in step.losses}
    gib = {name: f"{step.peak / 2**30:.3f} GiB" for name, step in steps.items()}
    cached = times.pop(CACHED)
    notes = {"peak memory": f"{gib[OURS]} (unpatched {gib[UNPATCHED]})", "kernel calls a step": str(hits)}
    notes["loss"] = seen(losses)
    notes[CACHED] = f"{cached.median:.1f} ms, {gib[CACHED]}"
    return row(f"{trainer} {batch}x{length}", batch, length, times, len(losses) == 1, notes)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """The patch afterwards as it was before."""
    before = nf4_patch.is_enabled()
    try:
        yield
    finally:
        (nf4_patch.enable if before else nf4_patch.disable)()
