"""What a report advises about the cache."""

from __future__ import annotations

from dataclasses import replace

from nf4_patch.patching.status import CacheStatus, Status
from nf4_patch.tools import savings


def status(shapes: dict[str, int]) -> Status:
    return Status(True, (), shapes, ())


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
