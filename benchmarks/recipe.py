"""python -m benchmarks.recipe [--layers 16 | --mixture]: a QLoRA step of a TRL script after each further switch, and of Unsloth.

Every side has a process of its own, and its options stay on, so layers are captured and the cache is filled once. The processes
build, learn and warm up at the same time. Then they are measured one at a time, alternating.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import click
import torch

import nf4_patch
from benchmarks import run_alone
from benchmarks.models import config_of, qwen3
from benchmarks.step import (
    CACHE,
    DENSE,
    FUSED,
    GRAPHS,
    LIBRARIES,
    LIGER,
    PACKED,
    STOCK,
    UNSLOTH,
    Steps,
    differ,
    model_of,
    unsloth_model,
)  # fmt: skip
from benchmarks.timing import kernels, machine, synchronize
from benchmarks.training import LENGTHS, Size, Step, llama, optimizer_of
from nf4_patch.tools.report import Progress, require_gpu, require_patch, silent

METHOD = (
    "Each side has a process; sides alternate. A round times three steps without a synchronization in between, three times per length."
    " wall_ms: median of all rounds, per step; wall_spread: (third - first quartile) / median. gpu_ms: sum of kernels and copies, median."
    " peak_gib, reserved_gib: memory that PyTorch allocated, and reserved on the GPU, at the peak. losses: of ten steps that learn."
    " Timed steps include the optimizer, at a learning rate of 0."
)
ROUNDS, LEARNING = 5, 10
LAYERS = "transformers.modeling_layers.GradientCheckpointingLayer.__call__"  # what graphs="auto" replaces
FUSED_ADAMW, PAGED_ADAMW = "adamw_torch_fused", "paged_adamw_8bit"


class Side(NamedTuple):
    kind: str  # kind of model, as in benchmarks.step
    options: dict[str, str] | None  # arguments of nf4_patch.enable, None if the patch is off
    optimizer: str = FUSED_ADAMW  # transformers' default, see training.optimizer_of
    environment: tuple[tuple[str, str], ...] = ()
    checkpointing: bool | str = True  # use_gradient_checkpointing of Unsloth's get_peft_model


# Unsloth with its own checkpoint, which is its default. It moves the inputs of layers to host memory.
OFFLOADING = {
    f"{UNSLOTH}, offloading": Side(UNSLOTH, None, checkpointing="unsloth"),
    f"{UNSLOTH}, offloading, graphs": Side(UNSLOTH, GRAPHS, checkpointing="unsloth"),
}


class Recipe(NamedTuple):
    model: str
    layers: int
    sides: dict[str, Side]
    sizes: Iterable[Size]
    configuration: Callable[[], Any]  # called in the process of a side, after Unsloth's import


def sides_of(first: dict[str, Side], **common: str) -> dict[str, Side]:
    """Return ``first``, a side for each further switch, and Unsloth's sides. ``common`` are options of all sides with the patch."""
    best = common | FUSED | GRAPHS
    return first | {
        "patch": Side(STOCK, common),
        "liger": Side(LIGER, common),
        "fused": Side(LIGER, common | FUSED),
        "graphs": Side(LIGER, best),
        "cache": Side(LIGER, best | CACHE),
        "paged optimizer": Side(LIGER, best | CACHE, PAGED_ADAMW),
        UNSLOTH: Side(UNSLOTH, None),
    }


def dense(layers: int) -> Recipe:
    sides = sides_of({"peft": Side(STOCK, None)})
    sides[f"{UNSLOTH}, graphs"] = Side(UNSLOTH, GRAPHS)
    sides[f"{UNSLOTH}, block graphs"] = Side(UNSLOTH, None, environment=(("UNSLOTH_BLOCK_CUDAGRAPHS", "1"),))
    sides |= OFFLOADING
    if layers > 8:  # fewer processes, so that all fit into the memory of one GPU
        sides = {name: side for name, side in sides.items() if name not in ("patch", "liger", "paged optimizer")}
    return Recipe("Llama-3.1-8B", layers, sides, LENGTHS, partial(config_of, llama(layers)))


def mixture() -> Recipe:
    """Its first side has experts in 16 bits, because peft's LoRA on experts needs them, or the patch."""
    sides = sides_of({"16-bit experts": Side(DENSE, None)}, **PACKED) | OFFLOADING
    return Recipe("Qwen3-30B-A3B", 2, sides, ((1, 512), (1, 2048), (1, 4096)), qwen3)


# --- in the process of a side ---


class Running:
    """The model of a side, with its options switched on."""

    def __init__(self, side: Side, configuration: Callable[[], Any]):
        os.environ.update(side.environment)
        if side.kind == UNSLOTH:
            importlib.import_module("unsloth")
        self.side, config = side, configuration()
        self.model = unsloth_model(config, side.checkpointing) if side.kind == UNSLOTH else model_of(side.kind, config)
        self.optimizer, self.steps = self.new_optimizer(), dict[Size, Step]()
        if side.options is not None:
            nf4_patch.enable(**side.options)  # type: ignore[arg-type]
        if torch.cuda.is_available():
            kernels(synchronize)  # starts the profiler

    def new_optimizer(self, lr: float = 0.0) -> torch.optim.Optimizer:
        return optimizer_of(self.model, lr, self.side.optimizer)

    def learn(self, size: Size) -> list[float]:
        """Return the losses of steps that learn. Every side starts from the same adapters."""
        step = Step(self.model, self.new_optimizer(lr=1e-3), size, False)
        losses = [step().item() for _ in range(LEARNING)]
        self.optimizer = self.new_optimizer()  # resets the adapters
        return losses

    def warm_up(self, sizes: Sequence[Size]) -> list[list[float]]:
        """Return the peaks of allocated and reserved memory of each size, in GiB. Sizes must ascend."""
        memory: list[list[float]] = []
        for size in sizes:
            gc.collect()
            self.steps[size] = Step(self.model, self.optimizer, size, False)
            for _ in range(5 + 2 * len(memory)):  # compiles, fills the cache, captures; later shapes are captured later
                self.steps[size]()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                self.steps[size]()
            peaks = [0, 0]
            if torch.cuda.is_available():
                peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            memory.append([peak / 2**30 for peak in peaks])
        return memory

    def measure(self, size: Size) -> dict[str, Any]:
        step, walls, before = self.steps[size], [], nf4_patch.status().graphs.replays
        loss = step()
        for _ in range(3):
            synchronize()
            begin = time.perf_counter()
            for _ in range(3):
                step()
            synchronize()
            walls.append((time.perf_counter() - begin) / 3 * 1e3)
        found = kernels(step) if torch.cuda.is_available() else []
        status = nf4_patch.status()
        is_eager = "graphs" in (self.side.options or {}) and status.graphs.replays == before
        eager = {reason for target in status.targets if target.name == LAYERS for reason in target.fallbacks}
        return {
            "walls": walls, "gpu": sum(ms for _, ms in found), "launches": len(found), "loss": loss.item(),
            "eager": ", ".join(sorted(eager)) if is_eager else "",
        }  # fmt: skip


def serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """Make the side. Then call the method of each request, and send back (result, "") or (None, traceback)."""
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
        """Ask for the result of a method of the side: its name, then its arguments."""
        with contextlib.suppress(OSError):
            self.pipe.send(request)

    def receive(self) -> tuple[Any, str]:
        """Return (the result, "") or (None, what went wrong)."""
        try:
            found: tuple[Any, str] = self.pipe.recv()
            return found
        except (EOFError, OSError):
            return None, "the process ended"


# --- all together ---


def measure(recipe: Recipe, rounds: int = ROUNDS, seconds: float = math.inf, tell: Progress = silent) -> Steps:
    """Measure the sides of a recipe whose libraries are installed. A side that fails has no further rows.

    Args:
        seconds: no round begins later than this after the call.
    """
    begin, sizes = time.monotonic(), list(recipe.sizes)
    sides = {n: s for n, s in recipe.sides.items() if importlib.util.find_spec(LIBRARIES.get(s.kind, "peft"))}
    processes = {name: Process(partial(Running, side, recipe.configuration)) for name, side in sides.items()}
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
        tell(f"{recipe.model}, {recipe.layers} layers: building, steps that learn")
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
        rows += [row_of(recipe, name, size, results[name, size], *memory[name][index]) for name in sides]
    return Steps(machine() if torch.cuda.is_available() else None, rows, losses, failures, METHOD)


def row_of(
    recipe: Recipe, side: str, size: Size, results: Sequence[Mapping[str, Any]], peak_gib: float, reserved_gib: float
) -> dict[str, Any]:
    walls, gpu = [wall for each in results for wall in each["walls"]], [each["gpu"] for each in results]
    (first, wall_ms, third), gpu_ms = statistics.quantiles(walls, n=4), statistics.median(gpu)
    return {
        "model": recipe.model, "layers": recipe.layers, "side": side, "tokens": size[0] * size[1],
        "gpu_ms": gpu_ms, "gpu_spread": (max(gpu) - min(gpu)) / (gpu_ms or 1),
        "wall_ms": wall_ms, "wall_spread": (third - first) / wall_ms,
        "launches": results[-1]["launches"], "peak_gib": peak_gib, "reserved_gib": reserved_gib, "rounds": len(results),
    }  # fmt: skip


@click.command()
@click.option("--layers", default=4, show_default=True, help="Number of layers of the dense model.")
@click.option("--seconds", type=float, default=math.inf, help="Begin no round later than this.")
@click.option(
    "--mixture", "is_mixture", is_flag=True, help="Measure two layers of a mixture, with LoRA on the experts."
)
@click.pass_obj
def command(tell: Progress, layers: int, seconds: float, is_mixture: bool) -> Steps:
    """Measure a QLoRA step of a TRL script after each further switch, and of Unsloth."""
    require_gpu()
    require_patch()
    return measure(mixture() if is_mixture else dense(layers), seconds=seconds, tell=tell)


if __name__ == "__main__":
    from benchmarks import recipe  # the processes import the functions from the module of this name, not from __main__

    run_alone(recipe.command, "python -m benchmarks.recipe")
