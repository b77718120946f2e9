"""python -m benchmarks.step [--peft | --trl | --compiled | --moe | --unsloth]: a QLoRA step as in TRL, alternating sides.

Adapters are in 16 bits under autocast, with non-reentrant checkpointing. Liger and Unsloth patch a whole process, so each kind
of model runs in a separate process. Only one process works at a time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import click
import torch

from benchmarks import run_alone
from benchmarks.checkpoint import save_config
from benchmarks.models import EXPERTS, LINEARS, config_of, qwen3
from benchmarks.timing import Machine, kernels, machine, synchronize, wall_ms
from benchmarks.training import BUDGET, LENGTHS, LLAMA, RANK, Size, Step, optimizer_of, peft_model, trained
from nf4_patch.tools.patch import patch
from nf4_patch.tools.report import Progress, Report, require_gpu, require_patch, silent, table
from nf4_patch.tools.timing import Times

METHOD = (
    "A step as in TRL: adapters in 16 bits, autocast, checkpointing. gpu_ms: sum of kernels and copies, median of the rounds;"
    " gpu_spread: (largest - smallest) / median. wall_ms: wall-clock time, alternating sides; wall_spread: odd against even rounds."
    " gpu_x, wall_x: speed-up over the first side, if losses agree. launches: kernels and copies. calls: calls of our kernel."
    " peak_gib, reserved_gib: peak memory that PyTorch allocated, and reserved on the GPU. losses: losses of 30 steps that learn."
)
STOCK = "peft"
FP32, LIGER, LAYERS_ONLY, DENSE, UNSLOTH = "fp32", "liger", "liger, no loss", "16-bit experts", "unsloth"
COMPILED = "compiled layers"
LIBRARIES = {UNSLOTH: "unsloth", LIGER: "liger_kernel", LAYERS_ONLY: "liger_kernel"}  # that a kind of model needs
PROFILED, TRAINED = 2, 30
ROUNDING = 2**-7  # relative rounding of losses in bf16


class Side(NamedTuple):
    kind: str  # kind of model; each kind has a process
    options: dict[str, str] | None  # arguments of nf4_patch.enable, None if the patch is off


def sides_of(kind: str, options: Mapping[str, Mapping[str, str] | None], **common: str) -> dict[str, Side]:
    """Return the sides of one kind of model. The keys of ``options`` are appended to the kind's name."""
    return {
        ", ".join(filter(None, (kind, name))): Side(kind, None if given is None else {**common, **given})
        for name, given in options.items()
    }


class Comparison(NamedTuple):
    sides: dict[str, Side]
    sizes: Iterable[Size] = LENGTHS
    configuration: Callable[[], Any] = partial(config_of, LLAMA)  # called in another process, after Unsloth's import
    walls: int = 6  # rounds of wall-clock time


CACHE, FUSED = {"cache": BUDGET}, {"lora": "fused"}
PATCHED: dict[str, dict[str, str] | None] = {"": None, "patch": {}, "patch, cached": CACHE}
EVERY = PATCHED | {"fused": FUSED, "fused, cached": FUSED | CACHE}
ON = {name: given for name, given in EVERY.items() if given is not None}
PACKED, GRAPHS = {"experts": "4bit"}, {"graphs": "auto"}

COMPARISONS = {  # by command-line option
    "peft": Comparison(sides_of(STOCK, PATCHED)),
    "trl": Comparison(
        sides_of(STOCK, EVERY) | sides_of(LIGER, EVERY) | sides_of(FP32, {"": None, "fused": FUSED})
        | sides_of(UNSLOTH, PATCHED),
        walls=4,  # it has many sides
    ),
    "moe": Comparison(
        sides_of(DENSE, {"": None})  # peft's LoRA on experts needs them in 16 bits, or the patch
        | sides_of(STOCK, ON, **PACKED)
        | sides_of(LIGER, ON, **PACKED)
        | sides_of(LAYERS_ONLY, {"fused": FUSED}, **PACKED)
        | sides_of(FP32, {"patch": {}, "fused": FUSED}, **PACKED)
        | sides_of(UNSLOTH, {"": None}),
        ((1, 512), (1, 2048), (1, 4096)), qwen3,
    ),
    "unsloth": Comparison(sides_of(UNSLOTH, PATCHED)),
    "compiled": Comparison(sides_of(STOCK, {"": None, "patch": {}, "fused": FUSED}) | sides_of(COMPILED, {"": None, "patch": {}})),
}  # fmt: skip


# --- in a separate process ---


def unsloth_model(config: Any, checkpointing: Any = True) -> Any:
    from unsloth import FastLanguageModel  # before transformers, as Unsloth requires

    with tempfile.TemporaryDirectory() as folder:
        save_config(folder, config, "cuda")
        torch.cuda.empty_cache()
        length = min(4096, config.max_position_embeddings)
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=length, dtype=config.dtype, load_in_4bit=True, local_files_only=True
        )
    experts = [name.rpartition(".")[2] for name in EXPERTS] if hasattr(config, "num_experts") else []
    return FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=RANK, lora_dropout=0, bias="none", use_gradient_checkpointing=checkpointing, random_state=0,
        target_modules=[*LINEARS[:4], *experts] if experts else list(LINEARS),
    )  # fmt: skip


def model_of(kind: str, config: Any) -> Any:
    """Build a model with LoRA on all linear layers, or for a mixture, on the attention and the experts."""
    if kind == UNSLOTH:
        return unsloth_model(config)
    mixture = hasattr(config, "num_experts")
    with patch(mixture, **PACKED):
        options: dict[str, Any] = {"target_parameters": EXPERTS} if mixture else {}
        model = peft_model(config, LINEARS[:4] if mixture else LINEARS, **options)
    if kind == DENSE:
        unpack(model)
    if kind == FP32:
        for parameter in trained(model):
            parameter.data = parameter.data.float()
    if kind == COMPILED:
        for layer in model.get_base_model().model.layers:
            layer.compile(dynamic=False)  # one graph per length
    if kind in (LIGER, LAYERS_ONLY):  # as in transformers' Trainer; Liger does not support 4-bit experts
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, {"swiglu": not mixture, "fused_linear_cross_entropy": kind == LIGER})
    return model


def unpack(model: Any) -> None:
    """Dequantize the experts to 16 bits."""
    from torch.nn.utils import parametrize

    for module in model.modules():
        for name in list(getattr(module, "parametrizations", ())):
            weight = getattr(module, name)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))


class Sides:
    """Sides of one kind of model, in this process."""

    def __init__(self, kind: str, sides: Mapping[str, Side], configuration: Callable[[], Any]):
        if kind == UNSLOTH:
            importlib.import_module("unsloth")
        self.kind, self.sides = kind, sides
        self.model = model_of(kind, configuration())
        self.optimizer = optimizer_of(self.model)
        if torch.cuda.is_available():
            kernels(synchronize)  # starts the profiler

    def step(self, name: str, size: Size, optimizer: Any = None) -> Step:
        given = self.sides[name].options
        on, options = given is not None, dict(given or {})
        cache = options.pop("cache", "off")
        return Step(self.model, optimizer or self.optimizer, size, on, cache, self.kind != FP32, **options)

    def observe(self, name: str, size: Size) -> tuple[float, float, float, int]:
        """Return the loss, the peaks of allocated and reserved memory in GiB, and the number of calls of our kernel."""
        step = self.step(name, size)
        step.observe()
        return step.losses[0], step.peak / 2**30, step.reserved / 2**30, step.calls

    def wall(self, name: str, size: Size) -> float:
        step = self.step(name, size)
        with step.patched():
            return min(wall_ms(step) for _ in range(2))

    def gpu(self, name: str, size: Size) -> tuple[float, int]:
        """Return the GPU milliseconds of a step, and the number of its kernels and copies."""
        step = self.step(name, size)
        with step.patched():
            found = kernels(step) if torch.cuda.is_available() else []
        return sum(ms for _, ms in found), len(found)

    def train(self, name: str, size: Size) -> list[float]:
        """Return the losses of steps that learn, starting from the same adapters for every side."""
        step = self.step(name, size, optimizer=optimizer_of(self.model, lr=1e-3))
        with patch(step.on, cache=step.cache, **step.options):
            losses = [step() for _ in range(TRAINED)]
        optimizer_of(self.model)  # resets the adapters
        return [loss.item() for loss in losses]


HERE: list[Sides] = []  # in a worker process: the sides that it has built


def answer(method: str, *arguments: Any) -> tuple[Any, str]:
    """Call a method of the sides, or build them if ``method`` is "". Return (result, "") or (None, traceback).

    An error does not stop the other sides; the report shows it.
    """
    try:
        if method:
            return getattr(HERE[0], method)(*arguments), ""
        HERE.append(Sides(*arguments))
        return None, ""
    except Exception:
        return None, traceback.format_exc()
    finally:
        if torch.cuda.is_available():  # other processes share the GPU
            gc.collect()
            torch.cuda.empty_cache()


def prepare(kind: str) -> None:
    """Import the libraries for a kind of model. The processes do this in parallel, and then build one after another."""
    importlib.import_module("unsloth" if kind == UNSLOTH else "peft")


class Worker:
    """A process for one kind of model. It starts immediately, and builds the model when it is asked to."""

    def __init__(self, kind: str, *arguments: Any):
        self.pool, self.arguments = ProcessPoolExecutor(1, multiprocessing.get_context("spawn")), (kind, *arguments)
        self.pool.submit(prepare, kind)

    def ask(self, *request: Any) -> tuple[Any, str]:
        """Return ``answer`` for (method, side, size), or without a request, build the model."""
        try:
            found: tuple[Any, str] = self.pool.submit(answer, *(request or ("", *self.arguments))).result()
            return found
        except BrokenExecutor:
            return None, "the process ended"

    def close(self) -> None:
        with contextlib.suppress(BrokenExecutor):
            self.pool.submit(os._exit, 0)  # a process with Unsloth does not end by itself
        self.pool.shutdown()


# --- all together ---


@dataclass(frozen=True)
class Steps(Report):
    """Results with one row per side and length; METHOD explains the columns."""

    machine: Machine | None
    rows: list[dict[str, Any]]
    losses: dict[str, list[float]]
    failures: list[str] = field(default_factory=list)
    method: str = METHOD

    def render(self) -> Iterable[str]:
        yield str(self.machine)
        yield self.method
        first: dict[int, dict[str, Any]] = {}  # first row of each size
        lines = []
        for row in self.rows:
            base = first.setdefault(row["tokens"], row)
            clocks = {} if self.failures else {"gpu_ms": "gpu_x", "wall_ms": "wall_x"}
            lines.append(row | {name: base[clock] / row[clock] for clock, name in clocks.items() if row[clock]})
        yield table(lines)
        for name, losses in self.losses.items():
            yield f"{name}: losses {' '.join(f'{loss:.4f}' for loss in losses[::5])} ... {losses[-1]:.4f}"
        yield from self.failures


def measure(what: str, tell: Progress = silent) -> Steps:
    """Compare the sides of ``COMPARISONS[what]`` whose libraries are installed."""
    every = COMPARISONS[what]
    sides = {name: s for name, s in every.sides.items() if importlib.util.find_spec(LIBRARIES.get(s.kind, "peft"))}
    return Steps(machine(), *compare(every._replace(sides=sides), tell=tell))


def compare(
    what: Comparison, profiled: int = PROFILED, tell: Progress = silent
) -> tuple[list[dict[str, Any]], dict[str, list[float]], list[str]]:
    """Measure the sides. Return the rows, the losses of steps that learn by side, and the failures.

    A side that fails has no further rows.
    """
    sides, failures = what.sides, []
    groups: dict[str, dict[str, Side]] = {}
    for name, side in sides.items():
        groups.setdefault(side.kind, {})[name] = side
    workers = {kind: Worker(kind, group, what.configuration) for kind, group in groups.items()}

    def of_each(method: str, names: Iterable[str], size: Size) -> dict[str, Any]:
        found = {}
        for name in names:
            found[name], error = workers[sides[name].kind].ask(method, name, size)
            if error:
                failures.append(f"{name}, {method}, {size[0]}x{size[1]}: {error}")
        return {name: answer for name, answer in found.items() if answer is not None}

    try:
        for kind, worker in workers.items():
            tell(f"building {kind}")
            if error := worker.ask()[1]:
                failures.append(f"{kind}: {error}")
                sides = {name: side for name, side in sides.items() if side.kind != kind}
        rows: list[dict[str, Any]] = []
        for size in what.sizes:
            tell("{}x{} tokens".format(*size))
            seen = of_each("observe", sides, size)
            sides = {name: sides[name] for name in seen}
            failures += differ(sides, {name: loss for name, (loss, *_) in seen.items()}, size)
            orders = ([*sides], [*reversed(sides)])
            wall = [of_each("wall", orders[round_ % 2], size) for round_ in range(what.walls)]
            gpu = [of_each("gpu", sides, size) for _ in range(profiled)]
            for name in sides:
                taken = Times(tuple(found[name] for found in wall if name in found) or (0.0,))
                ms = [found[name][0] for found in gpu if name in found] or [0.0]
                rows.append({
                    "side": name, "tokens": size[0] * size[1],
                    "gpu_ms": statistics.median(ms), "gpu_spread": (max(ms) - min(ms)) / (statistics.median(ms) or 1),
                    "wall_ms": taken.median, "wall_spread": taken.noise,
                    "launches": max((found[name][1] for found in gpu if name in found), default=0),
                    "peak_gib": seen[name][1], "reserved_gib": seen[name][2], "calls": seen[name][3],
                })  # fmt: skip
        tell("steps that learn")
        losses = of_each("train", [name for name in sides if "cached" not in name], next(iter(what.sizes)))
        return rows, losses, failures
    finally:
        for worker in workers.values():
            worker.close()


def differ(sides: Mapping[str, Any], losses: Mapping[str, float], size: Size) -> Iterator[str]:
    """Yield wrong losses. The patch and its cache must not change any bit, and all sides must agree up to rounding in bf16."""
    first: dict[tuple[str, bool], str] = {}
    name_of_all = next(iter(losses), "")
    for name, loss in losses.items():
        options = sides[name].options or {}
        if "experts" not in options:  # not for a mixture, because cached expert weights are multiplied by other kernels
            other = first.setdefault((sides[name].kind, "lora" in options), name)
            if loss != losses[other] and sides[name].options is not None:
                yield f"{name}, {size[0]}x{size[1]}: loss {loss!r}, {other} {losses[other]!r}"
        if not abs(loss - losses[name_of_all]) <= ROUNDING * losses[name_of_all]:
            yield f"{name}, {size[0]}x{size[1]}: loss {loss:.4f}, {name_of_all} {losses[name_of_all]:.4f}"


# --- the command ---


def flag(name: str, text: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", "what", flag_value=name, help=text)


@click.command()
@flag("peft", "Compare peft with the patch and without it.  [default]")
@flag("trl", "Compare peft, and Liger and Unsloth if they are installed.")
@flag("compiled", "Compare with compiled layers.")
@flag("moe", "Compare a mixture of experts, with LoRA on the experts.")
@flag("unsloth", "Compare Unsloth with the patch and without it.")
@click.pass_obj
def command(tell: Progress, what: str | None) -> Steps:
    """Measure a whole QLoRA training step, with the patch and without it."""
    require_gpu()
    require_patch()
    return measure(what or "peft", tell)


if __name__ == "__main__":
    from benchmarks import step  # workers unpickle objects from the module of this name, not from __main__

    run_alone(step.command, "python -m benchmarks.step")
