"""The steps of TRL's precision: what a row has, what the losses must agree in, and a side that fails."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch
from verbs import run_with_gpu

from benchmarks import models, step
from benchmarks.step import FP32, PACKED, STOCK, Side

pytest.importorskip("peft")
TINY = partial(models.config_of, models.Shape(64, 128, 2, 4, 2))


@pytest.mark.parametrize("other", [(), pytest.param((FP32,), marks=pytest.mark.full)], ids=["one", "two"])
def test_sides_in_turns_across_processes(other):
    """The processes are real: peft's, and another of fp32 adapters. A side that cannot be switched on is named."""
    sides = step.sides_of(STOCK, {"": None, "patch": {}, "fused": step.FUSED})
    for kind in other:
        sides |= step.sides_of(kind, {"": None})
    sides["broken"] = Side(STOCK, {"cache": "much"})
    rows, losses, failures = step.compare(step.Comparison(sides, [(1, 16)], TINY, walls=2), profiled=1)
    assert [row["side"] for row in rows] == ["peft", "peft, patch", "peft, fused", *other]
    assert all("broken" in failure and "ConfigError" in failure for failure in failures) and failures
    fields = "side tokens gpu_ms gpu_spread wall_ms wall_spread launches peak_gib reserved_gib calls"
    assert all(" ".join(row) == fields and row["tokens"] == 16 and row["wall_ms"] > 0 for row in rows)
    assert losses["peft"] == losses["peft, patch"] and len(losses["peft"]) == step.TRAINED
    for name in ("peft, fused", *other):
        assert losses[name] == pytest.approx(losses["peft"], rel=2**-7) and losses[name][-1] < losses[name][0] - 0.3
    report = step.Steps(None, rows, losses, failures)
    assert json.loads(json.dumps(report.as_dict()))["rows"] == rows and report.exit_code == 1
    assert any("peft, fused: losses" in line for line in report.render())


def test_how_many_times_as_fast_a_side_is_needs_equal_losses():
    """As the first side of the same size; nothing where the profiler saw no kernel."""
    found = ("peft", 512, 8.0), ("patch", 512, 4.0), ("peft", 1024, 8.0), ("patch", 1024, 16.0), ("fp32", 1024, 0.0)
    rows = [{"side": side, "tokens": tokens, "gpu_ms": ms, "wall_ms": 0.0} for side, tokens, ms in found]
    heading, *lines = [*step.Steps(None, rows, {}).render()][2].splitlines()
    assert [line[heading.index("gpu_x") :].strip() for line in lines] == ["1.000", "2.000", "1.000", "0.500", ""]
    assert "gpu_x" not in [*step.Steps(None, rows, {}, ["losses differ"]).render()][2]


@pytest.mark.parametrize(
    ("words", "what"), [((), "peft"), *(((f"--{name}",), name) for name in step.COMPARISONS)], ids=str
)
def test_the_command_measures_what_is_named(words, what, monkeypatch):
    """And nothing without a GPU."""
    asked = []
    monkeypatch.setattr(step, "measure", lambda what, tell: asked.append(what))
    run_with_gpu(step, words, monkeypatch)
    assert asked == [what]


@pytest.mark.full
def test_a_process_that_ends_is_told():
    worker = step.Worker(STOCK, {}, partial(os._exit, 1))
    assert worker.ask() == worker.ask("wall", "peft", (1, 16)) == (None, "the process ended")
    worker.close()


@pytest.mark.full
def test_a_process_that_would_go_on_is_ended():
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()"
    worker = step.Worker(STOCK, {}, partial(exec, thread))
    assert worker.ask()[1]  # that is no configuration
    (process,) = worker.pool._processes.values()
    worker.close()
    process.join(30)
    assert not process.is_alive()


@pytest.mark.full
def test_compiled_layers_learn_the_same():
    """Each is compiled, by a graph that the layers share; its loss is that of peft to the precision of bf16."""
    losses = {}
    torch._dynamo.utils.counters.clear()
    for kind in (STOCK, step.COMPILED):
        name = kind if kind == STOCK else f"{kind}, patch"
        sides = step.Sides(kind, {name: step.COMPARISONS["compiled"].sides[name]}, TINY)
        losses[kind], *_ = sides.observe(name, (1, 16))
    assert losses[step.COMPILED] == pytest.approx(losses[STOCK], rel=2**-7)
    layers = sides.model.get_base_model().model.layers
    assert len(layers) == 2 and all(layer._compiled_call_impl is not None for layer in layers)
    found = torch._dynamo.utils.counters
    assert found["stats"]["unique_graphs"] == 1 and not found["graph_break"]


def test_adapters_are_those_of_trl_or_fp32_with_the_same_numbers():
    found = {}
    for kind in (STOCK, FP32):
        model = step.model_of(kind, TINY())
        step.optimizer_of(model)
        found[kind] = [parameter.detach() for parameter in step.trained(model)]
    assert len(found[STOCK]) == 2 * 7 * 2
    for half, full in zip(found[STOCK], found[FP32], strict=True):
        assert full.dtype is torch.float32 and torch.equal(half, full.to(models.training_dtype()))


PATCH = Side(STOCK, {})


@pytest.mark.parametrize(
    ("sides", "losses", "wrong"),
    [
        ({"a": Side(STOCK, None), "b": PATCH}, (6.0, 6.0), 0),
        ({"a": Side(STOCK, None), "b": PATCH}, (6.0, 6.0001), 1),  # the patch leaves the bits as they are
        ({"a": Side(STOCK, None), "b": Side(STOCK, step.FUSED)}, (6.0, 6.0001), 0),
        ({"a": Side(STOCK, None), "b": Side(STOCK, step.FUSED)}, (6.0, 6.1), 1),
        ({"a": Side(STOCK, None), "b": Side(FP32, None)}, (6.0, 6.01), 0),
        ({"a": Side(STOCK, step.FUSED), "b": Side(STOCK, step.FUSED | step.CACHE)}, (6.0, 6.0001), 1),
        ({"a": Side(STOCK, PACKED), "b": Side(STOCK, PACKED | step.CACHE)}, (6.0, 6.0001), 0),
        ({"a": Side(STOCK, None), "b": PATCH}, (6.0, float("nan")), 2),
    ],
)
def test_what_losses_must_agree_in(sides, losses, wrong):
    found = list(step.differ(sides, dict(zip(sides, losses, strict=True)), (1, 512)))
    assert len(found) == wrong and all("b, 1x512: loss" in text for text in found)
