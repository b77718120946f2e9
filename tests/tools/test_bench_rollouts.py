"""The rollouts: sides, rows, a token that is not the likeliest, and the command of GRPO's steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import models, rollouts
from benchmarks.kinds import STOCK
from nf4_patch.patching.config import VARIABLES

pytest.importorskip("peft")
pytestmark = pytest.mark.full
TINY = models.Shape(64, 128, 2, 4, 2)
# Without a GPU, no graph replays: the sides differ in their options and in the kind of cache.
SIDES = {"bitsandbytes and peft": rollouts.Side(STOCK, None), "graphs": rollouts.SIDES["graphs"]}


def test_each_side_generates_and_a_broken_one_is_named(monkeypatch):
    monkeypatch.setattr(rollouts, "SIDES", SIDES | {"broken": rollouts.Side(STOCK, {"cache": "much"})})
    rows, failures = rollouts.generation(TINY, (2,), 6)
    assert [(row["side"], row["batch"], row["layers"]) for row in rows] == [(name, 2, 2) for name in SIDES]
    assert all(row["tokens_s"] > 0 for row in rows)
    (failure,) = failures
    assert failure.startswith("broken, ('warm_up', 2, 6)") and "ConfigError" in failure


def test_a_token_that_is_not_the_likeliest_is_a_failure(monkeypatch):
    side = rollouts.Generating(SIDES["bitsandbytes and peft"], TINY)
    tokens = side.generated(2, 6)
    assert side.warm_up(2, 6) == "" and torch.tensor(tokens).shape == (2, 6)
    tokens[1][3] = (tokens[1][3] + 1) % 500
    monkeypatch.setattr(side, "generated", lambda batch, length: tokens)
    assert "standard deviations below the largest" in side.warm_up(2, 6)


def test_the_sides_of_grpo_have_known_variables_and_arguments():
    known = {variable.name for variable in VARIABLES}
    said = subprocess.run(
        [sys.executable, str(rollouts.GRPO), "--help"], capture_output=True, text=True, check=True
    ).stdout
    for variables, words in rollouts.TRAININGS.values():
        assert variables.keys() <= known
        assert all(word in said for word in words if word.startswith("--"))
    assert Path(rollouts.GRPO).exists() and all(
        f"--{word}" in said for word in ("steps", "prompts", "generations", "tokens")
    )
