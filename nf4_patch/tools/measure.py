"""``nf4-patch doctor --measure``: time training steps on this machine's GPU, with and without the patch.

One process alternates between the SIDES. Each turn captures layers and fills caches anew.
"""

from __future__ import annotations

import datetime
import gc
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import nf4_patch

from ..options import OPTIONS
from ..patching.config import options_set
from ..patching.effects import line
from ..version import holds, release_of
from .cases import device_here, place_of
from .offload import configuration, layers_that_fit
from .patch import patch
from .report import NotAvailable, Progress, Report, driver, installed_releases, issues, plural, silent, table
from .step import (
    LLAMA_8B,
    ROUNDING,
    Step,
    kernels,
    peft_model,
    processor,
    reset,
    shortened,
    synchronize,
    wall_times,
    with_liger,
)

DEFAULT = "Llama-3.1-8B"
# During the WARM_UPS, cache and activations find out how much memory is free, and then layers are captured again.
LENGTHS, ROUNDS, LEARNING, WARM_UPS, TIMED = (512, 2048), 3, 4, 10, 3
SECONDS = 80  # no round begins after this time
BUSY = 0.9  # a GPU that works for this part of a step does not wait for Python
BEFORE, FULL, FAST = "no patch", "fast, full GPU", "fast"
SIDES: dict[str, dict[str, Any] | None] = {
    BEFORE: None, FULL: {"profile": "fast", "cache": "off", "activations": "off"}, FAST: {"profile": "fast"},
}  # fmt: skip
CLOCKS = {"wall_x": "wall-clock time", "gpu_x": "GPU time"}
METHOD = (
    "A training step of one sequence: random 4-bit weights, LoRA r=16 on all linear layers, TRL's precision, gradient checkpointing, "
    "AdamW. gpu_ms: sum of kernels and copies. wall_x, gpu_x: speed-up. wall_spread: (slowest - fastest) / median. "
    f'"{FULL}" leaves out cache and activations, because a whole model leaves less memory for them than these layers do.'
)
Turns = Sequence[dict[str, Any]]  # what ``turn`` returned, for one side and length


@dataclass
class Measured(Report):
    about: dict[str, str]  # GPU, model, releases and so on, by the heading of its column
    rows: list[dict[str, Any]] = field(default_factory=list)  # one per length and side
    notes: list[str] = field(default_factory=list)  # what did not help
    failures: list[str] = field(default_factory=list)

    def render(self) -> Iterable[str]:
        yield METHOD
        yield table(self.rows)
        yield from [*self.notes, *self.failures]
        if not self.failures:
            yield from map(expect, *map(self.of, SIDES))
            yield f"To share these figures, copy the next three lines to {issues()}:"
            yield self.to_send()

    def of(self, side: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["side"] == side]

    def to_send(self) -> str:
        """Return a Markdown table with one row."""

        def each(side: str, key: str, form: str) -> str:
            return " / ".join("?" if row[key] is None else form.format(row[key]) for row in self.of(side))

        cells = {"GPU": self.about["GPU"], "model": self.about["model"], "tokens": each(BEFORE, "tokens", "{:,}")}
        gains = [(side, key) for side in (FULL, FAST) for key in CLOCKS]
        cells |= {f"{side}: {CLOCKS[key]}": each(side, key, "{:.2f}x") for side, key in gains}
        cells |= {"no patch: ms": each(BEFORE, "wall_ms", "{:.1f}"), "GPU busy": each(BEFORE, "gpu_busy", "{:.0%}")}
        cells |= self.about
        return "\n".join(f"| {' | '.join(line)} |" for line in (cells, ["---"] * len(cells), cells.values()))


def expect(before: dict[str, Any], full: dict[str, Any], fast: dict[str, Any]) -> str:
    busy = before["gpu_busy"]
    key = "gpu_x" if busy and busy >= BUSY else "wall_x"
    works = "the profiler saw no kernels, so there is no GPU time"
    if busy is not None:
        waits = "so it does not wait for Python" if key == "gpu_x" else "and waits for Python in the rest"
        works = f"without the patch, the GPU works for {busy:.0%} of a step, {waits}"
    gain = f"Expect {full[key]:.2f}x in {CLOCKS[key]}, or {fast[key]:.2f}x if memory stays free"
    return f"{before['tokens']:,} tokens: {works}. {gain}."


def measure(name: str = "", layers: int = 4, tell: Progress = silent) -> Measured:
    """Measure up to ``layers`` layers with the shapes of a model, a name or a folder, by default Llama-3.1-8B.

    Raises:
        NotAvailable: the model cannot be measured.
    """
    from transformers import LlamaConfig

    if not holds(release_of("transformers") or "", ">= 4.56"):
        raise NotAvailable("--measure needs transformers 4.56 or newer: pip install -U transformers")
    begin, name = time.monotonic(), name or DEFAULT
    whole = LlamaConfig(**LLAMA_8B) if name == DEFAULT else configuration(name).get_text_config()
    layers, tokens = layers_that_fit(whole, name, layers), LENGTHS[0]
    report, found = Measured({}), dict[tuple[int, str], list[dict[str, Any]]]()
    try:
        tell(f"building {plural(layers, 'layer')} of {name}")
        model = peft_model(shortened(whole, layers), "all-linear")
        shapes = Path(name).name if Path(name).is_dir() else name
        of = f"{layers} of {whole.num_hidden_layers} layers"
        dtype = str(model.dtype).removeprefix("torch.")
        report.about = about(", ".join([shapes, of, dtype, with_liger(model), *options_set()]))
        if torch.cuda.is_available():
            kernels(synchronize)  # starts the profiler, which may slow down all later steps
        for round_ in range(ROUNDS):
            if round_ and time.monotonic() - begin > SECONDS:
                break
            for tokens in LENGTHS:
                for side in [*SIDES][:: -1 if round_ % 2 else 1]:
                    tell(f"round {round_ + 1} of {ROUNDS}: {tokens:,} tokens, {side}")
                    found.setdefault((tokens, side), []).append(turn(model, tokens, SIDES[side]))
    except torch.OutOfMemoryError:
        fewer = f"Try --layers {layers - 1}" if layers > 1 else "Close other programs that use the GPU"
        what = f"{plural(layers, 'layer')} of {name}, {tokens:,} tokens"
        report.failures.append(f"{what}: out of memory on the GPU. {fewer}")
    for tokens in LENGTHS:
        if all((tokens, side) in found for side in SIDES):
            turns = {side: found[tokens, side] for side in SIDES}
            report.failures += (wrong := list(disagree(tokens, turns)))
            report.rows += [] if wrong else rows_of(tokens, turns)
            report.notes = turns[FAST][-1]["notes"]
    return report


def about(model: str) -> dict[str, str]:
    releases = {"nf4_patch": nf4_patch.__version__, "Python": platform.python_version()} | installed_releases()
    releases["torch"] = torch.__version__  # with the CUDA that it was built for
    return {
        "GPU": f"{place_of(device_here())}, driver {driver() or 'unknown'}", "model": model, "processor": processor(),
        "releases": ", ".join(map(" ".join, releases.items())), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def turn(model: Any, tokens: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Train with these options, or without the patch if ``options`` is None.

    Then time steps with a learning rate of 0, so that all losses are equal.
    """
    try:
        with patch(options is not None, **options or {}):
            # one optimizer for all steps, because the first step of another one would drop cached weights and activations
            optimizer = torch.optim.AdamW(reset(model), lr=1e-3, weight_decay=0.0, fused=True)
            step = Step(model, optimizer, (1, tokens))
            losses = [step().item() for _ in range(LEARNING)]
            reset(model)
            optimizer.param_groups[0]["lr"] = 0.0
            losses += [step().item() for _ in range(WARM_UPS)][-1:]
            walls = wall_times(step, TIMED)
            gpu = sum(ms for _, ms in kernels(step)) if torch.cuda.is_available() else 0.0
            return {"losses": losses, "walls": walls, "gpu": gpu, "notes": [*did_not_help(nf4_patch.status())]}
    finally:
        nf4_patch.release()
        gc.collect()
        torch.cuda.empty_cache()


def did_not_help(status: nf4_patch.Status) -> Iterator[str]:
    if status.enabled and (status.fallbacks or not status.hits):
        yield str(status).partition("\n")[0]
    for name, effect in status.options.items():
        if effect.lacks or (OPTIONS[name].calls and effect.helps_little):
            yield line(name, effect)


def disagree(tokens: int, turns: Mapping[str, Turns]) -> Iterator[str]:
    """Yield a message for each turn whose losses differ by more than bf16 rounding from those without the patch."""
    want = turns[BEFORE][0]["losses"]
    for side, every in turns.items():
        for got in (each["losses"] for each in every):
            if not all(abs(a - b) <= ROUNDING * abs(b) for a, b in zip(got, want, strict=True)):
                yield f"{tokens:,} tokens, {side}: losses {got}, {BEFORE} {want}"


def rows_of(tokens: int, turns: Mapping[str, Turns]) -> Iterator[dict[str, Any]]:
    first: dict[str, Any] = {}
    for side, every in turns.items():
        walls = [wall for each in every for wall in each["walls"]]
        wall, gpu = statistics.median(walls), statistics.median(each["gpu"] for each in every) or None
        row = {"tokens": tokens, "side": side, "wall_ms": wall, "gpu_ms": gpu}
        first = first or row
        yield row | {
            "wall_x": first["wall_ms"] / wall, "gpu_x": gpu and first["gpu_ms"] / gpu, "gpu_busy": gpu and min(gpu / wall, 1.0),
            "wall_spread": (max(walls) - min(walls)) / wall, "rounds": len(every),
        }  # fmt: skip
