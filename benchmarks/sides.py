"""Measure a QLoRA step of several sides, which alternate. Each side has its own process.

The options of a side stay on, so its layers are captured and its cache is filled once. The processes build, learn and
warm up at the same time. Then the sides are measured one at a time. All processes share the memory of the GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import math
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import nf4_patch
from benchmarks.kinds import LIBRARIES, UNSLOTH, model_of, unsloth_model
from benchmarks.timing import Machine, kernels, machine, synchronize
from benchmarks.training import BUDGET, Size, Step, optimizer_of
from nf4_patch.tools.report import Progress, Report, silent, table
from nf4_patch.tools.step import ROUNDING, wall_times

METHOD = (
    "A step as in TRL: adapters in 16 bits, autocast, checkpointing. Each side has a process; sides alternate. A round times three"
    " steps without a synchronization in between, three times per length. wall_ms: median of all rounds, per step; wall_spread:"
    " (third - first quartile) / median. gpu_ms: sum of kernels and copies, median; gpu_spread: (largest - smallest) / median."
    " gpu_x, wall_x: speed-up over the first side, if losses agree. launches: kernels and copies. calls: calls of our kernel."
    " peak_gib, reserved_gib: memory that PyTorch allocated, and reserved on the GPU, at the peak. losses: of ten steps that learn."
    " Timed steps include the optimizer, at a learning rate of 0."
)
ROUNDS, LEARNING = 5, 10
LAYERS = "transformers.modeling_layers.GradientCheckpointingLayer.__call__"  # what graphs="auto" replaces
FUSED_ADAMW, PAGED_ADAMW = "adamw_torch_fused", "paged_adamw_8bit"
CACHE, FUSED, PACKED, GRAPHS = {"cache": BUDGET}, {"lora": "fused"}, {"experts": "4bit"}, {"graphs": "auto"}
# A size, because the memory that "auto" finds free changes with the other sides, whose processes share the GPU.
ACTIVATIONS = {"activations": "16GiB"}


class Side(NamedTuple):
    kind: str  # kind of model, as in benchmarks.kinds
    options: dict[str, str] | None  # arguments of nf4_patch.enable, None if the patch is off
    optimizer: str = FUSED_ADAMW  # transformers' default, see training.optimizer_of
    environment: tuple[tuple[str, str], ...] = ()
    checkpointing: bool | str = True  # use_gradient_checkpointing of Unsloth's get_peft_model
    skips: int | str = 0  # checkpoint_skip_layers of Unsloth's get_peft_model


class Comparison(NamedTuple):
    model: str
    layers: int
    sides: dict[str, Side]
    sizes: Iterable[Size]
    configuration: Callable[[], Any]  # called in the process of a side, after Unsloth's import


# --- in the process of a side ---


class Running:
    """The model of a side, with its options switched on."""

    def __init__(self, side: Side, configuration: Callable[[], Any]):
        os.environ.update(side.environment)
        if side.kind == UNSLOTH:
            importlib.import_module("unsloth")
        self.side, config = side, configuration()
        if side.kind == UNSLOTH:
            self.model = unsloth_model(config, side.checkpointing, side.skips)
        else:
            self.model = model_of(side.kind, config)
        self.optimizer, self.steps = self.new_optimizer(), dict[Size, Step]()
        if side.options is not None:
            nf4_patch.enable(**side.options)  # type: ignore[arg-type]
        if torch.cuda.is_available():
            kernels(synchronize)  # starts the profiler

    def free_memory(self) -> None:
        """Return unused memory to the GPU, and reset PyTorch's peaks of memory."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def new_optimizer(self, lr: float = 0.0) -> torch.optim.Optimizer:
        return optimizer_of(self.model, lr, self.side.optimizer)

    def step_of(self, size: Size, optimizer: torch.optim.Optimizer) -> Step:
        return Step(self.model, optimizer, size, False)

    def learn(self, size: Size) -> list[float]:
        """Return the losses of steps that learn. Every side starts from the same adapters."""
        step = self.step_of(size, self.new_optimizer(lr=1e-3))
        losses = [step().item() for _ in range(LEARNING)]
        self.optimizer = self.new_optimizer()  # resets the adapters
        return losses

    def warm_up(self, sizes: Sequence[Size]) -> list[list[float]]:
        """Return the peaks of allocated and reserved memory of each size, in GiB. Sizes must ascend."""
        memory: list[list[float]] = []
        for size in sizes:
            self.steps[size] = self.step_of(size, self.optimizer)
            for _ in range(5 + 2 * len(memory)):  # compiles, fills the cache, captures; later shapes are captured later
                self.steps[size]()
            self.free_memory()
            for _ in range(2):
                self.steps[size]()
            peaks = [0, 0]
            if torch.cuda.is_available():
                peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            memory.append([peak / 2**30 for peak in peaks])
        return memory

    def measure(self, size: Size) -> dict[str, Any]:
        step, before = self.steps[size], nf4_patch.status()
        loss = step()
        calls = nf4_patch.status().hits - before.hits
        walls = wall_times(step)
        found = kernels(step) if torch.cuda.is_available() else []
        status = nf4_patch.status()
        options = self.side.options or {}
        is_eager = "graphs" in options and status.graphs.replays == before.graphs.replays
        eager = {reason for target in status.targets if target.name == LAYERS for reason in target.fallbacks}
        return {
            "walls": walls, "gpu": sum(ms for _, ms in found), "launches": len(found), "calls": calls,
            "loss": loss.item(), "eager": ", ".join(sorted(eager)) if is_eager else "",
            "recomputes": dict(status.activations.why) if "activations" in options else {},
        }  # fmt: skip


def serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """Make the side. Then run the method that each request names, and send back (result, "") or (None, traceback)."""
    running = None
    while True:
        try:
            running = running or make()
            method, *arguments = pipe.recv()
            pipe.send((getattr(running, method)(*arguments), ""))
        except Exception:
            if running is None:  # raised before the request was read
                pipe.recv()
            pipe.send((None, traceback.format_exc()))


class Process:
    """The process of a side. It starts to make the side immediately."""

    def __init__(self, make: Callable[[], Any]):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *request: Any) -> None:
        """Send the name of a method of the side, and its arguments."""
        with contextlib.suppress(OSError):
            self.pipe.send(request)

    def receive(self) -> tuple[Any, str]:
        """Return (the result, "") or (None, error)."""
        try:
            found: tuple[Any, str] = self.pipe.recv()
            return found
        except (EOFError, OSError):
            return None, "the process ended"


# --- all together ---


@dataclass(frozen=True)
class Steps(Report):
    """Results with one row per side and length. METHOD explains the columns."""

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


def measure(comparison: Comparison, rounds: int = ROUNDS, seconds: float = math.inf, tell: Progress = silent) -> Steps:
    """Measure the sides whose libraries are installed. After a side has failed, it has no further rows.

    Args:
        seconds: after this time, no further round begins.
    """
    begin, sizes = time.monotonic(), list(comparison.sizes)
    sides = {n: s for n, s in comparison.sides.items() if importlib.util.find_spec(LIBRARIES.get(s.kind, "peft"))}
    processes = {name: Process(partial(Running, side, comparison.configuration)) for name, side in sides.items()}
    failures: list[str] = []

    def of_each(names: Iterable[str], *request: Any, together: bool = False) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for group in [list(names)] if together else [[name] for name in names]:
            for name in group:
                processes[name].send(*request)
            for name in group:
                answers[name], error = processes[name].receive()
                if error:
                    failures.append(f"{name}, {request[0]}: {error}")
                    sides.pop(name)
        return {name: answer for name, answer in answers.items() if name in sides}

    try:
        tell(f"{comparison.model}, {comparison.layers} layers: building")
        of_each([*sides], "free_memory", together=True)  # all are built before the first captures its layers
        tell(f"steps that learn after {time.monotonic() - begin:.0f} s")
        losses = of_each([*sides], "learn", sizes[0], together=True)
        tell(f"warming up after {time.monotonic() - begin:.0f} s")
        memory = of_each([*sides], "warm_up", sizes, together=True)
        results: dict[tuple[str, Size], list[dict[str, Any]]] = {}
        for round_ in range(rounds):
            if round_ and time.monotonic() - begin > seconds:
                break
            tell(f"round {round_ + 1} after {time.monotonic() - begin:.0f} s")
            for size in sizes:
                for name, result in of_each([*sides][:: 1 if round_ % 2 else -1], "measure", size).items():
                    results.setdefault((name, size), []).append(result)
    finally:
        for process in processes.values():
            process.process.kill()  # a process with Unsloth does not end by itself
    rows = []
    for index, size in enumerate(sizes):
        last = {name: results[name, size][-1] for name in sides}
        failures += differ(sides, {name: result["loss"] for name, result in last.items()}, size)
        eager = {name: result["eager"] for name, result in last.items() if result["eager"]}
        failures += [f"{name}, {size[0]}x{size[1]}: no layer ran as a CUDA graph: {why}" for name, why in eager.items()]
        recompute = {name: result["recomputes"] for name, result in last.items() if result["recomputes"]}
        failures += [f"{name}, {size[0]}x{size[1]}: layers recompute: {why}" for name, why in recompute.items()]
        rows += [row_of(comparison, name, size, results[name, size], *memory[name][index]) for name in sides]
    return Steps(machine() if torch.cuda.is_available() else None, rows, losses, failures)


def row_of(
    comparison: Comparison,
    side: str,
    size: Size,
    results: Sequence[Mapping[str, Any]],
    peak_gib: float,
    reserved_gib: float,
) -> dict[str, Any]:
    walls, gpu = [wall for each in results for wall in each["walls"]], [each["gpu"] for each in results]
    (first, wall_ms, third), gpu_ms = statistics.quantiles(walls, n=4), statistics.median(gpu)
    return {
        "model": comparison.model, "layers": comparison.layers, "side": side, "tokens": size[0] * size[1],
        "gpu_ms": gpu_ms, "gpu_spread": (max(gpu) - min(gpu)) / (gpu_ms or 1),
        "wall_ms": wall_ms, "wall_spread": (third - first) / wall_ms,
        "launches": results[-1]["launches"], "calls": results[-1]["calls"], "peak_gib": peak_gib,
        "reserved_gib": reserved_gib, "rounds": len(results),
    }  # fmt: skip


def differ(sides: Mapping[str, Any], losses: Mapping[str, float], size: Size) -> Iterator[str]:
    """Yield a message for each wrong loss.

    The patch and its cache must not change any bit, and all sides must agree up to rounding in bf16. Some sides are not
    compared bit for bit. Unsloth's bits vary between processes, also without the patch. With packed experts, other
    kernels multiply cached weights of experts.
    """
    first: dict[tuple[str, bool], str] = {}
    name_of_all = next(iter(losses), "")
    for name, loss in losses.items():
        side, options = sides[name], sides[name].options or {}
        if "experts" not in options and side.kind != UNSLOTH:
            other = first.setdefault((side.kind, "lora" in options), name)
            if loss != losses[other] and side.options is not None:
                yield f"{name}, {size[0]}x{size[1]}: loss {loss!r}, {other} {losses[other]!r}"
        if not abs(loss - losses[name_of_all]) <= ROUNDING * losses[name_of_all]:
            yield f"{name}, {size[0]}x{size[1]}: loss {loss:.4f}, {name_of_all} {losses[name_of_all]:.4f}"
