"""A QLoRA fine-tuning of a small Llama, without the patch and with it: the same losses, to the bit."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import RenderableType
from rich.table import Table

import nf4_patch

from ..nf4.dequantize import compilation
from ..patching.counters import counters
from ..patching.reasons import Reason
from . import output
from .cases import device_here, name_of, place_of, require_oracle
from .llama import LINEARS, Shape, build_4bit, config_of, training_dtype
from .patch import patch
from .report import Progress, Report, plural, provenance, right_aligned, silent

SEED = 0
WARM_UP = 3  # steps of each kind before anything is timed: kernels compile, allocators fill
TEXT = "tide_tables.txt"  # written for this package
NEEDED = ("triton", "bitsandbytes", "transformers", "peft", "accelerate", "matplotlib")


class Size(NamedTuple):
    """A Llama, and the tokens of a step."""

    llama: Shape
    batch: int
    length: int
    learning_rate: float


SIZES = {
    "tiny": Size(Shape(128, 320, 2, 4, 2, vocab_size=256), batch=2, length=64, learning_rate=2e-3),
    "small": Size(Shape(512, 1408, 4, 8, 4, vocab_size=256), batch=2, length=128, learning_rate=2e-3),
    # 2048 rows: beyond 1536, bitsandbytes 0.50 dequantizes the forward on every GPU instead of taking its gemm_4bit.
    "large": Size(Shape(2048, 5632, 4, 16, 8, vocab_size=256), batch=4, length=512, learning_rate=4e-4),
}


@dataclass
class Training:
    """One training and what became of its dequantizations; a second, the same, gave its step times and memory too."""

    patched: bool
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of every step of both
    repeats: bool = True  # the second gave the same bits
    peak_bytes: int | None = None  # of the GPU's allocator; None on the CPU
    adapter: str = ""  # SHA-256 of the LoRA weights after the last step
    hits: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # by name of the Reason
    errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'with' if self.patched else 'without'} the patch"

    @property
    def seconds_per_step(self) -> float:
        return statistics.median(self.seconds)

    def add(self, again: Training) -> None:
        self.seconds += again.seconds
        self.repeats = self.losses == again.losses and self.adapter == again.adapter
        if self.peak_bytes is not None and again.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, again.peak_bytes)


@dataclass
class DemoReport(Report):
    place: str
    kernel_runs: bool  # on a GPU or under the interpreter
    size: str
    parameters: int
    linears: int
    dtype: str
    tokens: int  # a step
    without: Training
    patched: Training
    verification: dict[str, Any]  # as_dict of verify on the model's own weights
    png: str = ""  # where the picture is; "": it could not be written

    @property
    def timed(self) -> bool:
        """Whether the two times compare anything: on a GPU, where the kernel ran."""
        return self.patched.peak_bytes is not None and self.patched.hits > 0

    def problems(self) -> list[str]:
        a, b = self.without, self.patched
        wrong = {
            "the training without the patch gives other bits each time: nothing can be compared with it": not a.repeats,
            "the training with the patch gives other bits each time": not b.repeats,
            "the losses differ": a.losses != b.losses,
            "the trained adapters differ": a.adapter != b.adapter,
            "the kernel was never hit": self.kernel_runs and not b.hits,
            "the kernel's bits differ from bitsandbytes' on the model's weights": bool(self.verification["exit_code"]),
        }
        found = [sentence for sentence, holds in wrong.items() if holds] + self.verification["failures"][:3]
        for name, count in b.fallbacks.items():
            if self.kernel_runs and not Reason[name].is_expected:
                found.append(f"{count} calls fell back: {Reason[name].sentence}")
        return found + list(b.errors)

    def render(self) -> Iterable[RenderableType]:
        yield provenance(self.place)
        yield (
            f"Llama with {self.parameters / 1e6:.1f} M parameters, {self.linears} linears in NF4 with double "
            f"quantization, LoRA on all of them, gradient checkpointing, {self.dtype}, {self.tokens} tokens per step"
        )
        yield self._losses()
        yield from self._costs()
        if not self.kernel_runs:
            yield (
                "No GPU here: both trainings ran bitsandbytes' CPU code, so no time is compared. The kernel ran on the "
                "model's weights under Triton's interpreter:"
            )
        rows = self.verification["rows"]
        weights, elements, wrong = (sum(row[name] for row in rows) for name in ("cases", "elements", "differing"))
        compared = f"{plural(weights, 'weight')} of the model, {plural(elements, 'element')}"
        yield f"{compared}, against bitsandbytes: {wrong:,} differ."
        problems = self.problems()
        yield from (f"Failed: {problem}" for problem in problems)
        if not problems:
            yield f"Passed: {plural(len(self.patched.losses), 'loss')} and the trained adapter are the same to the bit."
        if self.png:
            yield f"picture: {self.png}"

    def _losses(self) -> Table:
        table = Table(*right_aligned("step", "without the patch", "with the patch", "same bits"), title="Losses")
        for step, (a, b) in enumerate(zip(self.without.losses, self.patched.losses, strict=True), 1):
            table.add_row(str(step), f"{a:.9f}", f"{b:.9f}", "yes" if a == b else "NO", style=None if a == b else "red")
        return table

    def _costs(self) -> Iterable[str]:
        most = 3 * self.linears * len(self.patched.losses)  # forward, recompute, backward
        of = f" of at most {most:,}" if self.kernel_runs else ""
        yield f"With the patch {self.patched.hits:,}{of} dequantizations ran in the kernel."
        yield from (f"{count:,} x {name}: {Reason[name].sentence}" for name, count in self.patched.fallbacks.items())
        for training in (self.without, self.patched) if self.timed else ():
            peak = (training.peak_bytes or 0) / 2**20
            yield f"{training}: {training.seconds_per_step * 1e3:,.1f} ms per step (median), {peak:,.0f} MiB at the peak"


def demo(steps: int, size: str | None, png: Path, tell: Progress = silent) -> DemoReport:
    """Make the model, train it twice from the same seed, verify the kernel on its weights, draw the picture.

    Args:
        size: a key of SIZES; by default "large" with a GPU and "small" without.

    Raises:
        ModuleNotFoundError: something of the extra ``demo`` is not installed.
        NotAvailable: there is no GPU, and bitsandbytes is older than 0.50.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is made here: nothing is looked up
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:  # named before the training, not after
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    device = device_here()
    require_oracle(device)
    from transformers.utils import logging

    logging.set_verbosity_error()
    on_gpu = device.type == "cuda"
    size = size or ("large" if on_gpu else "small")
    trained = functools.partial(train, SIZES[size], device, tell)
    for patched in (False, True):
        trained("warming up", patched, min(WARM_UP, steps))
    # A B B A: a machine that gets faster or slower meanwhile does so for both.
    without, with_patch, with_again, without_again = (
        trained("training", on, steps) for on in (False, True, True, False)
    )
    without.add(without_again)
    with_patch.add(with_again)
    model = made(SIZES[size], device)
    report = DemoReport(
        place=place_of(device) if on_gpu else "CPU",
        kernel_runs=on_gpu or compilation.INTERPRETED,
        size=size,
        parameters=model.num_parameters(),
        linears=len(LINEARS) * SIZES[size].llama.num_hidden_layers,
        dtype=name_of(training_dtype()),
        tokens=SIZES[size].batch * SIZES[size].length,
        without=without,
        patched=with_patch,
        verification=verify_weights(model, tell),
    )
    if output.write(png, functools.partial(draw, report)):
        report.png = str(png)
    return report


def made(size: Size, device: torch.device) -> Any:
    """The model in 4 bits, with an attention whose backward adds in a fixed order, which the fused ones do not."""
    return build_4bit(config_of(size.llama, training_dtype(), attn_implementation="eager"), device)


def adapted(size: Size, device: torch.device) -> Any:
    """With LoRA on all linears and gradient checkpointing, the same every time."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    options = {"use_reentrant": False}
    model = prepare_model_for_kbit_training(made(size, device), gradient_checkpointing_kwargs=options)
    torch.manual_seed(SEED)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def batches(size: Size, device: torch.device, steps: int) -> Iterable[torch.Tensor]:
    """Token windows of the text, [batch, length], the same every time; a token is a byte."""
    text = bytearray((resources.files("nf4_patch") / "data" / TEXT).read_bytes())
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - size.length, (size.batch,), generator=generator)
        yield torch.stack([tokens[start : start + size.length] for start in starts]).to(device)


def train(size: Size, device: torch.device, tell: Progress, doing: str, patched: bool, steps: int) -> Training:
    """Make, adapt and train the model from the seed, with the patch or without."""
    training = Training(patched)
    text = f"{doing} {training}"
    tell(text, 0, steps)
    on_gpu = device.type == "cuda"
    # matmul off, whatever the environment says: the fused matmul has other bits
    with patch(patched, matmul="off"):
        model = adapted(size, device)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=size.learning_rate)
        counters.reset()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        for step, tokens in enumerate(batches(size, device, steps), 1):
            started = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.losses.append(loss.item())  # waits for the GPU
            training.seconds.append(time.perf_counter() - started)
            tell(text, step, steps)
        if on_gpu:
            training.peak_bytes = torch.cuda.max_memory_allocated(device)
        status = nf4_patch.status()
    training.hits, training.errors = status.hits, status.errors
    for target in status.targets:
        for name, count in target.fallbacks.items():
            training.fallbacks[name] = training.fallbacks.get(name, 0) + count
    digest = hashlib.sha256()
    for parameter in trainable:
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    training.adapter = digest.hexdigest()
    del model, optimizer, trainable, loss
    gc.collect()
    torch.cuda.empty_cache()
    return training


def verify_weights(model: Any, tell: Progress) -> dict[str, Any]:
    """``verify`` on the model's packed weights. Without a GPU in a process of its own, under the interpreter.

    There the kernels of this process must stay as they are: interpreted, they would run on CPU tensors.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="nf4-patch-demo-") as folder:
        checkpoint, result = Path(folder, "model.safetensors"), Path(folder, "verify.json")
        save_file(model.state_dict(), checkpoint)
        if torch.cuda.is_available():
            from . import verify

            return verify.verify(checkpoint, tell=tell).as_dict()
        tell("verifying the kernel on the model's weights under Triton's interpreter")
        command = [sys.executable, "-m", "nf4_patch", "verify", "--weights", str(checkpoint), "--json", str(result)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not result.exists():
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        report: dict[str, Any] = json.loads(result.read_text())
        return report


def draw(report: DemoReport, png: Path) -> None:
    """Losses of both trainings; step times where they compare anything."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2) if report.timed else (7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + report.timed, squeeze=False)[0]
    same = "the same bits" if report.without.losses == report.patched.losses else "THEY DIFFER"
    panels[0].set(title=f"Loss: {same}", xlabel="step", ylabel="loss")
    for training, color, width in ((report.without, "0.6", 5.0), (report.patched, "C0", 1.5)):
        label = str(training)
        style = {"color": color, "linewidth": width, "marker": "o" if training.patched else ""}
        panels[0].plot(range(1, len(training.losses) + 1), training.losses, label=label, **style)
        for times in panels[1:]:
            label += f", median {training.seconds_per_step * 1e3:.1f} ms"
            milliseconds = [1e3 * seconds for seconds in training.seconds]
            times.plot(range(1, len(milliseconds) + 1), milliseconds, marker="o", label=label, color=color)
            times.set(title="Time per step", xlabel="step, first and second training", ylabel="ms", ylim=(0, None))
    for axes in panels:
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    characters = int(figure.get_figwidth() * 14)  # a line at this size
    figure.suptitle(textwrap.fill(provenance(report.place), characters), fontsize=8)
    figure.savefig(png, format="png", dpi=120)
