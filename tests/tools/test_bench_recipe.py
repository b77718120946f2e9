"""The recipe: its sides, what a row has, optimizers, and sides that fail."""

from __future__ import annotations

import itertools
import os
from functools import partial

import pytest
import torch
from verbs import run_with_gpu

from benchmarks import models, recipe
from benchmarks.recipe import Recipe, Side
from benchmarks.step import STOCK

pytest.importorskip("peft")
TINY = partial(models.config_of, models.Shape(64, 128, 2, 4, 2))


def test_each_side_adds_one_switch():
    """Each side has all switches before it; the optimizer is the last."""
    sides, names = recipe.dense(4).sides, ["patch", "liger", "fused", "graphs", "cache"]
    options = [sides[name].options for name in names]
    assert all(before.items() <= after.items() for before, after in itertools.pairwise(options))
    assert [*options[-1]] == ["lora", "graphs", "cache"] and sides["peft"].options is None
    assert [sides[name].kind for name in ["peft", *names]] == ["peft", "peft", *["liger"] * 4]
    assert [sides[name].optimizer for name in ("cache", "paged optimizer")] == ["adamw_torch_fused", "paged_adamw_8bit"]
    assert {side.checkpointing for name, side in sides.items() if "offloading" in name} == {"unsloth"}
    mixture = recipe.mixture().sides
    assert [*mixture] == [
        "16-bit experts", *[name for name in sides if name not in ("peft", "unsloth, graphs", "unsloth, block graphs")]
    ]  # fmt: skip
    options = [side.options for side in mixture.values() if side.options is not None and side.kind != "unsloth"]
    assert all(each["experts"] == "4bit" for each in options)  # Unsloth packs experts itself


@pytest.mark.full
def test_each_side_has_a_process_with_its_optimizer():
    """The processes are real. Named are a side that cannot be switched on, one that runs no graph, and one whose process ends."""
    sides = {
        "patch": Side(STOCK, {}, "adamw_torch"), "fused optimizer": Side(STOCK, {}),
        "broken": Side(STOCK, {"cache": "much"}), "graphs": Side(STOCK, {"graphs": "auto"}),
    }  # fmt: skip
    report = recipe.measure(Recipe("tiny", 2, sides, [(1, 16), (1, 24)], TINY), rounds=2)
    assert [(row["side"], row["tokens"], row["layers"]) for row in report.rows] == [
        (side, tokens, 2) for tokens in (16, 24) for side in ("patch", "fused optimizer", "graphs")
    ]  # fmt: skip
    assert all(row["wall_ms"] > 0 and row["wall_spread"] >= 0 for row in report.rows)
    failure, *eager = report.failures
    assert failure.startswith("broken") and "ConfigError" in failure and report.exit_code == 1
    assert eager == [f"graphs, 1x{tokens}: no layer ran as a CUDA graph: NOT_CUDA" for tokens in (16, 24)]
    ours, fused = report.losses["patch"], report.losses["fused optimizer"]
    assert len(ours) == recipe.LEARNING and ours[-1] < ours[0] - 0.1 and fused == pytest.approx(ours, rel=2**-7)
    ended = recipe.measure(Recipe("tiny", 2, {"patch": Side(STOCK, {})}, [(1, 16)], partial(os._exit, 1)), rounds=1)
    assert ended.rows == [] and ended.failures == ["patch, learn: the process ended"]


def test_the_optimizer_is_the_one_of_the_side():
    for name, fused in (("adamw_torch", False), (recipe.FUSED_ADAMW, True)):
        optimizer = recipe.Running(Side(STOCK, None, name), TINY).optimizer
        assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"] is fused


@pytest.mark.parametrize(
    ("words", "what"),
    [((), ("Llama-3.1-8B", 4)), (("--layers", "16"), ("Llama-3.1-8B", 16)), (("--mixture",), ("Qwen3-30B-A3B", 2))],
    ids=str,
)
def test_the_command_measures_what_is_named(words, what, monkeypatch):
    """And nothing without a GPU."""
    asked = []
    monkeypatch.setattr(recipe, "measure", lambda recipe, tell, seconds: asked.append((recipe.model, recipe.layers)))
    run_with_gpu(recipe, words, monkeypatch)
    assert asked == [what]
