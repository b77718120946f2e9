"""Kept activations in two processes over gloo. The program is tests/programs/activations_distributed.py."""

from __future__ import annotations

import pytest
import torch
from test_zero3 import launched

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="gpu/test_activations_gpu.py runs it over NCCL"),
]


def test_ddp_each_process_keeps_another_number_of_layers(tmp_path):
    said = launched(tmp_path, "activations_distributed", "ddp")
    assert "rank 0: equal, 2 of 4 kept, ['ACTIVATIONS_BUDGET']" in said
    assert "rank 1: equal, 4 of 4 kept, []" in said


@pytest.mark.parametrize("way", ["fsdp1", "fsdp2"])
def test_sharded_layers_recompute(way, tmp_path):
    assert launched(tmp_path, "activations_distributed", way).count("equal, 0 of 4 kept, ['ACTIVATIONS_LAYER']") == 2
