"""The benchmark of rollouts: sides, rows, a token that is not the most likely one, and the command for GRPO's steps."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from benchmarks import models, rollouts
from benchmarks.kinds import STOCK
from nf4_patch.patching.config import VARIABLES

pytest.importorskip("peft")
pytestmark = pytest.mark.full
TINY = partial(models.config_of, models.Shape(64, 128, 2, 4, 2))
MIXTURE = partial(
    GptOssConfig, hidden_size=64, intermediate_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=2, num_local_experts=8, vocab_size=512, sliding_window=20, initializer_range=0.1, pad_token_id=0,
    dtype="bfloat16",
)  # fmt: skip
LABELS = {"model": "llama", "layers": 2}
# Without a GPU, no graph replays: the sides differ in their options and in the kind of cache.
SIDES = {"bitsandbytes and peft": rollouts.Side(STOCK, None), "graphs": rollouts.SIDES["graphs"]}


def test_each_side_generates_and_a_broken_one_is_named():
    told: list[str] = []
    sides = SIDES | {"broken": rollouts.Side(STOCK, {"cache": "much"})}
    rows, failures = rollouts.generation(sides, TINY, LABELS, (2,), 6, tell=told.append)
    assert [(row["side"], row["batch"], row["layers"]) for row in rows] == [(name, 2, 2) for name in SIDES]
    assert all(row["tokens_s"] > 0 and row["rounds"] == rollouts.ROUNDS and row["replays"] == 0 for row in rows)
    assert [json.loads(text) for text in told if text.startswith("{")] == rows
    (failure,) = failures
    assert failure.startswith("broken, ('warm_up', 2, 6)") and "ConfigError" in failure


def test_graphs_alone_choose_the_tokens_of_stock():
    rows, failures = rollouts.generation(rollouts.OTHER_SIDES, TINY, LABELS, (2,), 6)
    assert {row["side"]: row.get("equal") for row in rows} == dict.fromkeys(rollouts.OTHER_SIDES) | {
        rollouts.EAGER: True, "graphs only": True,
    } and not failures  # fmt: skip


def test_a_side_that_takes_too_long_is_ended():
    rows, failures = rollouts.generation(SIDES, TINY, LABELS, (2,), 6, time.monotonic() + 0.1)
    assert rows == [] and all("not finished in time" in failure for failure in failures) and failures


@pytest.mark.parametrize("name", models.OTHERS)
def test_other_models_have_both_kinds_of_layers(name):
    config = models.other(name, 4)
    assert len(set(config.layer_types)) == 2 and config.layer_types[-1] == "full_attention"
    with torch.device("meta"):
        assert len(AutoModelForCausalLM.from_config(config).model.layers) == 4


def test_a_token_that_is_not_the_likeliest_is_a_failure(monkeypatch):
    side = rollouts.Generating(SIDES["bitsandbytes and peft"], TINY)
    tokens = side.generated(2, 6)
    assert side.warm_up(2, 6) == "" and torch.tensor(tokens).shape == (2, 6)
    tokens[1][3] = (tokens[1][3] + 1) % 500
    monkeypatch.setattr(side, "generated", lambda batch, length: tokens)
    assert "standard deviations below the largest" in side.warm_up(2, 6)


def test_a_mixture_may_miss_few_tokens_and_no_adapter(monkeypatch):
    """Rounding changes the experts of some tokens. A fault changes most tokens."""
    side = rollouts.Generating(rollouts.OTHER_SIDES[rollouts.EAGER], MIXTURE)
    generated = side.generated
    tokens = generated(2, 10)  # the prompt has 16 tokens, so the sliding window ends within the sequence
    assert side.mixture and side.warm_up(2, 10) == ""

    def changed(last):
        return [[*row[:-last], *((token + 1) % 500 for token in row[-last:])] for row in tokens]

    monkeypatch.setattr(side, "generated", lambda batch, length: changed(1))
    assert side.warm_up(2, 10) == ""
    monkeypatch.setattr(side, "mixture", False)
    assert side.warm_up(2, 10).startswith("a token's logit is")
    monkeypatch.setattr(side, "mixture", True)
    monkeypatch.setattr(side, "generated", lambda batch, length: changed(3))
    assert side.warm_up(2, 10).startswith("a fifth of the tokens' logits are at least")

    def without_adapter(batch, length):
        with side.model.disable_adapter():
            return generated(batch, length)

    monkeypatch.setattr(side, "generated", without_adapter)
    assert side.warm_up(2, 10).startswith("a fifth of the tokens' logits are at least")


def test_the_sides_of_grpo_have_known_variables_and_arguments():
    known = {variable.name for variable in VARIABLES}
    said = subprocess.run(
        [sys.executable, str(rollouts.GRPO), "--help"], capture_output=True, text=True, check=True
    ).stdout
    for side in rollouts.TRAININGS.values():
        assert side.variables.keys() <= known
        assert all(word in said for word in side.words if word.startswith("--"))
    assert Path(rollouts.GRPO).exists() and all(
        f"--{word}" in said for word in ("steps", "prompts", "generations", "tokens")
    )


@pytest.mark.parametrize(("last", "failed"), [(3.5, 0), (5.0, 1)])
def test_grpo_shows_whether_the_host_changed_its_speed(last, failed, monkeypatch):
    times = iter([4.0, 3.0, 2.0, 1.0, last])
    monkeypatch.setattr(rollouts, "steps_of", lambda side, folder, seconds: {"step_s": next(times)})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "offline", SimpleNamespace(checkpoint=lambda *words: None))
    rows, failures = rollouts.grpo()
    assert [row["step_s"] for row in rows] == [min(4.0, last), 3.0, 2.0, 1.0] and len(failures) == failed
