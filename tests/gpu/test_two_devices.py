"""Two GPUs in one process: each weight is decoded on its own GPU, whatever the current device is.

One GPU may be of another kind.
"""

from __future__ import annotations

import functools

import bitsandbytes.functional as F
import pytest
import torch
from fused_matmul import multiply
from oracle import layout_of, quantized
from threads import together

import nf4_patch
from nf4_patch.lora import launch as lora
from nf4_patch.lora import reference as lora_reference
from nf4_patch.moe import launch as moe
from nf4_patch.moe import reference as moe_reference
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import compilation
from nf4_patch.nf4.weight import forget
from nf4_patch.patching.dequantizer import Dequantizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
T4 = (7, 5)


def weights(dtype=torch.bfloat16, seed=0):
    """Return the same weight on both GPUs, and the result of bitsandbytes on the first GPU."""
    both = [quantized((512, 1024), dtype, device, seed=seed) for device in DEVICES]
    nf4_patch.disable()
    want = [F.dequantize_4bit(*weight) for weight in both]
    nf4_patch.enable()
    return both, want


def test_the_current_device_does_not_matter(patched):
    both, want = weights()
    for current in DEVICES:
        with torch.cuda.device(current):
            for (packed, state), expected in zip(both, want, strict=True):
                got = F.dequantize_4bit(packed, state)
                assert got.device == packed.device and torch.equal(got, expected)
                out = torch.full_like(expected, float("nan"))
                assert torch.equal(F.dequantize_4bit(packed, state, out=out), expected)
                assert torch.cuda.current_device() == current.index
    assert nf4_patch.status().hits == 8


def test_the_kernels_of_options_run_on_the_device_of_their_tensors():
    for current in DEVICES:
        for device in DEVICES:
            x, factor = torch.randn(64, 64, device=device).bfloat16(), torch.randn(8, 64, device=device)
            with torch.cuda.device(current):
                assert lora.supports(x, factor, 64)
                found, gated = lora.project(x, factor, True), moe.silu_and_mul(x)[0]
                assert torch.cuda.current_device() == current.index
            assert found.device == gated.device == device
            assert (found - lora_reference.project(x, factor, True)).abs().max() < 1e-4
            want = moe_reference.silu_and_mul(x)[0]
            assert (gated - want).norm() < 2**-8 * want.norm()


def test_buffers_are_one_a_device(patched):
    server = Dequantizer("test")
    both, want = weights()
    got = [server.of_state(*weight, into_buffer=True) for weight in both]
    assert [tensor.device for tensor in got] == list(DEVICES)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_there_and_back(patched):
    """Move a model to the other GPU and back. The remembered launch of one GPU never serves the other."""
    (packed, state), expected = weights()[0][0], weights()[1][0]
    for device in (DEVICES[1], DEVICES[0], DEVICES[1]):
        packed = packed.to(device)
        state.to(device)
        got = F.dequantize_4bit(packed, state)
        assert got.device == device and torch.equal(got.to(DEVICES[0]), expected)


def test_a_weight_in_pieces_on_both_is_refused_by_name(patched):
    (packed, state), _ = weights()[0]
    state.absmax = state.absmax.to(DEVICES[1])
    assert Dequantizer("test").of_state(packed, state).name == "MIXED_DEVICES"


def test_each_thread_its_own_device(patched):
    both, want = weights()

    def work(i):
        torch.cuda.set_device(DEVICES[i])
        for _ in range(200):
            assert torch.equal(F.dequantize_4bit(*both[i]), want[i])

    together(*(functools.partial(work, i) for i in (0, 1)))
    assert nf4_patch.status().hits == 400


def test_the_second_gpu_is_a_t4(patched, monkeypatch):
    """Pretend that the second GPU has a T4's capability. It gets a T4's configuration and code, and the first GPU keeps its own."""
    Dequantizer("warm").of_state(
        *weights()[0][0]
    )  # Triton asks for the capability once, and compiles for what this GPU is
    real = runtime.capability_of

    def capability(device=None):
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return T4 if index == 1 else real(device)

    monkeypatch.setattr(runtime, "capability_of", capability)
    monkeypatch.setattr(compilation, "_kernels", {})
    forget()
    server = Dequantizer("test")
    for dtype in (torch.float16, torch.bfloat16):
        both, want = weights(dtype, seed=5)
        for weight, expected in zip(both, want, strict=True):
            assert torch.equal(server.of_state(*weight), expected)
    used = {device.index: variant.num_warps for variant, device in compilation.compiled_kernels()}
    assert used == {i: compilation.warps_for(capability(i), 512 * 1024) for i in (0, 1)}
    assert used[0] != used[1]
    code = {
        d.index: k.compiled.asm["ptx"]
        for (v, d), k in compilation.compiled_kernels().items()
        if v.dtype is torch.bfloat16
    }
    assert "cvt.rn.bf16x2.f32" in code[0] and "cvt.rn.bf16x2.f32" not in code[1]


def test_the_fused_matmul_runs_where_its_weight_is():
    from nf4_patch.matmul import launch as matmul

    if matmul.config_for(torch.cuda.get_device_capability(1), 4, 512, 1024) is None:
        pytest.skip("the fused matmul's table has no row for this GPU")
    both, want = weights()
    for (packed, state), weight in zip(both, want, strict=True):
        layout = layout_of(packed, state)
        x = torch.zeros(4, 1024, dtype=torch.bfloat16, device=packed.device)
        x[:, :4] = torch.eye(4, device=packed.device)
        with torch.cuda.device(DEVICES[0]):
            got = multiply(x, layout)
        assert got.device == packed.device and torch.equal(got, weight[:, :4].t())
