"""Injected faults with a compiled kernel: in the compiler, cache directory, launcher and memory, and with freed storage."""

from __future__ import annotations

import contextlib

import bitsandbytes.functional as F
import pytest
import torch
from oracle import quantized
from subprocess_python import python
from target import TARGET, raising

import nf4_patch
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import compilation, reference
from nf4_patch.nf4.dequantize.reference import dense
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture
def fresh(monkeypatch):
    """Turn the patch on, without compiled kernels or remembered launches of earlier tests."""
    monkeypatch.setattr(compilation, "_kernels", {})
    nf4_patch.enable()


def original(packed, state):
    nf4_patch.disable()
    result = F.dequantize_4bit(packed, state)
    nf4_patch.enable()
    return result


SIGNATURE = "function takes exactly 21 arguments (20 given)"
CHANGED = runtime.KernelEntry(raising(TypeError(SIGNATURE)), (), (), "changed")
FAILURES = {  # what stands where, and what status() says; other bits: found on a sample, before a weight sees them
    "the compiler fails": (
        type(compilation.kernels.dequantize_kernel), "warmup", raising(RuntimeError("ptxas exited with 255")), "with 255"
    ),
    "the launcher has another signature": (runtime.KernelEntry, "of", lambda *_: CHANGED, SIGNATURE),
    "the kernel gives other bits": (runtime, "same_bits", lambda a, b: False, "bits differ from the reference"),
    "the kernel loses FP4's minus zero": (
        reference, "dequantize", lambda weight: dense(weight) + (0.0 if weight.quant_type == "fp4" else -0.0), "fp4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_the_original_runs_where(failure, fresh, monkeypatch):
    owner, name, replacement, message = FAILURES[failure]
    monkeypatch.setattr(owner, name, replacement)
    packed, state = quantized((64, 128), torch.float16, CUDA)
    want = original(packed, state)
    for _ in range(3):
        assert torch.equal(F.dequantize_4bit(packed, state), want)
    assert dict(counters.fallbacks) == {(TARGET, Reason.KERNEL_FAILED): 3}
    assert any(message in error for error in nf4_patch.status().errors), nf4_patch.status().errors


@contextlib.contextmanager
def out_of_memory():
    """Leave less than 8 MiB of memory, whatever earlier tests left in the allocator. A call inside the context raises an error."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    taken = []
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        while True:
            taken.append(torch.empty(2 << 20, dtype=torch.uint8, device=CUDA))
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_in_the_middle_of_a_call_is_raised(fresh):
    packed, state = quantized((4096, 4096), torch.float16, CUDA)
    want = original(packed, state)
    assert torch.equal(F.dequantize_4bit(packed, state), want)
    with out_of_memory():
        F.dequantize_4bit(packed, state)
    assert torch.equal(F.dequantize_4bit(packed, state), want)  # and training can go on
    assert not counters.fallbacks


def test_the_buffer_after_a_failed_growth(fresh):
    server = Dequantizer("test")
    small, small_state = quantized((256, 256), torch.float16, CUDA)
    want = original(small, small_state)
    assert torch.equal(server.of_state(small, small_state, into_buffer=True), want)
    large, large_state = quantized((8192, 4096), torch.float16, CUDA)
    server.of_state(large, large_state)
    with out_of_memory():
        server.of_state(large, large_state, into_buffer=True)
    assert torch.equal(server.of_state(small, small_state, into_buffer=True), want)
    assert torch.equal(server.of_state(large, large_state, into_buffer=True), original(large, large_state))
    assert torch.equal(server.of_state(small, small_state, into_buffer=True), want)


def test_a_cache_directory_that_cannot_be_written():
    """Triton raises an error, training continues with the original, and status() has the Reason."""
    python(
        """
    import torch, bitsandbytes.functional as F, nf4_patch
    packed, state = F.quantize_4bit(torch.randn(64, 64, device="cuda").half(), quant_type="nf4", compress_statistics=True)
    want = F.dequantize_4bit(packed, state)
    nf4_patch.enable()
    assert torch.equal(F.dequantize_4bit(packed, state), want)
    status = nf4_patch.status()
    row = {t.name: t for t in status.targets}["bitsandbytes.functional.dequantize_4bit"]
    assert row.hits or (row.fallbacks == {"KERNEL_FAILED": 1} and status.errors), status
    """,
        TRITON_CACHE_DIR="/proc/nowhere",
    )


def test_the_first_attention_of_a_process_changes_no_key_of_graphs():
    """On Hopper, PyTorch's first choice of an attention backend puts cuDNN first in the order."""
    python("""
        import torch
        from nf4_patch.graphs.capture import Environment
        x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
        before = Environment.current()
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        assert Environment.current() == before
    """)
