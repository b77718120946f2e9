"""Record losses, seconds per step and peak memory of an example, and report them with ``nf4_patch.status()``."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback


def now() -> float:
    """Wait until the GPU has finished its work, and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def graphs() -> dict[str, int]:
    """Count the graphs that torch.compile made in this process (a recompile adds one), their operators, and graph breaks."""
    from torch._dynamo.utils import counters

    stats = counters["stats"]
    return {
        "graphs": stats["unique_graphs"],
        "operators": stats["calls_captured"],
        "breaks": sum(counters["graph_break"].values()),
        "frames": counters["frames"]["total"],
    }


def fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all trainable parameters. If two runs have the same digest, their parameters are bit-identical."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # FSDP2 shards them
            digest.update(name.encode())
            digest.update(value.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Record(TrainerCallback):
    """Losses and times of a run. Call ``step(loss)`` after every step, or pass the record to a Trainer as a callback."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.extra: dict = {}
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.clock()

    def clock(self) -> float:
        """Return the seconds since the last call."""
        read = now()
        elapsed, self.last = read - getattr(self, "last", read), read
        return elapsed

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        self.seconds.append(self.clock())
        if loss is not None:
            self.losses.append(float(loss))

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock()

    def on_step_end(self, args, state, control, **kwargs):
        self.step()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def as_dict(self) -> dict:
        status = sys.modules["nf4_patch"].status().as_dict() if "nf4_patch" in sys.modules else None
        warm = self.seconds[len(self.seconds) // 2 :]  # the first half compiles, allocates and warms up
        return {
            "losses": self.losses,
            "seconds": self.seconds,
            "seconds_per_step": statistics.median(warm) if warm else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            "torch_compile": graphs(),
            "nf4_patch": status,
            **self.extra,
        }

    def finish(self, model: torch.nn.Module | None = None, json_file: str | None = None, plot: str | None = None):
        """Print the results of the run, and write the files of ``--json`` and ``--plot``."""
        if model is not None:
            self.extra["adapter"] = fingerprint(model)
        data = self.as_dict()
        if self.losses:
            print(f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {len(self.losses)} steps")
        if data["seconds_per_step"] is not None:
            print(f"{1e3 * data['seconds_per_step']:.1f} ms per step (median of the second half)")
        if data["peak_bytes"] is not None:
            print(f"{data['peak_bytes'] / 2**30:.2f} GiB at the peak on {torch.cuda.get_device_name()}")
        if data["nf4_patch"] is not None:
            print(sys.modules["nf4_patch"].status())
        if json_file:
            Path(json_file).write_text(json.dumps(data, indent=1, default=str))
        if plot:
            self.draw(plot)

    def draw(self, file: str) -> None:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        axes.plot(range(1, len(self.losses) + 1), self.losses, marker="o", markersize=3)
        axes.set(xlabel="step", ylabel="loss", title=Path(sys.argv[0]).name)
        figure.savefig(file, dpi=120)
