"""``nf4-patch bench --step peft``: a QLoRA training step with the patch on and off, alternating, on the same model.

Random weights, LoRA r=16, gradient checkpointing, AdamW; adapters in 16 bits under autocast, as TRL trains. The learning
rate is 0: every step does the whole work and leaves the loss as it was, to compare by bits.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import nf4_patch

from ..llama import LINEARS, LLAMA_8B, build_4bit, config_of, training_dtype
from ..patch import patch
from ..report import Progress, silent
from .record import DENSE, GPU_TIME, OURS, UNPATCHED, Bench, Check, Row
from .timing import Times, alternating, kernel_times, machine, synchronize, wall_ms

METHOD = f"A QLoRA step, the patch on ({OURS}) and off alternating: wall time, and GPU time (the sum of its kernels and copies)."
BUDGET = "64GiB"
LENGTHS = ((1, 512), (2, 1024), (2, 2048))  # (batch, tokens)
RANK = 16
LAYERS = 4  # of an 8B model
# A head of the whole model's 128,256 words would be a third of the step; so it is to four layers what it is to 32.
LLAMA = LLAMA_8B._replace(num_hidden_layers=LAYERS, vocab_size=128256 * LAYERS // 32)


def peft_model(config: Any, targets: Iterable[str] = LINEARS, **options: Any) -> Any:
    """Random weights in NF4 and LoRA on ``targets``, with further options of LoRA; all in the dtype of the configuration."""
    from peft import LoraConfig, get_peft_model

    model = build_4bit(config, "cuda" if torch.cuda.is_available() else "cpu")
    # Not prepare_model_for_kbit_training: its fp32 head hides the layers behind a matmul of no 4-bit weight.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(targets), task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, lora)
    for parameter in trained(model):  # TRL's SFTTrainer has the adapters of a 4-bit model so
        parameter.data = parameter.data.to(config.dtype)
    return model


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: Any, lr: float = 0.0) -> torch.optim.Optimizer:
    """For the model in training mode, its adapters random: the same numbers in every dtype, rounded."""
    model.train()
    parameters = trained(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:  # peft starts B at zero, which would hide the adapters from the loss
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)


Size = tuple[int, int]  # batch, tokens
Settings = dict[str, str | int]  # of the cache, by what they are called
OFF: Settings = {"": "off"}


class Step:
    """One training step on fixed tokens, the patch on, with these options, or off; remembers losses and peak memory."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, size: Size, on: bool, cache: str | int = "off",
        autocast: bool = True, **options: str,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(size[0] * size[1])
        vocabulary = min(LLAMA.vocab_size, model.config.vocab_size)
        self.tokens = torch.randint(3, vocabulary, size, generator=generator).to(model.device)
        self.model, self.optimizer, self.on, self.cache = model, optimizer, on, cache
        self.autocast, self.options = autocast, options
        self.losses: list[float] = []
        self.peak = self.taken = self.calls = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """The patch on or off, after two steps."""
        with patch(self.on, cache=self.cache, **self.options):
            # fills the cache, and lets compiled layers find their graph; the second is as every further one
            for _ in range(2):
                self()
            yield

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.tokens.device.type, training_dtype(), enabled=self.autocast):
            loss: torch.Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def observe(self) -> None:
        """A step outside the timing: its loss, peak memory and kernel calls, and what the cache holds then."""
        with self.patched():
            self()  # compiles, allocates
            synchronize()
            gc.collect()  # of the model before this one
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            calls = nf4_patch.status().hits
            self.losses.append(self().item())
            self.calls = nf4_patch.status().hits - calls
            self.peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            self.taken = sum(nf4_patch.status().cache.taken.values())


def format_losses(losses: Iterable[float]) -> str:
    return " / ".join(f"{loss:.6f}" for loss in sorted(losses))


def row(subject: str, size: Size, times: dict[str, Times], agree: bool, notes: dict[str, str]) -> Row:
    """A step's times, whose ratio depends on the losses that ``notes`` hold."""
    check = Check(agree, f"losses with the patch and without: {notes['loss']}")
    sizes = dict(zip(("batch", "tokens"), size, strict=True))
    return Row(subject, "ms", times, {UNPATCHED: check}, sizes=sizes, notes=notes)


def measure(tell: Progress = silent) -> Bench:
    """Wall time of a step with the patch and without, GPU time, peak memory, the loss of both to the bit."""
    model = peft_model(config_of(LLAMA))
    rows = list(every_length("peft", model, tell, OFF | {"cache all": BUDGET}))
    return Bench(machine(), {"step": rows}, {"step": METHOD})


def every_length(subject: str, model: Any, tell: Progress, settings: Settings) -> Iterator[Row]:
    for i, size in enumerate(LENGTHS):
        tell("{}: {}x{} tokens".format(subject, *size), i, len(LENGTHS))
        yield from side_by_side(subject, model, size, settings)


def side_by_side(
    subject: str, model: Any, size: Size, settings: Settings, wall: int = 20, kernels: int = 2,
    dense: Callable[[Step], Step] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A row a setting of the cache, each next to the step without the patch: wall time, then GPU time.

    Args:
        settings: "": the cache is off and the row has no further name.
        wall, kernels: how many rounds of each clock; wall 0: GPU time only.
        dense: makes of the step without the patch one on 16-bit weights, whose GPU time is taken too.
    """
    optimizer = optimizer_of(model)
    steps = {name: Step(model, optimizer, size, True, cache) for name, cache in settings.items()}
    steps[UNPATCHED] = Step(model, optimizer, size, False)
    for step in steps.values():
        step.observe()
    losses = {loss for step in steps.values() for loss in step.losses}

    def patched(name: str) -> contextlib.AbstractContextManager[None]:
        return steps[name].patched()

    clocks = {"": alternating(steps, wall_ms, wall, patched, warmups=3)} if wall else {}
    if dense:
        steps[DENSE] = dense(steps[UNPATCHED])
    clocks[GPU_TIME] = kernel_times(steps, patched, kernels)
    for clock, times in clocks.items():
        others = {name: times[name] for name in (UNPATCHED, DENSE) if name in times}
        for name in settings if times else ():
            step = steps[name]
            notes = {"kernel calls a step": str(step.calls), "loss": format_losses(losses)}
            notes["peak memory"] = f"{gib(step.peak)} (unpatched {gib(steps[UNPATCHED].peak)})"
            if step.taken:
                notes["cache"] = gib(step.taken)
            words = ", ".join(filter(None, ("{} {}x{}".format(subject, *size), name, clock)))
            yield row(words, size, {OURS: times[name], **others}, len(losses) == 1, notes)


def gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"
