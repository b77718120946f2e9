"""The estimate of time saved: from measured rows, and none where nothing was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nf4_patch.patching.status import Status, TargetStatus
from nf4_patch.patching.targets import TARGETS
from nf4_patch.tools import estimate

GPU = "NVIDIA H200"
LINEAR = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"


def status(hits: int, shape: str, target: str = LINEAR) -> Status:
    return Status(True, (TargetStatus(target, "patched", hits),), {shape: hits}, ())


@pytest.mark.parametrize("row", estimate.MEASURED[GPU])
def test_a_measured_shape_gives_the_measured_difference(row):
    elements, theirs, ours = row
    assert estimate.saved_a_call(GPU, elements) == pytest.approx(theirs - ours)


def test_between_and_past_the_rows():
    a, b = estimate.saved_a_call(GPU, 1024 * 8192), estimate.saved_a_call(GPU, 4096 * 4096)
    assert a < estimate.saved_a_call(GPU, 3000 * 4096) < b
    assert estimate.saved_a_call(GPU, 64) == estimate.saved_a_call(GPU, 512 * 2048)
    largest = estimate.MEASURED[GPU][-1]
    assert estimate.saved_a_call(GPU, 2 * largest[0]) == pytest.approx(2 * (largest[1] - largest[2]))


def test_hits_times_the_table():
    assert estimate.seconds_saved(status(1000, "4096x4096 bfloat16"), GPU) == pytest.approx(
        1000 * (25.06 - 12.62) * 1e-6
    )


@pytest.mark.parametrize(
    ("gpu", "hits", "shape", "target"),
    [
        ("Tesla T4", 10, "4096x4096 bfloat16", LINEAR),
        ("", 10, "4096x4096 bfloat16", LINEAR),
        (GPU, 0, "4096x4096 bfloat16", LINEAR),
        (GPU, 10, "4096x4096 float32", LINEAR),
        (GPU, 10, "4096x4096 bfloat16", "unsloth.kernels.utils._fast_dequantize_bnb"),
    ],
)
def test_none_where_nothing_was_measured(gpu, hits, shape, target):
    assert estimate.seconds_saved(status(hits, shape, target), gpu) is None


def test_the_rows_are_those_of_the_performance_page():
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    rows = re.findall(
        r"^\| (\d+)\u00d7(\d+)[^|]*\|[^|]*\| ([\d.]+) \|[^|]*\|[^|]*\|[^|]*\| ([\d.]+) \(", page, re.MULTILINE
    )
    written = {(int(n) * int(k), float(theirs), float(ours)) for n, k, ours, theirs in rows}
    assert set(estimate.MEASURED[GPU]) <= written


def test_the_targets_exist():
    assert set(estimate.THREE_LAUNCHES) <= {target.name for target in TARGETS}
