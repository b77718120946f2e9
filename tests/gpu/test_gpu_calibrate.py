"""A GPU that no table knows: before its calibration everything is the original's, after it the fused matmul serves what won."""

from __future__ import annotations

import json
from types import SimpleNamespace

import bitsandbytes.functional as F
import pytest
import torch
from fused_matmul import CUDA, error, exact, hits_by_shape, linear
from oracle import layout_of

import nf4_patch
from nf4_patch.matmul import calibrated
from nf4_patch.matmul import launch as matmul
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.tools.bench import calibrate
from nf4_patch.tools.bench.matmul import BITSANDBYTES, DEQUANTIZE, OURS

SHAPE = (4096, 4096)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA) < (8, 0), reason="no mma of 16 bits by 16"
    ),
]


@pytest.fixture
def unknown(monkeypatch, tmp_path):
    """Nothing ships for this GPU; the file is ``unknown``, not there yet."""
    file = tmp_path / "calibration.json"
    monkeypatch.setenv("NF4_PATCH_CALIBRATION", str(file))
    monkeypatch.setattr(matmul, "SMALL_M_ROWS", ())
    calibrated.forget()
    yield file
    calibrated.use(SimpleNamespace(calibration=None))
    calibrated.forget()


def forward(layer, m):
    x = torch.randn(m, layer.in_features, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    return x.detach(), layer(x).detach()


def hits():
    return sum(hits_by_shape().values())


def test_calibrated_it_is_served_and_right(unknown, monkeypatch):
    layer, other = linear(*SHAPE), linear(4096, 2048)
    nf4_patch.enable(matmul="auto")
    counters.reset()
    forward(layer, 1)  # of more rows bitsandbytes dequantizes, which we serve
    assert hits() == 0
    assert sum(count for (_, reason), count in counters.fallbacks.items() if reason is Reason.NOT_FASTER) == 1
    nf4_patch.disable()

    said = []
    monkeypatch.setattr(calibrate, "gemv", lambda: None)  # or Unsloth would be imported here
    found = calibrate.measure([SHAPE], tell=lambda text, *_: said.append(text))
    entry = found.entry
    assert not found.failures
    assert said == [f"4096x4096 bf16, {m} rows" for m in calibrate.ROWS]
    calibrated.write(unknown, {calibrated.gpu(0): entry})
    assert json.loads(unknown.read_text()) == {calibrated.gpu(0): entry}
    rows = entry["matmul"]["4096x4096"]
    assert [row["m"] for row in rows] == list(calibrate.ROWS)
    for row in rows:
        names = {OURS, BITSANDBYTES, DEQUANTIZE}
        assert names <= row["us"].keys() and min(row["us"].values()) > 1, row
        if row["config"]:
            best = min(us for name, us in row["us"].items() if name != OURS)
            assert row["us"][OURS] * 1.03 < best, row

    nf4_patch.enable(matmul="auto")
    assert calibrated.in_force(0).status == f"calibrated on {entry['date']}, 1 shape"
    packed, state = layer.weight, layer.weight.quant_state
    truth, dense = exact(layout_of(packed.data, state)), F.dequantize_4bit(packed, state)
    served = 0
    for m in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64):
        taken = next(row["config"] for row in rows if m <= row["m"])
        counters.reset()
        x, y = forward(layer, m)
        assert hits() == (taken is not None), m
        served += hits()
        want = x.double() @ truth.t()
        assert error(y, want) <= 1.01 * error(x @ dense.t(), want), m
    if torch.cuda.get_device_capability(CUDA) == (9, 0):
        assert served == 10  # the H200's shipped table wins everywhere on this shape
    counters.reset()
    forward(other, 8)  # not measured
    forward(layer, 65)
    assert hits() == 0

    monkeypatch.setenv("NF4_PATCH_CALIBRATION", "off")
    nf4_patch.enable(matmul="auto")
    forward(layer, 8)
    assert hits() == 0
