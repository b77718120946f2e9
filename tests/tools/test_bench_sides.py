"""Steps of several sides: the contents of a row, the comparison of losses, optimizers, and sides that fail."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch

from benchmarks import models, sides
from benchmarks.kinds import STOCK, UNSLOTH
from benchmarks.sides import CACHE, FUSED, PACKED, Comparison, Running, Side

pytest.importorskip("peft")
pytestmark = pytest.mark.full
TINY = partial(models.config_of, models.Shape(64, 128, 2, 4, 2))


def test_sides_in_turns_across_processes():
    """The processes are real. A side that cannot be turned on is named."""
    options = {"peft": None, "patch": {}, "fused": FUSED}
    given = {name: Side(STOCK, each) for name, each in options.items()} | {"broken": Side(STOCK, {"cache": "much"})}
    report = sides.measure(Comparison("tiny", 2, given, [(1, 16), (1, 24)], TINY), rounds=2)
    assert [(row["side"], row["tokens"], row["layers"]) for row in report.rows] == [
        (side, tokens, 2) for tokens in (16, 24) for side in options
    ]
    fields = (
        "model layers side tokens gpu_ms gpu_spread wall_ms wall_spread launches calls peak_gib reserved_gib rounds"
    )
    assert all(" ".join(row) == fields and row["wall_ms"] > 0 and row["wall_spread"] >= 0 for row in report.rows)
    (failure,) = report.failures
    assert failure.startswith("broken") and "ConfigError" in failure and report.exit_code == 1
    losses = report.losses
    assert losses["peft"] == losses["patch"] and len(losses["peft"]) == sides.LEARNING
    assert losses["fused"] == pytest.approx(losses["peft"], rel=2**-7)
    assert losses["fused"][-1] < losses["fused"][0] - 0.1
    assert json.loads(json.dumps(report.as_dict()))["rows"] == report.rows
    assert any("fused: losses" in line for line in report.render())


def test_sides_without_graphs_and_sides_whose_process_ends():
    """A side with graphs whose layers run no graph is named, and so is a side whose process ends."""
    graphed = Comparison("tiny", 2, {"graphs": Side(STOCK, {"graphs": "auto"})}, [(1, 16)], TINY)
    assert sides.measure(graphed, rounds=1).failures == ["graphs, 1x16: no layer ran as a CUDA graph: NOT_CUDA"]
    ended = sides.measure(Comparison("tiny", 2, {"patch": Side(STOCK, {})}, [(1, 16)], partial(os._exit, 1)), rounds=1)
    assert ended.rows == [] and ended.failures == ["patch, free_memory: the process ended"]


def test_the_optimizer_is_the_one_of_the_side():
    for name, fused in (("adamw_torch", False), (sides.FUSED_ADAMW, True)):
        optimizer = Running(Side(STOCK, None, name), TINY).optimizer
        assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"] is fused


def test_how_many_times_as_fast_a_side_is_needs_equal_losses():
    """The speed-up is relative to the first side of the same size.

    Without equal losses or without kernels in the profile, there is none.
    """
    found = ("peft", 512, 8.0), ("patch", 512, 4.0), ("peft", 1024, 8.0), ("patch", 1024, 16.0), ("none", 1024, 0.0)
    rows = [{"side": side, "tokens": tokens, "gpu_ms": ms, "wall_ms": 0.0} for side, tokens, ms in found]
    heading, *lines = [*sides.Steps(None, rows, {}).render()][2].splitlines()
    assert [line[heading.index("gpu_x") :].strip() for line in lines] == ["1.000", "2.000", "1.000", "0.500", ""]
    assert "gpu_x" not in [*sides.Steps(None, rows, {}, ["losses differ"]).render()][2]


PATCH = Side(STOCK, {})


@pytest.mark.parametrize(
    ("compared", "losses", "wrong"),
    [
        ({"a": Side(STOCK, None), "b": PATCH}, (6.0, 6.0), 0),
        ({"a": Side(STOCK, None), "b": PATCH}, (6.0, 6.0001), 1),  # the patch leaves the bits as they are
        ({"a": Side(STOCK, None), "b": Side(STOCK, FUSED)}, (6.0, 6.0001), 0),
        ({"a": Side(STOCK, None), "b": Side(STOCK, FUSED)}, (6.0, 6.1), 1),
        ({"a": Side(STOCK, FUSED), "b": Side(STOCK, FUSED | CACHE)}, (6.0, 6.0001), 1),
        ({"a": Side(STOCK, PACKED), "b": Side(STOCK, PACKED | CACHE)}, (6.0, 6.0001), 0),
        ({"a": Side(UNSLOTH, None), "b": Side(UNSLOTH, {})}, (6.0, 6.0001), 0),
        ({"a": Side(UNSLOTH, None), "b": Side(UNSLOTH, {})}, (6.0, 6.1), 1),
        ({"a": Side(STOCK, None), "b": PATCH}, (6.0, float("nan")), 2),
    ],
)
def test_what_losses_must_agree_in(compared, losses, wrong):
    found = list(sides.differ(compared, dict(zip(compared, losses, strict=True)), (1, 512)))
    assert len(found) == wrong and all("b, 1x512: loss" in text for text in found)
