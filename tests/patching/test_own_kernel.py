"""Measurements on this GPU decide whether Unsloth's own fused kernel runs Unsloth's calls."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from oracle import expected, quantized

from nf4_patch.libraries.unsloth import adapters as unsloth_adapter
from nf4_patch.nf4 import runtime
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch
from nf4_patch.patching.targets import TARGETS

ROW = next(target for target in TARGETS if target.function == "unsloth.kernels.utils:_fast_dequantize_bnb")
TARGET = "unsloth.kernels.utils.test"


def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False):
    return "theirs"


@pytest.mark.every(3)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("gpus", [[(9, 0)], [(7, 5)], [(9, 0), (7, 5)]], ids=str)
def test_who_serves_a_call(used, gpus, device, monkeypatch):
    """Unsloth's kernel runs unless it was measured to be slower on every GPU of the machine."""
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", SimpleNamespace(_USE_NF4_KERNELS=used))
    monkeypatch.setattr(unsloth_adapter, "keeps_eager_calls", unsloth_adapter.keeps_eager_calls.__wrapped__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(runtime, "capability_of", lambda device: gpus[getattr(device, "index", device) or 0])
    monkeypatch.setattr(switch, "on", True)
    row = dataclasses.replace(ROW, function="unsloth.kernels.utils:test")
    replaced = unsloth_adapter.fast_dequantize(row, fast_dequantize)
    packed, state = quantized((64, 128), torch.bfloat16, device)
    want, theirs = expected(packed, state), used and gpus != [(9, 0)]
    got = replaced(packed, state)
    assert got == "theirs" if theirs else torch.equal(got, want)
    assert counters.fallbacks[TARGET, Reason.DEFERRED] == theirs
    compiled = torch.compile(lambda: replaced(packed, state), backend="eager")()
    assert compiled == "theirs" if used else torch.equal(compiled, want)
