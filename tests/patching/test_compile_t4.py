"""torch.compile as a T4 user meets it: Inductor skips bf16 graphs below sm_80."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import bitsandbytes.functional as F
import pytest
import torch
from oracle import quantized
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx

import nf4_patch
from nf4_patch.patching.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def no_bf16(monkeypatch):
    """The answer of a T4 to what Inductor asks about bf16: emulated, not native. A CPU is asked as if it were one."""

    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return including_emulation

    monkeypatch.setattr(CudaInterface, "is_bf16_supported", staticmethod(is_bf16_supported))
    if not torch.cuda.is_available():
        t4 = SimpleNamespace(
            is_bf16_supported=is_bf16_supported, get_device_properties=lambda device: SimpleNamespace(name="Tesla T4")
        )

        def check(graph, original=compile_fx._check_triton_bf16_support):
            with monkeypatch.context() as inside:
                inside.setattr(compile_fx, "is_gpu", lambda device_type: True)
                inside.setattr(compile_fx, "get_interface_for_device", lambda device: t4)
                return original(graph)

        monkeypatch.setattr(compile_fx, "_check_triton_bf16_support", check)


def test_inductor_skips_a_bf16_graph_and_the_patch_serves_it_eagerly(patched, no_bf16, device):
    """What a T4 user gets in bf16: a warning, no compiled graph, the right numbers."""
    packed, state = quantized((64, 256), torch.bfloat16, device)
    x = torch.randn(8, 256, dtype=torch.bfloat16, device=device)

    def function(packed, state, x):
        return torch.nn.functional.silu(x @ F.dequantize_4bit(packed, state).t()) * 2

    want = function(packed, state, x)
    counters.reset()
    compiled = torch.compile(function, backend="inductor")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compiled(packed, state, x)
    assert any("does not support bfloat16 compilation natively" in str(one.message) for one in caught)
    assert torch.equal(got, want)
    assert nf4_patch.status().hits == 1  # eager: counted, which a traced call is not
