"""DeepSpeed ZeRO-3 in two processes shards the bytes and gathers them for each use. The kernel decodes them, with the same bits.

Other tests run LoRA in two processes in every way, on packed experts and on linear layers in one function.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from run_example import GLOO, run

from nf4_patch.patching.reasons import Reason

OWN = Path(sys.prefix) / "deepspeed-0.19.8"  # where scripts/test puts it
NO_DEEPSPEED = not OWN.is_dir() and importlib.util.find_spec("deepspeed") is None
NEEDS = pytest.mark.skipif(NO_DEEPSPEED, reason="deepspeed is not installed")
pytestmark = pytest.mark.full
STEPS = 3


def launched(folder: Path, name: str, *words: object, **variables: str) -> str:
    """Return the output of tests/programs/NAME.py in two processes."""
    path = os.pathsep.join(filter(None, [str(OWN), os.environ.get("PYTHONPATH")]))
    program = Path(__file__).parents[1] / "programs" / f"{name}.py"
    command = [sys.executable, *GLOO, program, *words]
    return run(command, folder, OMP_NUM_THREADS="1", PYTHONPATH=path, **variables)


@pytest.mark.skipif(torch.cuda.is_available(), reason="over gloo, on the CPU")
@pytest.mark.parametrize("way", ["ddp", "fsdp2", *(pytest.param(way, marks=NEEDS) for way in ("zero3", "loaded"))])
def test_gradients_of_experts_are_the_mean_of_what_each_computes_alone(way, tmp_path):
    assert launched(tmp_path, "experts_distributed", way).count("the mean, 2 stacks, 0 fell back") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu/test_distributed.py runs it over NCCL")
def test_experts_in_bf16_storage_sharded_and_checkpointed(tmp_path):
    assert launched(tmp_path, "experts_sharded").count("the mean, 2 stacks, fell back: []") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu/test_offload_gpu.py runs it over NCCL")
@pytest.mark.parametrize("words", [(), ("auto",)], ids=["experts", "dense, auto"])
def test_weights_in_host_memory_under_ddp(words, tmp_path):
    assert launched(tmp_path, "offload_distributed", *words).count("the steps of the resident model") == 2


LORA = {way: "hit, fell back: [], equal: False" for way in ("ddp", "fsdp1", "fsdp2")}
# hooks of ZeRO-3, or FSDP1's own around each factor, gather them
LORA |= dict.fromkeys(("wrapped", "zero3"), f"not hit, fell back: {[Reason.LORA_HOOKED.name]}, equal: True")


@pytest.mark.skipif(torch.cuda.is_available(), reason="over gloo, on the CPU")
@pytest.mark.parametrize("way", [pytest.param(way, marks=NEEDS if way == "zero3" else ()) for way in LORA])
def test_lora_in_one_function_trains_as_peft_or_is_refused_by_name(way, tmp_path):
    assert launched(tmp_path, "lora_distributed", way).count(LORA[way]) == 2


def processes(patch: str, checkpoint: str, folder: Path) -> list[dict]:
    folder = folder / patch
    folder.mkdir()
    launched(folder, "zero3_steps", patch, checkpoint, STEPS, folder, TRITON_INTERPRET="0")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@NEEDS
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
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
