"""Whether Unsloth's own fused kernel keeps its calls: by force, and by what is measured on this GPU."""

from __future__ import annotations

import pytest
import torch
from oracle import expected, quantized
from target import target_like

from nf4_patch.patching import deferral
from nf4_patch.patching.adapters import unsloth as unsloth_adapter
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch

_USE_NF4_KERNELS = True  # as in unsloth.kernels.utils, where the original looks it up
TARGET = "unsloth.test.fast_dequantize"


def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False):
    return "theirs"


@pytest.fixture
def call(device, monkeypatch):
    packed, state = quantized((64, 128), torch.bfloat16, device)
    replaced = unsloth_adapter.fast_dequantize(target_like("unsloth", "fast_dequantize"), fast_dequantize)
    monkeypatch.setattr(switch, "on", True)
    want = expected(packed, state)

    def call(defer: str, measured: bool) -> str:
        monkeypatch.setattr(switch, "defer", defer)
        monkeypatch.setattr(deferral, "measured_everywhere", lambda library: measured)
        result = replaced(packed, state)
        if isinstance(result, str):
            return result
        assert torch.equal(result, want)
        return "ours"

    return call


@pytest.mark.parametrize(
    ("defer", "measured", "who"),
    [
        ("auto", True, "ours"), ("auto", False, "theirs"), ("always", True, "theirs"), ("always", False, "theirs"),
        ("never", True, "ours"), ("never", False, "ours"),
    ],
)  # fmt: skip
def test_who_serves_an_eager_call(call, defer, measured, who):
    before = counters.fallbacks[TARGET, Reason.DEFERRED]
    assert call(defer, measured) == who
    assert counters.fallbacks[TARGET, Reason.DEFERRED] - before == (who == "theirs")


def test_a_library_without_a_kernel_of_its_own_is_never_deferred_to(call, monkeypatch):
    monkeypatch.setitem(globals(), "_USE_NF4_KERNELS", False)
    assert call("always", False) == "ours"


def test_a_compiled_region_stays_theirs_unless_forced(monkeypatch):
    monkeypatch.setattr(deferral, "measured_everywhere", lambda library: True)
    for defer, stays in (("auto", True), ("always", True), ("never", False)):
        monkeypatch.setattr(switch, "defer", defer)
        assert deferral.deferred("unsloth", compiling=True) is stays


@pytest.mark.parametrize("library", deferral.FASTER)
@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_a_call_stays_theirs_where_ours_was_not_measured(library, capability, monkeypatch):
    monkeypatch.setattr(switch, "defer", "auto")
    monkeypatch.setattr(deferral, "measured_everywhere", deferral.measured_everywhere.__wrapped__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert deferral.deferred(library) is (capability != (9, 0))
    assert deferral.deferred(library, compiling=True)


@pytest.mark.parametrize("library", deferral.FASTER)
def test_every_measured_capability_says_on_what(library):
    assert all(library in text.lower() and " us " in text for text in deferral.FASTER[library].values())
