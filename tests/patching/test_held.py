"""Weights held for Unsloth's compiled layers. Without a GPU the kernel is under the interpreter, in the graph as well."""

from __future__ import annotations

import pytest
from unsloth_releases import with_unsloth

WAYS = ["none", *(pytest.param(way, marks=pytest.mark.full) for way in ("reentrant", "non-reentrant"))]


@pytest.mark.parametrize("checkpointing", WAYS)
def test_every_change_of_a_weight_is_noticed(checkpointing, tmp_path):
    assert with_unsloth("2026.10.9", tmp_path, "held_unsloth", checkpointing).split()[-1] == "held"
