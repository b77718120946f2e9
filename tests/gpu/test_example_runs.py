"""Every example at real size on the GPU, with four layers of a Llama-3.1-8B: results are bit-identical to a run without the patch.

Every call is a hit or deferred. Graphs and graph breaks are those of a run without the patch. Cached weights change no
bit either.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from run_example import EXAMPLES, fallbacks, hits, on_and_off, run, run_example, same_training

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
LINEARS, PASSES = 4 * 7, 3  # forward, recompute, backward


WITH_LIGER = (Path(__file__).parents[1] / "programs" / "with_liger.py",)


@pytest.mark.parametrize(
    ("script", "options", "launcher"),
    [
        ("qlora_peft.py", ("--same-bits",), ()),
        ("qlora_trl.py", ("--rows", 1), ()),
        ("qlora_peft.py", ("--same-bits",), WITH_LIGER),
    ],
    ids=["peft", "trl", "liger"],
)
def test_training(script, options, launcher, checkpoint, tmp_path):
    """Train without Liger's kernels, and with these kernels around the same linear layers."""
    if launcher:
        pytest.importorskip("liger_kernel")
    arguments = ("--model", checkpoint, "--steps", 120, "--tokens", 512, *options)
    on, off = on_and_off(script, *arguments, folder=tmp_path, launcher=launcher)
    assert hits(on) == 120 * LINEARS * PASSES and not fallbacks(on)
    assert on["torch_compile"] == off["torch_compile"]


@pytest.mark.parametrize("script", ["qlora_peft.py", "qlora_trl.py"])
@pytest.mark.parametrize("launcher", [(), WITH_LIGER], ids=["alone", "liger"])
def test_lora_in_one_function(script, launcher, checkpoint, tmp_path):
    """Train with norms and adapters in fp32 under autocast, and as TRL trains.

    Losses equal peft's within the noise of bf16, and no call is refused.
    """
    if launcher:
        pytest.importorskip("liger_kernel")
    same = ["--same-bits"] * (script == "qlora_peft.py")
    arguments = ("--model", checkpoint, "--steps", 30, "--rows", 1, "--tokens", 512, *same)
    off = run_example(script, *arguments, folder=tmp_path, launcher=launcher, patch=False)
    on = run_example(script, *arguments, folder=tmp_path, launcher=launcher, NF4_PATCH_LORA="fused")
    (row,) = (row for row in on["nf4_patch"]["targets"] if row["name"] == "peft.tuners.lora.bnb.Linear4bit.forward")
    assert row["hits"] >= 30 * LINEARS * 2 and not row["fallbacks"]
    assert on["losses"][:8] == pytest.approx(off["losses"][:8], rel=2**-8)
    assert on["losses"][-1] == pytest.approx(off["losses"][-1], rel=0.05)


def test_recipe(checkpoint, tmp_path):
    """Turn on every switch of docs/recipes.md at once. Layers replay, the cache is read, and LoRA runs in one function."""
    pytest.importorskip("liger_kernel")
    arguments = ("--model", checkpoint, "--steps", 30, "--rows", 1, "--tokens", 512)
    off = run_example("qlora_trl.py", *arguments, folder=tmp_path, patch=False)
    on = run_example("qlora_trl.py", *arguments, "--recipe", folder=tmp_path)
    assert on["losses"][:8] == pytest.approx(off["losses"][:8], rel=2**-7)
    assert on["losses"][-1] == pytest.approx(off["losses"][-1], rel=0.05)
    status = on["nf4_patch"]
    assert status["graphs"]["replays"] > 0 and status["cache"]["hits"] > 0
    (row,) = (row for row in status["targets"] if row["name"] == "peft.tuners.lora.bnb.Linear4bit.forward")
    assert row["hits"] > 0 and not row["fallbacks"]


def test_demo(tmp_path):
    """Run the demo, which trains four times and times the steps."""
    output = run([sys.executable, EXAMPLES / "demo.py", "--steps", 4, "--png", "demo.png"], tmp_path)
    assert output.rstrip().endswith("Passed: the same losses and adapter, to the bit."), output
    assert sum(map(int, re.findall(r"(\d+) calls in the kernel, fallbacks: none", output))) == 4 * LINEARS * PASSES
    assert output.count(" ms per step, ") == 2


def test_peft_compiled(checkpoint, tmp_path):
    """Inductor's results are not reproducible: two runs without the patch differed by 1e-3 after 8 steps (H200, torch 2.11)."""
    arguments = ("--model", checkpoint, "--steps", 40, "--tokens", 512, "--compile", "--same-bits")
    on, off = (run_example("qlora_peft.py", *arguments, folder=tmp_path, patch=patch) for patch in (True, False))
    assert on["losses"][:8] == pytest.approx(off["losses"][:8], rel=2**-8)
    assert hits(on) > 0 and not fallbacks(on)
    assert on["torch_compile"] == off["torch_compile"]


def test_unsloth(checkpoint, tmp_path):
    """The compiled layers of Unsloth >= 2026.10 run Unsloth's own kernel, so their calls are deferred."""
    arguments = ("--model", checkpoint, "--steps", 120, "--rows", 1, "--tokens", 512, "--same-bits")
    on, off = on_and_off("qlora_unsloth.py", *arguments, folder=tmp_path)
    assert hits(on) > 0 and set(fallbacks(on)) <= {"DEFERRED"}
    assert on["torch_compile"] == off["torch_compile"]


def test_unsloth_with_eager_layers_hits_every_dequantization(checkpoint, tmp_path):
    """Unsloth >= 2026.10 compiles each layer and runs its own kernel there. Eager layers show every call."""
    arguments = ("--model", checkpoint, "--steps", 20, "--rows", 1, "--tokens", 512, "--same-bits")
    on, _ = on_and_off("qlora_unsloth.py", *arguments, folder=tmp_path, TORCHDYNAMO_DISABLE="1")
    assert hits(on) >= 20 * LINEARS * PASSES and not fallbacks(on)  # 2026.10.9 makes more calls than 21 a layer


def test_unsloths_layers_as_graphs(checkpoint, tmp_path):
    """Inputs have 4 MiB, so Unsloth moves them to host memory.

    The backward of flash attention is deterministic for short sequences.
    """
    arguments = ("--model", checkpoint, "--steps", 20, "--rows", 4, "--tokens", 128, "--same-bits")
    off = run_example("qlora_unsloth.py", *arguments, folder=tmp_path, patch=False)
    on = run_example("qlora_unsloth.py", *arguments, folder=tmp_path, NF4_PATCH_GRAPHS="auto")
    assert on["losses"] == off["losses"]
    assert on["nf4_patch"]["graphs"]["replays"] >= 4 * 15 and "GRAPH_BACKWARD" not in fallbacks(on)


def test_generate(checkpoint, tmp_path):
    record = run_example("generate.py", "--model", checkpoint, folder=tmp_path)
    print(record["generation"])
    assert all(row["equal"] for row in record["generation"] if row["repeats"])
    assert hits(record) > 0 and not fallbacks(record)


def test_grpo(checkpoint, tmp_path):
    """Rollouts of 16 rows run in the fused matmul, which changes bits but not the number of tokens.

    Training passes have 1,536 rows.
    """
    arguments = ("grpo_trl.py", "--model", checkpoint, "--steps", 4, "--same-bits")
    on, off = (
        run_example(*arguments, folder=tmp_path, patch=patch, NF4_PATCH_MATMUL="auto") for patch in (True, False)
    )
    print(on["rollouts"], off["rollouts"])
    assert on["rollouts"]["tokens"] == off["rollouts"]["tokens"] == 4 * 16 * 64
    fused = sum(each["hits"] for each in on["nf4_patch"]["shapes"] if each["kernel"])
    assert fused >= 4 * 63 * LINEARS  # every token after the prompt
    assert set(fallbacks(on)) <= {"NOT_FASTER", "MATMUL_OPERANDS"}


@pytest.mark.parametrize(
    "options", [(), ("--adamw-8bit", "--rank", 8, "--checkpointing", "--liger-loss"), ("--attention-only",)], ids=str
)
def test_mixture(options, tmp_path):
    """A small mixture with random weights learns in every mode, and reports its memory."""
    on = run_example("qlora_moe.py", "--steps", 20, *options, folder=tmp_path)
    print(on["bytes"], fallbacks(on))
    assert hits(on) > 0 and on["losses"][-1] < on["losses"][0]


def test_merge(checkpoint, tmp_path):
    record = run_example("merge_adapter.py", "--model", checkpoint, "--out", "merged", folder=tmp_path)
    assert hits(record) >= LINEARS and not fallbacks(record)


PROCESSES = min(2, torch.cuda.device_count())
CACHED = {
    "peft": ("qlora_peft.py", ("--same-bits",), ()),
    "trl": ("qlora_trl.py", ("--rows", 1), ()),
    "unsloth": ("qlora_unsloth.py", ("--rows", 1, "--same-bits"), ()),
    "ddp": (
        "qlora_torchrun.py",
        ("--attention", "eager", "--same-bits"),
        ("-m", "torch.distributed.run", "--nproc-per-node", PROCESSES, "--standalone"),
    ),
}


@pytest.mark.parametrize("name", CACHED)
def test_two_hundred_steps_with_cached_weights(name, checkpoint, tmp_path):
    script, options, launcher = CACHED[name]
    arguments = (*options, "--model", checkpoint, "--steps", 200, "--tokens", 256)
    off = run_example(script, *arguments, folder=tmp_path, launcher=launcher, patch=False)
    for mode in ("1200MiB", "6GiB"):  # 1200 MiB: three quarters of all weights
        on = run_example(script, *arguments, folder=tmp_path, launcher=launcher, NF4_PATCH_CACHE=mode)
        cache = on["nf4_patch"]["cache"]
        assert same_training(on, off), mode
        compiled = name == "unsloth" and importlib.metadata.version("unsloth") >= "2026.10"  # whose layers decode
        assert compiled or cache["hits"] >= 0.3 * (cache["hits"] + cache["misses"]) > 0, mode


def test_the_notebook_from_the_first_cell_to_the_last(tmp_path, monkeypatch):
    """Run the cells of t4_colab.ipynb, which are plain Python, in one namespace. The first cell finds everything installed."""
    monkeypatch.setenv("NF4_NOTEBOOK_RESULTS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "t4_colab.ipynb").read_text())["cells"]
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    report = (tmp_path / "report.txt").read_text()
    assert namespace["problems"] == []
    assert "none differs" in report and "losses and adapter with peft: the same bits" in report
    assert "losses with Unsloth: the same bits" in report
    assert "differ from" not in report and "bits differ" not in report
    assert (tmp_path / "t4.png").stat().st_size > 10_000
    assert namespace["on"]["losses"] == namespace["off"]["losses"] and len(namespace["on"]["losses"]) == 10
