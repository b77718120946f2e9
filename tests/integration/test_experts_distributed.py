"""LoRA on packed experts in two processes: their gradients are the mean of what each computes alone."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from run_example import GLOO, run

OWN = Path(sys.prefix) / "deepspeed-0.19.8"  # where scripts/test puts it
NEEDS = pytest.mark.skipif(not OWN.is_dir() and importlib.util.find_spec("deepspeed") is None, reason="no deepspeed")
WAYS = ["ddp", "fsdp2", pytest.param("zero3", marks=NEEDS)]
pytestmark = pytest.mark.full


@pytest.mark.skipif(torch.cuda.is_available(), reason="over gloo, on the CPU")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_mean(way, tmp_path):
    path = os.pathsep.join(filter(None, [str(OWN), os.environ.get("PYTHONPATH")]))
    program = Path(__file__).parents[1] / "programs" / "experts_distributed.py"
    assert (
        run([sys.executable, *GLOO, program, way], tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="1").count(
            "the mean, 2 stacks, 0 fell back"
        )
        == 2
    )
