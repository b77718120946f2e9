"""scripts/memory.py: what is reckoned of a mixture's memory has the weights of the real model, and what was measured."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.core_model_loading", reason="transformers before 5")
pytest.importorskip("transformers.models.gemma4", reason="transformers before Gemma 4")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks import offload
from nf4_patch.patching.experts.offload import packed_size

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("memory")


@functools.cache
def empty(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(offload.config_of(offload.Setting(name)), dtype=torch.bfloat16)


NAMES = [name for name in offload.MODELS if name != "tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_model(name, memory):
    model, mixture = empty(name), memory.MIXTURES[name]
    is_packed = {key for key, value in offload.written(model, "cpu").items() if getattr(value, "kind", "") == "U8"}
    stacks = [p for key, p in model.named_parameters() if key in is_packed and p.dim() == 3]
    linear = sum(p.numel() for key, p in model.named_parameters() if key in is_packed and p.dim() == 2)
    others = sum(p.nbytes for key, p in model.named_parameters() if key not in is_packed)
    assert sum(p.numel() for p in stacks) == mixture.mixtures * mixture.unit
    assert mixture.frozen() == memory.PACKED * linear + others
    sizes = sum(packed_size(p.numel(), nested=True) for p in stacks)
    assert mixture.experts_in("off") == pytest.approx(sizes, rel=1e-4)
    assert mixture.experts_in("all") == pytest.approx(2 * sizes / mixture.mixtures, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_adapters_are_those_of_peft(name, memory):
    for where in (memory.OFF, memory.ON):
        with torch.device("meta"):
            config = offload.config_of(offload.Setting(name))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            setting = offload.Setting(name, attention_only=where == memory.OFF)
            lora = LoraConfig(**offload.lora_options(setting))
            model = get_peft_model(model, lora)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == memory.MIXTURES[name].adapters(
            16, where
        )


def test_the_largest_budget_fits_and_the_next_does_not(memory):
    tokens, gib = 2048, 2**30
    for mixture in memory.MIXTURES.values():
        for card in range(8, 96, 4):
            budget, room = mixture.largest(card * 1e9, tokens), card * 1e9 - memory.CONTEXT
            if budget is None:
                assert mixture.training(tokens, "all") > room
                continue
            assert mixture.training(tokens, budget) <= room
            if budget != "off":
                larger = max(budget + gib, 0) if budget != "all" else mixture.experts_in("all") + 2 * gib
                assert mixture.training(tokens, larger) > room or larger > mixture.experts_in("off")


def test_what_optimizers_keep(memory):
    """Weight, gradient and two moments; in bytes with a scale of four for 256."""
    mixture = memory.MIXTURES["Qwen3-30B-A3B"]
    weights = mixture.adapters(16, memory.ON)
    assert weights == 642_514_944
    assert mixture.learning(16, memory.ON, "AdamW", 4) == 16 * weights
    assert mixture.learning(16, memory.ON, "AdamW", 2) == 8 * weights
    assert mixture.learning(16, memory.ON, "8-bit AdamW", 2) == (6 + 1 / 32) * weights


def test_what_was_measured_is_what_is_reckoned(memory, monkeypatch):
    tables = importlib.import_module("tables")
    runs = [run for run in tables.offload_runs() if run["model"] in memory.MIXTURES]
    for run in runs:
        if run["offload"] == "off":
            setting = "off"
        else:
            setting = "all" if run["offload"] == "all" else float(run["offload"].removesuffix("GiB")) * 2**30
        reckoned = memory.MIXTURES[run["model"]].training(
            run["tokens"], setting, run["rank"], memory.OFF if run["attention_only"] else memory.ON,
            tables.OPTIMIZERS[run["optimizer"]],
        )  # fmt: skip
        assert reckoned == pytest.approx(run["peak"]["allocated"], rel=0.12), run
    if not runs:
        pytest.skip("not measured yet")
