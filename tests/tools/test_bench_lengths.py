"""Epochs of batches with varying lengths: the lengths, and the report."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from verbs import run_with_gpu

import nf4_patch
from benchmarks import lengths, sides
from benchmarks.kinds import STOCK
from benchmarks.models import Shape, config_of

pytestmark = pytest.mark.full
TINY = partial(config_of, Shape(64, 128, 2, 2, 1, 512, 4096), torch.bfloat16)


def test_paddings_round_the_same_lengths_up():
    bare = lengths.lengths_of(1)
    assert len(bare) == lengths.BATCHES and len({*bare}) > 64
    for padding in lengths.PADDINGS:
        padded = lengths.lengths_of(padding)
        assert all(
            0 <= more - length < padding and more % padding == 0 for more, length in zip(padded, bare, strict=True)
        )
    assert max(lengths.lengths_of(64)) <= 2048


class InThisProcess:
    """A side in this process. One process can have only one side's options, so both sides have those of the second side."""

    def __init__(self, make):
        self.running, self.process = make(), self

    def send(self, method, *arguments):
        self.answer = getattr(self.running, method)(*arguments), ""

    def receive(self):
        return self.answer

    def kill(self):
        pass


@pytest.fixture
def few(monkeypatch):
    """Use few batches of few tokens and a tiny model on the CPU, even on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(lengths, "SIDES", {"fused": sides.Side(STOCK, {}), "graphs": sides.Side(STOCK, sides.GRAPHS)})
    monkeypatch.setattr(lengths, "FLASH", {"flash": sides.Side(STOCK, sides.GRAPHS)})
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    monkeypatch.setattr(lengths, "Process", InThisProcess)
    monkeypatch.setattr(lengths, "partial", lambda function, *arguments: partial(function, *arguments[:1], TINY))
    monkeypatch.setattr(lengths, "machine", str)
    monkeypatch.setattr(lengths, "lengths_of", lambda padding: [8, 8, 16, 24])
    monkeypatch.setattr(lengths, "FIRST", (1, 8))
    monkeypatch.setattr(lengths, "BATCHES", 4)
    monkeypatch.setattr(lengths, "EPOCHS", 2)
    monkeypatch.setattr(lengths, "TURN", 2)
    yield
    nf4_patch.disable()


def test_a_row_per_padding_side_and_epoch(few):
    """On the CPU no layer runs as a CUDA graph, and the report says so."""
    report = lengths.measure()
    found = [(row["pad_to"], row["epoch"], row["side"], row["lengths"]) for row in report.rows]
    names = {1: ("fused", "graphs", "flash")}
    assert found == [(p, e, s, 3) for p in lengths.PADDINGS for e in (1, 2) for s in names.get(p, ("fused", "graphs"))]
    assert all(row["step_ms"] > 0 for row in report.rows)
    assert report.failures == [f"multiple of {p}: no layer ran as a CUDA graph" for p in lengths.PADDINGS]
    assert "step_ms" in "\n".join(report.render())


def test_no_padding_begins_too_late(few):
    assert {row["pad_to"] for row in lengths.measure(seconds=0).rows} == {64}


def test_different_losses_are_a_failure(few, monkeypatch):
    turn, found = lengths.Lengths.turn, []

    def other(self, batch):
        answer = turn(self, batch)
        found.append(answer["losses"])
        return answer | {"losses": [*answer["losses"][:-1], answer["losses"][-1] + 1e-6 * len(found)]}

    monkeypatch.setattr(lengths.Lengths, "turn", other)
    assert "multiple of 64, epoch 1: losses differ" in lengths.measure(seconds=0).failures


def test_the_command_measures(monkeypatch):
    """Without a GPU, the command measures nothing."""
    asked = []
    monkeypatch.setattr(lengths, "measure", lambda seconds, tell: asked.append(seconds))
    run_with_gpu(lengths, ("--seconds", "30"), monkeypatch)
    assert asked == [30]
