"""DeepSpeed ZeRO-3 over two processes: bytes sharded, gathered for each use, decoded by the kernel, the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from run_example import GLOO, run

OWN = Path(sys.prefix) / "deepspeed-0.19.8"  # where scripts/test puts it
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not OWN.is_dir() and importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none"),
]
STEPS = 3


def processes(patch: str, checkpoint: str, folder: Path) -> list[dict]:
    script = Path(__file__).parents[1] / "programs" / "zero3_steps.py"
    path = os.pathsep.join(filter(None, [str(OWN), os.environ.get("PYTHONPATH")]))
    variables = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    folder = folder / patch
    folder.mkdir()
    run([sys.executable, *GLOO, script, patch, checkpoint, STEPS, folder], folder, **variables)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_losses_and_adapter_are_equal_to_the_bit(checkpoint, tmp_path):
    on, off = processes("on", checkpoint, tmp_path), processes("off", checkpoint, tmp_path)
    for mine, theirs in zip(on, off, strict=True):
        assert mine["losses"] == theirs["losses"] and len(mine["losses"]) == STEPS
        assert mine["adapter"] == theirs["adapter"] and len(mine["adapter"]) == 14
        assert mine["elements"] == 0  # between its uses a process holds nothing of a weight
        assert mine["refused"]
        assert not theirs["hits"] and not mine["fallbacks"]
        # backward of every linear but those whose input needs no gradient: q, k and v of the only layer
        backward = mine["hits"].pop("bitsandbytes.functional.dequantize_4bit")
        assert backward == (7 - 3) * STEPS
        forward = 7 * STEPS if torch.cuda.is_available() else 0  # the CPU's is bitsandbytes' own op
        assert sum(mine["hits"].values()) == forward
    for mine, theirs in zip(processes("cached", checkpoint, tmp_path), off, strict=True):
        assert mine["losses"] == theirs["losses"] and mine["adapter"] == theirs["adapter"]
        assert (
            mine["cache"]["uncached"].keys() == {"ZERO3"} and not mine["cache"]["hits"] and not mine["cache"]["weights"]
        )
    assert on[0]["losses"] != on[1]["losses"]  # each process had tokens of its own
