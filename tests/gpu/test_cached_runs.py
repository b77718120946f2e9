"""Examples at real size (four layers of a Llama-3.1-8B), 200 steps with cached weights: the bits of the run without the patch."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from run_example import run_example, same_training

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
STEPS = 200
PROCESSES = min(2, torch.cuda.device_count())
RUNS = {
    "peft": ("qlora_peft.py", (), ()),
    "trl": ("qlora_trl.py", ("--rows", 1), ()),
    "unsloth": ("qlora_unsloth.py", ("--rows", 1), ()),
    "ddp": (
        "qlora_torchrun.py", ("--attention", "eager"),
        ("-m", "torch.distributed.run", "--nproc-per-node", PROCESSES, "--standalone"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_two_hundred_steps_to_the_bit(name, checkpoint, tmp_path):
    script, options, launcher = RUNS[name]
    arguments = (*options, "--model", checkpoint, "--steps", STEPS, "--tokens", 256)
    off = run_example(script, *arguments, folder=tmp_path, launcher=launcher, patch=False)
    for mode in ("block", "1200MiB", "6GiB"):  # 1200 MiB: three quarters of all weights
        on = run_example(script, *arguments, folder=tmp_path, launcher=launcher, NF4_PATCH_CACHE=mode)
        cache = on["nf4_patch"]["cache"]
        print(
            f"\n{name} {mode}: {cache}, {on['seconds_a_step'] * 1e3:.1f} ms a step, {off['seconds_a_step'] * 1e3:.1f} off"
        )
        assert same_training(on, off), mode
        compiled = name == "unsloth" and importlib.metadata.version("unsloth") >= "2026.10"  # whose layers decode
        assert compiled or cache["hits"] >= 0.3 * (cache["hits"] + cache["misses"]) > 0, mode
