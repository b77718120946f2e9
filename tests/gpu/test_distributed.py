"""DDP and FSDP2 with bf16 storage, with one process on each of two GPUs.

Results are bit-identical, and no shard of a weight is decoded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from run_example import EXAMPLES, TORCHRUN, fallbacks, on_and_off, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LINEARS, PASSES, STEPS = 4 * 7, 3, 120


def test_a_shard_is_refused_by_name(tmp_path):
    program = Path(__file__).parents[1] / "programs" / "sharded.py"
    output = run([sys.executable, *TORCHRUN, str(program)], tmp_path, NF4_PATCH_STRICT="1")
    assert output.count("REFUSED BY NAME") == 2


def test_gradients_of_sharded_experts_are_the_mean_of_what_each_computes_alone(tmp_path):
    """Run over NCCL. The printed rows say how much of the error comes from different choices of the router."""
    program = Path(__file__).parents[1] / "programs" / "experts_sharded.py"
    output = run([sys.executable, *TORCHRUN, str(program)], tmp_path)
    print(output)
    assert output.count("the mean, 2 stacks, fell back: []") == 2


def launch(config: str) -> tuple[str | Path, ...]:
    return ("-m", "accelerate.commands.launch", "--config_file", EXAMPLES / config, "--main_process_port", "0")


# Next to NCCL sdpa's backward (cuDNN's) does not repeat itself: of 16 trainings over DDP without the patch 1 ended with other
# losses than the rest, over FSDP2 4 of 16, of 8 and 24 with eager attention none (two H200).
@pytest.mark.parametrize(
    ("launcher", "mode"),
    [(TORCHRUN, ("--fsdp",)), (TORCHRUN, ()), (launch("fsdp1.yaml"), ()), (launch("fsdp2.yaml"), ())],
    ids=["fsdp2", "ddp", "fsdp1 by accelerate", "fsdp2 by accelerate"],
)
def test_two_gpus(launcher, mode, checkpoint, tmp_path):
    arguments = ("--model", checkpoint, "--steps", STEPS, "--tokens", 512, "--attention", "eager", "--same-bits", *mode)
    on, off = on_and_off("qlora_torchrun.py", *arguments, folder=tmp_path, launcher=launcher)
    assert on["hits_by_process"] == [STEPS * LINEARS * PASSES] * 2 and off["hits_by_process"] == [0, 0]
    assert not fallbacks(on)
    assert bool(on["sharded_bytes"]) == ((launcher, mode) != (TORCHRUN, ()))
