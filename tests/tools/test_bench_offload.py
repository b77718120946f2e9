"""benchmarks/offload.py on a CPU, with a tiny mixture and CPU tensors that stand in for CUDA."""

from __future__ import annotations

import dataclasses
import gc
import json
import math

import pytest
import torch
from host_memory import Cuda
from tiny_experts import config_of

import nf4_patch
from benchmarks import offload as benchmark
from nf4_patch.moe import launch
from nf4_patch.offload import host_memory

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU; a GPU runs the benchmark"),
]
SETTING = benchmark.Setting("tiny", tokens=48, budget="96KiB", rank=8, optimizer="adamw", bits=3, steps=2)


@pytest.fixture
def gpu(monkeypatch):
    gc.collect()
    monkeypatch.setattr(host_memory, "cuda", Cuda())
    monkeypatch.setattr(launch, "supports", lambda tensor: False)  # in PyTorch: interpreted, the kernels take minutes
    yield host_memory.cuda
    nf4_patch.disable()
    gc.collect()


@pytest.fixture
def four_layers(monkeypatch):
    """With two layers, no layer would wait for another, because both fit into the buffers."""
    tiny = benchmark.MODELS["tiny"]

    def longer():
        config = tiny()
        config.num_hidden_layers = 4
        return config

    monkeypatch.setitem(benchmark.MODELS, "tiny", longer)


def test_the_sides_have_the_same_bits(gpu, four_layers, patched):
    runs = {}
    for side in benchmark.SIDES:
        runs[side] = benchmark.measured(SETTING, side, "cpu")
        assert runs[side]["failed"] == "" and runs[side]["side"] == side
        gc.collect()
    resident = runs["resident"]
    assert resident["in_host"] == resident["fetches"] == 0 and len(set(resident["losses"])) == 3
    for name in ("again", "budget", "all"):
        assert benchmark.first_difference(runs[name]["trace"], resident["trace"]) == "nowhere"
        assert all(runs[name][field] == resident[field] for field in ("losses", "gradients", "adapters"))
    # forward and back; the layers at the turns are still there
    unit = runs["all"]["in_host"] // 4
    assert 0 < runs["budget"]["in_host"] < runs["all"]["in_host"]
    assert 0 < runs["all"]["experts"] == resident["experts"] < runs["all"]["in_host"]  # linear layers are packed too
    assert runs["all"]["fetches"] in (4, 5, 6) and runs["all"]["fetched"] == runs["all"]["fetches"] * unit
    assert runs["all"]["late"] == 0
    assert "bit-identical to resident: losses, gradients, adapters" in benchmark.said(runs["all"], [resident])


def test_a_dense_model(gpu, patched):
    setting = dataclasses.replace(SETTING, model="tiny dense", budget="60KiB", bits=2)
    runs = [benchmark.measured(setting, side, "cpu") for side in ("resident", "budget", "all")]
    assert [run["failed"] for run in runs] == [""] * 3 and 0 == runs[0]["in_host"] < runs[1]["in_host"] < runs[2][
        "in_host"
    ]
    assert all(run[field] == runs[0][field] for run in runs for field in ("losses", "gradients", "adapters"))
    assert benchmark.lora_options(setting)["target_modules"] == list(benchmark.models.LINEARS)
    assert runs[2]["late"] == 0 < runs[2]["fetches"]


def test_sides_in_turns(gpu, four_layers, patched):
    resident, offloaded = benchmark.measured_in_turns(SETTING, ["resident", "all"], "cpu")
    assert (resident["side"], offloaded["side"]) == ("resident", "all") and resident["fetches"] == 0
    assert offloaded["fetches"] in (4, 5, 6) and offloaded["fetched"] and resident["in_turns"]
    assert len(resident["every_wall_ms"]) == len(offloaded["every_wall_ms"]) == SETTING.steps


def test_different_bits_are_said(gpu, patched):
    run = benchmark.measured(dataclasses.replace(SETTING, bits=1, steps=0), "resident", "cpu")
    other = run | {"side": "all", "cap": 7.5, "losses": [0.0]}
    assert "bit-identical to resident: gradients, adapters" in benchmark.said(other, [run])
    assert "the bits" not in benchmark.said(other | {"rank": 16}, [run])
    names, sums = run["trace"]["names"], run["trace"]["sums"]
    changed = [[*sums[0][:-1], sums[0][-1] + 1]]
    found = benchmark.first_difference(run["trace"], {"sums": changed})
    assert found == f"from step 1 onwards, 1 of {len(names)} gradients: {names[-1]}"
    weights = torch.arange(4, dtype=torch.bfloat16).view(2, 2)
    assert benchmark.digest([weights]) != benchmark.digest([weights.t()]) != benchmark.digest([weights.t() + 0.5])


def test_a_run_takes_the_place_of_the_same_one(tmp_path):
    file = tmp_path / "offload.json"
    run = {**dataclasses.asdict(SETTING), "side": "all", "failed": "loading"}
    assert benchmark.write(file, run | {"machine": {"gpu": "H"}}) == []
    assert benchmark.write(file, run | {"side": "resident"}) == [run]
    assert benchmark.write(file, run | {"failed": ""}) == [run | {"side": "resident"}]
    found = json.loads(file.read_text())
    assert [each["failed"] for each in found["rows"]] == ["loading", ""] and found["machine"] == {"gpu": "H"}
    benchmark.write(file, run | {"failed": "", "gpu_ms": 5.0, "load_s": 7.0})
    benchmark.write(file, run | {"failed": "", "gpu_ms": 4.0, "in_turns": True})
    last = json.loads(file.read_text())["rows"][-1]
    assert (last["gpu_ms"], last["load_s"]) == (4.0, 7.0)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "glm4", "gemma4"])
def test_every_architecture_is_loaded_whole(name, gpu, patched, monkeypatch):
    shared = {"n_shared_experts": 1, "first_k_dense_replace": 1} if name == "glm4" else {}
    monkeypatch.setitem(benchmark.MODELS, "tiny", lambda: config_of(name, num_hidden_layers=2, **shared))
    run = benchmark.measured(dataclasses.replace(SETTING, bits=1, steps=1), "all", "cpu")
    assert run["failed"] == "" and run["in_host"] and run["losses"][0] == pytest.approx(math.log(96), rel=0.1)
