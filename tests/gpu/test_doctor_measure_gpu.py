"""``nf4-patch doctor --measure`` on a GPU: its configurations run, their losses agree, and nothing is left in memory."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from verbs import report_of

import nf4_patch
from nf4_patch.tools import measure
from nf4_patch.tools.measure import BEFORE, FAST, FULL

pytestmark = pytest.mark.gpu


def test_every_side_is_timed(tmp_path, monkeypatch):
    LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
    ).save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(measure, "LENGTHS", (256, 512))
    monkeypatch.setattr(measure, "ROUNDS", 2)
    replays = nf4_patch.status().graphs.replays
    found = report_of(tmp_path, "doctor", "--measure", tmp_path / "tiny", "--layers", 2)
    assert found["failures"] == [] and found["exit_code"] == 0
    assert [(row["tokens"], row["side"]) for row in found["rows"]] == [
        (n, side) for n in (256, 512) for side in (BEFORE, FULL, FAST)
    ]
    assert all(row["gpu_ms"] > 0 and 0 < row["gpu_busy"] <= 1 and row["rounds"] == 2 for row in found["rows"])
    assert torch.cuda.get_device_name() in found["output"]
    assert not nf4_patch.is_enabled()
    if torch.cuda.get_device_capability() >= (8, 0):
        assert nf4_patch.status().graphs.replays > replays
