"""On a GPU: Unsloth's compiled layers on pinned weights, and the cache that finds its own size."""

from __future__ import annotations

import importlib.util

import pytest
from subprocess_python import program

pytestmark = pytest.mark.gpu
unsloth = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="unsloth is not installed")


@unsloth
@pytest.mark.parametrize(("checkpointing", "steps"), [("0", 36), ("1", 100), ("unsloth", 36)])
def test_a_training_of_compiled_layers_to_the_bit(checkpointing, steps):
    assert program("pinned_training", checkpointing, steps).stdout.split()[-1] == "equal"


@pytest.mark.parametrize("first", [0, pytest.param(10, marks=pytest.mark.slow)])
def test_what_fits_without_auto_fits_with_it(first):
    assert program("auto_cache", first, 50 if first else 10).stdout.split()[-1] == "auto"
