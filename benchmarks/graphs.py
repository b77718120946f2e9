"""python -m benchmarks.graphs: a QLoRA step with decoder layers as CUDA graphs, next to eager layers and Unsloth.

Every side has a process of its own, and its options stay on, so a layer is captured once per length. Sides alternate.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import click
import torch

import nf4_patch
from benchmarks import run_alone
from benchmarks.models import config_of, qwen3
from benchmarks.step import FUSED, GRAPHS, LAYERS_ONLY, LIGER, PACKED, UNSLOTH, Steps, llama, model_of
from benchmarks.timing import kernels, machine, synchronize
from benchmarks.training import LENGTHS, Size, Step, optimizer_of
from nf4_patch.tools.report import Progress, require_gpu, require_patch

METHOD = (
    "Each side has a process; sides alternate. A round is three times three steps without a synchronization in between."
    " wall_ms: the median of all rounds, per step; wall_spread: (largest - smallest) / median. gpu_ms: sum of kernels and copies,"
    " median. reserved_gib: memory reserved by PyTorch at the peak. Optimizer steps are included, at a learning rate of 0."
)
ROUNDS = 3
DENSE, MIXTURE = "Llama-3.1-8B", "Qwen3-30B-A3B"


class Side(NamedTuple):
    kind: str  # kind of model, as in benchmarks.step
    options: dict[str, str] | None  # arguments of nf4_patch.enable, None if the patch is off
    environment: tuple[tuple[str, str], ...] = ()


SIDES = {
    DENSE: {
        "eager": Side(LIGER, FUSED),
        "graphs": Side(LIGER, FUSED | GRAPHS),
        "unsloth": Side(UNSLOTH, None),
        "unsloth, block graphs": Side(UNSLOTH, None, (("UNSLOTH_BLOCK_CUDAGRAPHS", "1"),)),
    },
    MIXTURE: {
        "eager": Side(LAYERS_ONLY, PACKED | FUSED),
        "graphs": Side(LAYERS_ONLY, PACKED | FUSED | GRAPHS),
        "unsloth": Side(UNSLOTH, None),
    },
}


def serve(pipe: Connection, side: Side, model: str, layers: int) -> None:
    """Build the model in this process. Then measure each size that arrives, and send its numbers back."""
    os.environ.update(side.environment)
    if side.kind == UNSLOTH:
        importlib.import_module("unsloth")
    built = model_of(side.kind, qwen3(layers) if model == MIXTURE else config_of(llama(layers)))
    optimizer, steps = optimizer_of(built), dict[Size, Step]()
    if side.options is not None:
        nf4_patch.enable(**side.options)  # type: ignore[arg-type]
    kernels(synchronize)  # starts the profiler
    while (size := pipe.recv()) is not None:
        if size not in steps:
            steps[size] = Step(built, optimizer, size, False)
            for _ in range(5):  # compiles, and captures at the third call
                steps[size]()
        pipe.send(measured(steps[size]))


def measured(step: Step) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        loss = step()
    walls = []
    for _ in range(3):
        synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            step()
        synchronize()
        walls.append((time.perf_counter() - begin) / 3 * 1e3)
    found = kernels(step)
    return {
        "walls": walls, "gpu": sum(ms for _, ms in found), "launches": len(found), "loss": loss.item(),
        "peak": torch.cuda.max_memory_allocated() / 2**30, "reserved": torch.cuda.max_memory_reserved() / 2**30,
    }  # fmt: skip


def rows_of(model: str, layers: int, sizes: Iterable[Size], tell: Progress) -> list[dict[str, Any]]:
    """Measure all sides of a model at each size."""
    context, sides = multiprocessing.get_context("spawn"), SIDES[model]
    if importlib.util.find_spec("unsloth") is None:
        sides = {name: side for name, side in sides.items() if side.kind != UNSLOTH}
    pipes, processes = {}, []
    for name, side in sides.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, side, model, layers), daemon=True))
        processes[-1].start()
    rows = []
    for size in sizes:
        tell(f"{model}, {layers} layers, {size[0]}x{size[1]} tokens")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in pipes}
        for round_ in range(ROUNDS + 1):
            for name in [*pipes][:: 1 if round_ % 2 else -1]:
                pipes[name].send(size)
                result = pipes[name].recv()
                found[name] += [result] * bool(round_)  # the first round warms up
        for name, results in found.items():
            walls, gpu = [wall for each in results for wall in each["walls"]], [each["gpu"] for each in results]
            wall_ms, gpu_ms, last = statistics.median(walls), statistics.median(gpu), results[-1]
            rows.append({
                "model": model, "layers": layers, "side": name, "tokens": size[0] * size[1],
                "wall_ms": wall_ms, "wall_spread": (max(walls) - min(walls)) / wall_ms,
                "gpu_ms": gpu_ms, "gpu_spread": (max(gpu) - min(gpu)) / gpu_ms,
                "launches": last["launches"], "peak_gib": last["peak"], "reserved_gib": last["reserved"], "loss": last["loss"],
            })  # fmt: skip
    for process in processes:
        process.kill()  # a process with Unsloth does not end by itself
    return rows


@click.command()
@click.option("--layers", default=4, show_default=True, help="Layers of the dense model; a mixture has two.")
@click.pass_obj
def command(tell: Progress, layers: int) -> Steps:
    """Measure a training step with decoder layers as CUDA graphs."""
    require_gpu()
    require_patch()
    rows = rows_of(DENSE, layers, LENGTHS, tell) + rows_of(MIXTURE, 2, ((1, 512), (1, 2048), (1, 4096)), tell)
    return Steps(machine(), rows, {}, method=METHOD)


if __name__ == "__main__":
    from benchmarks import graphs  # the processes import the functions from the module of this name, not from __main__

    run_alone(graphs.command, "python -m benchmarks.graphs")
