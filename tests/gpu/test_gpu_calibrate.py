"""A GPU that no table knows: before its calibration everything is the original's, after it the product serves what won."""

from __future__ import annotations

import json

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from oracle import layout_of

import nf4_patch
from nf4_patch.nf4.matmul import backward as matmul_dx
from nf4_patch.nf4.matmul import calibration
from nf4_patch.nf4.matmul import launch as matmul
from nf4_patch.patching import hooks, replacement
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.stats import ledger
from nf4_patch.tools.bench import calibrate
from nf4_patch.tools.bench import matmul as products

CUDA = torch.device("cuda", 0)
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
    monkeypatch.setattr(matmul, "ROWS", ())
    monkeypatch.setattr(matmul_dx, "ROWS", ())
    monkeypatch.setattr(replacement, "FASTER_EAGERLY", {})
    calibration.forget()
    yield file
    nf4_patch.disable()
    ledger.reset()
    calibration.use(None, hooks.releases)
    calibration.forget()


def linear(n, k):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(k, n, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    return layer.to(torch.bfloat16).to(CUDA)


def forward_and_backward(layer, m):
    x = torch.randn(m, layer.in_features, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    return x.detach(), y.detach(), dy, dx


def hits():
    return sum(tally.hits for key, tally in ledger.tallies.items() if key[2].endswith("product"))


def test_calibrated_it_is_served_and_right(unknown):
    layer, other = linear(*SHAPE), linear(4096, 2048)
    nf4_patch.enable(matmul="auto")
    ledger.reset()
    forward_and_backward(layer, 1)  # of more rows bitsandbytes dequantizes, which we serve
    assert hits() == 0
    assert sum(count for (_, reason), count in ledger.fallbacks.items() if reason is Reason.ROWS) == 2
    nf4_patch.disable()

    said = []
    entry, failures = calibrate.measure(
        [SHAPE], quick=True, with_unsloth=False, tell=lambda text, *_: said.append(text)
    )
    assert not failures
    assert said == [f"4096x4096 bf16 {way}, {m} rows" for way in ("forward", "backward") for m in calibrate.ROWS]
    calibrate.write(unknown, {calibration.gpu(0): entry})
    assert json.loads(unknown.read_text()) == {calibration.gpu(0): entry}
    for direction in ("forward", "backward"):
        rows = entry[direction]["4096x4096"]
        assert [row["m"] for row in rows] == list(calibrate.ROWS)
        for row in rows:
            names = {products.OURS, products.BITSANDBYTES, products.DEQUANTIZE}
            assert names <= row["us"].keys() and min(row["us"].values()) > 1, row
            if row["config"]:
                best = min(us for name, us in row["us"].items() if name != products.OURS)
                assert row["us"][products.OURS] * 1.03 < best, row

    nf4_patch.enable(matmul="auto")
    assert calibration.status(0) == f"calibrated on {entry['date']}, 1 shapes"
    packed, state = layer.weight, layer.weight.quant_state
    truth, dense = products.exact(layout_of(packed.data, state)), F.dequantize_4bit(packed, state)
    served = 0
    for m in (1, 2, 5, 8, 9, 16, 17, 32, 33, 64):
        taken = [
            next(row["config"] for row in entry[way]["4096x4096"] if m <= row["m"]) for way in ("forward", "backward")
        ]
        ledger.reset()
        x, y, dy, dx = forward_and_backward(layer, m)
        assert hits() == sum(config is not None for config in taken), m
        served += hits()
        for got, plain, exact in (
            (y, x @ dense.t(), x.double() @ truth.t()),
            (dx, dy @ dense, dy.double() @ truth),
        ):
            assert products.error(got, exact) <= 1.01 * products.error(plain, exact), m
    if torch.cuda.get_device_capability(CUDA) == (9, 0):
        assert served == 20  # the H200's shipped table wins everywhere on this shape
    ledger.reset()
    forward_and_backward(other, 8)  # not measured
    forward_and_backward(layer, 65)
    assert hits() == 0

    calibration.use(None, hooks.releases)  # NF4_PATCH_CALIBRATION=off
    forward_and_backward(layer, 8)
    assert hits() == 0
