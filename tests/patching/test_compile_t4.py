"""torch.compile as on a T4: Inductor skips bf16 graphs below sm_80, and never compiles a kernel of nf4_patch."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import bitsandbytes.functional as F
import pytest
import torch
from oracle import quantized
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor.utils import run_and_get_code

import nf4_patch
from nf4_patch.patching.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def no_bf16(monkeypatch):
    """Give the answers of a T4 to Inductor's questions about bf16: emulated, not native. Inductor treats the CPU like a T4."""

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


def function(packed, state, x):
    return torch.nn.functional.silu(x @ F.dequantize_4bit(packed, state).t()) * 2


def arguments(dtype, device):
    packed, state = quantized((64, 256), dtype, device)
    generator = torch.Generator().manual_seed(0)
    return packed, state, torch.randn(8, 256, generator=generator).to(device=device, dtype=dtype)


def test_inductor_calls_the_op_in_fp16_and_emits_no_kernel_of_it(patched, no_bf16, device):
    packed, state, x = arguments(torch.float16, device)
    want = function(packed, state, x)
    got, (code, *_) = run_and_get_code(torch.compile(function, fullgraph=True, backend="inductor"), packed, state, x)
    assert len(re.findall(r"torch\.ops\.nf4_patch\.dequantize_nf4\.default\(", code)) == 1
    assert "dequantize_kernel" not in code
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)  # silu in another order; the weight is the op's


def test_inductor_skips_a_bf16_graph_and_the_patch_serves_it_eagerly(patched, no_bf16, device):
    """A T4 user gets a warning, no compiled graph, and the right numbers in bf16."""
    packed, state, x = arguments(torch.bfloat16, device)
    want = function(packed, state, x)
    counters.reset()
    compiled = torch.compile(function, backend="inductor")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compiled(packed, state, x)
    assert any("does not support bfloat16 compilation natively" in str(one.message) for one in caught)
    assert torch.equal(got, want)
    assert nf4_patch.status().hits == 1  # eager: counted, which a traced call is not
