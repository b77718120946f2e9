"""Measurements on this GPU decide whether Unsloth's own fused kernel runs Unsloth's calls."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from oracle import expected, quantized

import nf4_patch
from nf4_patch.libraries.unsloth import adapters as unsloth_adapter
from nf4_patch.nf4 import runtime
from nf4_patch.patching import dequantizer
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch
from nf4_patch.patching.targets import TARGETS

ROW = next(target for target in TARGETS if target.function == "unsloth.kernels.utils:_fast_dequantize_bnb")
TARGET = "unsloth.kernels.utils.test"


def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False):
    return "theirs"


@pytest.fixture
def row(monkeypatch):
    monkeypatch.setattr(switch, "on", True)
    return dataclasses.replace(ROW, function="unsloth.kernels.utils:test")


@pytest.mark.every(3)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("gpus", [[(9, 0)], [(7, 5)], [(9, 0), (7, 5)]], ids=str)
def test_who_serves_a_call(used, gpus, device, row, monkeypatch):
    """Unsloth's kernel runs unless it was measured to be slower on every GPU of the machine."""
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", SimpleNamespace(_USE_NF4_KERNELS=used))
    monkeypatch.setattr(unsloth_adapter, "keeps_eager_calls", unsloth_adapter.keeps_eager_calls.__wrapped__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(runtime, "capability_of", lambda device: gpus[getattr(device, "index", device) or 0])
    replaced = unsloth_adapter.fast_dequantize(row, fast_dequantize)
    packed, state = quantized((64, 128), torch.bfloat16, device)
    want, theirs = expected(packed, state), used and gpus != [(9, 0)]
    got = replaced(packed, state)
    assert got == "theirs" if theirs else torch.equal(got, want)
    assert counters.fallbacks[TARGET, Reason.DEFERRED] == theirs
    compiled = torch.compile(lambda: replaced(packed, state), backend="eager")()
    assert compiled == "theirs" if used else torch.equal(compiled, want)


def test_an_offloaded_weight_is_prefetched(device, row, monkeypatch):
    """Unsloth's kernel would read host memory. It keeps other weights, and compiled calls."""
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", SimpleNamespace(_USE_NF4_KERNELS=True))
    monkeypatch.setattr(unsloth_adapter, "keeps_eager_calls", lambda: True)
    weights = [quantized((64, 128), torch.bfloat16, device) for _ in range(2)]
    offloaded, resident = weights
    reads = []
    prefetch = SimpleNamespace(
        on=True, holds=lambda packed: packed is offloaded[0], read=lambda weight, run: reads.append(weight.packed)
    )
    monkeypatch.setattr(dequantizer, "prefetch", prefetch)
    replaced = unsloth_adapter.fast_dequantize(row, fast_dequantize)
    assert torch.equal(replaced(*offloaded), expected(*offloaded)) and reads == [offloaded[0]]
    assert replaced(*resident) == "theirs"
    assert torch.compile(lambda: replaced(*offloaded), backend="eager")() == "theirs" and len(reads) == 1


@pytest.mark.parametrize(
    ("used", "variables", "said"),
    [(True, {}, 1), (True, {"UNSLOTH_BLOCK_COMPILE": "0"}, 0), (True, {"UNSLOTH_COMPILE_DISABLE": "1"}, 0), (False, {}, 0)],
    ids=str,
)  # fmt: skip
def test_who_learns_that_compiled_layers_are_not_prefetched(used, variables, said, row, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "unsloth.kernels.utils", SimpleNamespace(_USE_NF4_KERNELS=used))
    for name in ("UNSLOTH_BLOCK_COMPILE", "UNSLOTH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    followers = list(switch.followers)
    unsloth_adapter.fast_dequantize(row, fast_dequantize)
    nf4_patch.enable(offload="all")
    nf4_patch.disable()
    switch.followers[:] = followers
    assert caplog.text.count("set UNSLOTH_BLOCK_COMPILE=0") == said
