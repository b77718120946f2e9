"""python -m benchmarks.lengths: epochs of batches of varying lengths, with graphs and without, for several paddings."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import torch

import nf4_patch
from benchmarks import run_alone
from benchmarks.kinds import LIGER
from benchmarks.models import config_of
from benchmarks.sides import FUSED, GRAPHS, Process, Running, Side
from benchmarks.timing import Machine, machine, synchronize
from benchmarks.training import LAYERS, LLAMA
from nf4_patch.tools.report import Progress, Report, require_gpu, require_patch, silent, table

METHOD = (
    "Steps as in a recipe, with Liger. Each epoch has the same batches of two sequences, in another order. Lengths are"
    " log-normal, and padded to a multiple of pad_to. Each side has a process; sides alternate every ten steps. step_ms:"
    " wall-clock time of a step, mean of the epoch, with all captures and first uses of a length. lengths: how many different"
    " ones there are. shapes: of these, how many had graphs at the end of the epoch. Losses with and without graphs must be"
    " equal, bit for bit. flash: like fused, but not with cuDNN's attention, which prepares each length; only where pad_to is 1."
)
BATCHES, EPOCHS, TURN = 120, 4, 10
PADDINGS = 64, 8, 1
FIRST = 1, 2048  # batch and tokens of two steps before the first epoch; no batch of an epoch has this shape
SIDES = {"fused": Side(LIGER, FUSED), "graphs": Side(LIGER, FUSED | GRAPHS)}
FLASH = {"flash": Side(LIGER, FUSED)}


def lengths_of(padding: int) -> list[int]:
    """Return the number of tokens per sequence of each batch.

    It has a log-normal distribution with median 400, from 16 to 2,000.
    """
    chance = random.Random(0)
    lengths = [min(2000, max(16, round(chance.lognormvariate(6.0, 0.6)))) for _ in range(BATCHES)]
    return [-(-length // padding) * padding for length in lengths]


class Lengths(Running):
    """The model of a side, which trains on batches of varying lengths."""

    def begin(self) -> None:
        """Drop all graphs, and run two steps of the size FIRST."""
        nf4_patch.disable()
        nf4_patch.enable(**self.side.options or {})  # type: ignore[arg-type]
        for _ in range(2):
            self.step_of(FIRST, self.optimizer)()

    def turn(self, lengths: list[int]) -> dict[str, Any]:
        """Run a step for each length. Return the time of the steps in ms, their losses, and how many shapes have graphs."""
        steps = [self.step_of((2, length), self.optimizer) for length in lengths]
        synchronize()
        begin = time.perf_counter()
        losses = [step() for step in steps]
        synchronize()
        ms = (time.perf_counter() - begin) * 1e3
        return {"ms": ms, "losses": [loss.item() for loss in losses], "shapes": nf4_patch.status().graphs.shapes}


class Flash(Lengths):
    """A side whose attention does not run in cuDNN."""

    def begin(self) -> None:
        torch.backends.cuda.enable_cudnn_sdp(False)
        super().begin()


@dataclass(frozen=True)
class Epochs(Report):
    """Results with one row per padding, side and epoch. METHOD explains the columns."""

    machine: Machine
    rows: list[dict[str, Any]]
    failures: list[str] = field(default_factory=list)
    method: str = METHOD

    def render(self) -> Iterable[str]:
        yield str(self.machine)
        yield self.method
        yield table(self.rows)
        yield from self.failures


def measure(seconds: float = math.inf, tell: Progress = silent) -> Epochs:
    """Measure both sides with each padding.

    Args:
        seconds: after this time, no further padding begins.
    """
    started, rows, failures = time.monotonic(), list[dict[str, Any]](), list[str]()
    processes = {
        name: Process(partial(Flash if name in FLASH else Lengths, side, partial(config_of, LLAMA)))
        for name, side in (SIDES | FLASH).items()
    }

    def ask(name: str, *request: Any) -> Any:
        processes[name].send(*request)
        answer, error = processes[name].receive()
        if error:
            raise RuntimeError(f"{name}, {request[0]}: {error}")
        return answer

    try:
        for padding in PADDINGS:
            if rows and time.monotonic() - started > seconds:
                break
            lengths, chance = lengths_of(padding), random.Random(padding)
            sides = [*SIDES, *FLASH] if padding == 1 else [*SIDES]
            for name in sides:
                ask(name, "begin")
            for epoch in range(1, EPOCHS + 1):
                tell(f"multiple of {padding}, epoch {epoch} after {time.monotonic() - started:.0f} s")
                turns: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
                chance.shuffle(lengths)
                for first in range(0, BATCHES, TURN):
                    for name in sides[:: -1 if first // TURN % 2 else 1]:
                        turns[name].append(ask(name, "turn", lengths[first : first + TURN]))
                losses = {name: [loss for turn in found for loss in turn["losses"]] for name, found in turns.items()}
                if losses["fused"] != losses["graphs"]:
                    failures.append(f"multiple of {padding}, epoch {epoch}: losses differ")
                rows += [
                    {
                        "model": "Llama-3.1-8B", "layers": LAYERS, "side": name, "pad_to": padding,
                        "lengths": len({*lengths}), "epoch": epoch,
                        "step_ms": sum(turn["ms"] for turn in found) / BATCHES, "shapes": found[-1]["shapes"],
                    }
                    for name, found in turns.items()
                ]  # fmt: skip
            if not any(row["shapes"] for row in rows if row["pad_to"] == padding):
                failures.append(f"multiple of {padding}: no layer ran as a CUDA graph")
    except RuntimeError as error:
        failures.append(str(error))
    finally:
        for process in processes.values():
            process.process.kill()
    return Epochs(machine(), rows, failures)


@click.command()
@click.option("--seconds", type=float, default=math.inf, help="Begin no further padding later than this.")
@click.pass_obj
def command(tell: Progress, seconds: float) -> Epochs:
    """Measure epochs of batches of varying lengths, with graphs and without, for several paddings."""
    require_gpu()
    require_patch()
    return measure(seconds, tell)


if __name__ == "__main__":
    run_alone(command, "python -m benchmarks.lengths")
