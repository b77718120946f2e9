"""What a report says the hits saved: measured where they were made, or nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from nf4_patch.patching.status import CacheStatus, Status, TargetStatus
from nf4_patch.tools import savings

DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"
LINEAR = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"


def status(shapes: dict[str, int], *targets: str) -> Status:
    hits = sum(shapes.values())
    return Status(True, tuple(TargetStatus(name, "patched", hits) for name in targets or (DEQUANTIZE,)), shapes, ())


def test_the_shapes_hit_most():
    hit = {"64x64 bfloat16": 5, "64x128 bfloat16": 0, "128x64 float16": 7, "8x64 float32": 1, "16x64 float16": 6}
    assert savings.most_hit(status(hit)) == [("128x64 float16", 7), ("16x64 float16", 6), ("64x64 bfloat16", 5)]
    assert savings.most_hit(status({"64x64 bfloat16": 0})) == []


def test_a_fused_matmul_is_more_than_a_dequantization():
    hit = {"64x64 bfloat16": 5}
    assert savings.most_hit(status(hit, LINEAR)) == [("64x64 bfloat16", 5)]
    fused = {"64x64 bfloat16 fused matmul": 1}  # of a target of its own, or of one that dequantizes as well
    assert savings.most_hit(status(hit | fused, DEQUANTIZE, "bitsandbytes.functional.gemv_4bit")) == []
    assert savings.most_hit(status(hit | fused, LINEAR)) == []
    assert savings.most_hit(status(hit | {"64x64 bfloat16 fused matmul": 0}, LINEAR)) == [("64x64 bfloat16", 5)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine with no GPU")
def test_nothing_is_said_without_a_gpu(capfd):
    assert savings.measure(status({"64x64 bfloat16": 5})) == []
    assert capfd.readouterr() == ("", "")


def test_an_error_after_the_work_says_nothing(patched, monkeypatch):
    def fails(shape, original):
        raise torch.OutOfMemoryError("planted")

    import bitsandbytes  # noqa: F401  # installs the target

    monkeypatch.setattr(savings, "compare", fails)
    assert savings.measure(status({"64x64 bfloat16": 5})) == []
    monkeypatch.setattr(savings, "compare", lambda shape, original: (10.0, 30.0))
    (saving,) = savings.measure(status({"64x64 bfloat16": 50_000}, LINEAR))
    assert "10.0 us, the original 30.0 us" in str(saving) and "50,000 hits 1 s" in str(saving)


@pytest.mark.gpu
def test_on_a_gpu(patched):
    import bitsandbytes  # noqa: F401  # installs the target

    shapes = {"4096x4096 bfloat16": 100, "28672x8192 bfloat16": 10, "512x2048 float16": 1000}
    torch.cuda.init()
    savings.measure(status({"64x64 bfloat16": 1}))  # compiles
    started = time.perf_counter()
    found = savings.measure(status(shapes))
    assert time.perf_counter() - started < 1
    assert {saving.shape for saving in found} == set(shapes)
    assert all(0 < saving.ours < saving.original for saving in found)


@pytest.mark.gpu
def test_a_weight_that_does_not_fit_says_nothing(patched):
    assert savings.compare("1000000x1000000 bfloat16", lambda packed, state: None) is None


def test_which_budget_would_have_saved_what():
    shapes = {"4096x4096 bfloat16": 3000, "14336x4096 bfloat16": 3000, "64x64 bfloat16 fused matmul": 7}
    weights = {"4096x4096 bfloat16": 10, "14336x4096 bfloat16": 10}
    (line,) = savings.of_the_cache(replace(status(shapes), weights=weights))
    assert line.startswith("cache: 20 weights would take 1.43 GiB dequantized")
    assert "100% of the dequantizations" in line and 'cache="0.71GiB" at least 50%' in line
    assert savings.of_the_cache(replace(status({"64x64 bfloat16": 5}), weights={"64x64 bfloat16": 5})) == []
    assert savings.of_the_cache(status({})) == []
    held = CacheStatus("6442450944", {0: 2**30}, 10, 75, 25)
    assert savings.of_the_cache(replace(status(shapes), cache=held)) == [
        "cache 6 GiB: 10 weights, 1 GiB on device 0; 75 of 100 reads served"
    ]
