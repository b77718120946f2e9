"""The device functions in nf4/runtime.py.

The CPU stands in for the device (support/quick_interpreter.py), and all other code is what users run.
"""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch
from oracle import expected, layout_of, quantized
from subprocess_python import python

from nf4_patch.lora import launch as lora
from nf4_patch.lora import reference as lora_reference
from nf4_patch.moe import launch as moe
from nf4_patch.moe import reference as moe_reference
from nf4_patch.nf4 import codes, runtime
from nf4_patch.nf4.dequantize import compilation, launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gpu/test_launch.py and gpu/test_two_devices.py")
DTYPE = torch.bfloat16


@pytest.fixture
def weight():
    packed, state = quantized((64, 128), DTYPE, "cpu")
    return layout_of(packed, state), expected(packed, state)


def test_a_launch_runs_on_its_device_and_on_the_current_stream(weight, monkeypatch):
    layout, want = weight
    ready = launch.Launch(layout)
    current, entered, streams, call = [3], [], [], ready.call

    @contextlib.contextmanager
    def on_device(device):
        entered.append(device)
        current[0], before = device, current[0]
        yield
        current[0] = before

    def counted(x, y, z, stream, *arguments):
        streams.append(stream)
        call(x, y, z, stream, *arguments)

    ready.call = counted
    monkeypatch.setattr(runtime, "on_device", on_device)
    monkeypatch.setattr(launch, "current_device", lambda: current[0])
    monkeypatch.setattr(launch, "current_stream", lambda device: {-1: 7}[device])
    for _ in range(2):
        assert torch.equal(ready.run(), want)
    assert entered == [-1, -1] and streams == [7, 7] and current == [3]
    one, other = ready.into_buffer(), ready.into_buffer()  # no buffer off the default stream
    assert one.data_ptr() != other.data_ptr()


def test_launches_of_options_allocate_compile_and_run_on_the_device_of_their_tensors(monkeypatch):
    current, seen = [3], []

    @contextlib.contextmanager
    def on_device(device):
        current[0], before = device, current[0]
        yield
        current[0] = before

    def seen_by(function):
        return lambda *arguments, **options: seen.append(current[0]) or function(*arguments, **options)

    for name in ("empty_strided_cuda", "compile_kernel", "current_stream"):
        monkeypatch.setattr(runtime, name, seen_by(getattr(runtime, name)))
    monkeypatch.setattr(runtime, "_entries", {})
    monkeypatch.setattr(runtime, "on_device", on_device)
    monkeypatch.setattr(runtime, "current_device", lambda: current[0])
    x, factor = torch.randn(8, 16).bfloat16(), torch.randn(1, 16)
    found = lora.project(x, factor, True)
    assert (found - lora_reference.project(x, factor, True)).abs().max() < 1e-4
    # in fp16, because the interpreter truncates to bf16
    half = x.half()
    assert torch.allclose(moe.silu_and_mul(half)[0], moe_reference.silu_and_mul(half)[0], rtol=2e-3)
    assert seen == [-1] * 6 and current == [3]


def test_the_shared_buffer_grows_in_place(weight, monkeypatch):
    layout, want = weight
    monkeypatch.setattr(launch, "_buffers", {})
    small, large = quantized((32, 64), DTYPE, "cpu"), quantized((128, 256), DTYPE, "cpu")
    first = launch.Launch(layout_of(*small)).into_buffer()
    assert torch.equal(first, expected(*small))
    assert torch.equal(launch.Launch(layout_of(*large)).into_buffer(), expected(*large))
    assert (
        torch.equal(launch.Launch(layout).into_buffer(), want)
        and first.data_ptr() == launch._buffers[-1, DTYPE].data_ptr()
    )


def test_the_shared_buffer_stays_if_memory_runs_out(weight, monkeypatch):
    """Launches that hold a view of the buffer still have its memory."""
    layout, want = weight
    monkeypatch.setattr(launch, "_buffers", {})
    ready, large = launch.Launch(layout), launch.Launch(layout_of(*quantized((128, 256), DTYPE, "cpu")))
    buffer, resize = ready.into_buffer(), torch.UntypedStorage.resize_

    def resized(storage, size):
        if size > want.nbytes:
            raise torch.OutOfMemoryError("full")
        return resize(storage, size)

    with monkeypatch.context() as full:
        full.setattr(torch.UntypedStorage, "resize_", resized)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            large.into_buffer()
    assert runtime.has_memory(buffer) and torch.equal(ready.into_buffer(), want)


def test_whether_a_part_of_a_storage_has_memory():
    whole = torch.zeros(64, dtype=torch.float16)
    parts = [whole[:32], whole[16:48], whole[32:]]
    assert all(map(runtime.has_memory, parts))
    whole.untyped_storage().resize_(2 * 40)
    assert [*map(runtime.has_memory, parts)] == [True, False, False]


def test_a_gpu_reads_whole_words(weight, monkeypatch):
    layout, want = weight
    odd = torch.empty(layout.packed.numel() + 1, dtype=torch.uint8)[1:].view(-1, 1).copy_(layout.packed)
    monkeypatch.setattr(runtime, "WORD", 4)
    with pytest.raises(runtime.KernelUnavailable) as refused:
        launch.Launch(layout._replace(packed=odd))
    assert refused.value.reason == "MISALIGNED"
    assert torch.equal(launch.dequantize(layout._replace(packed=odd)), want)


@pytest.mark.parametrize("quant_type", codes.CODES)
def test_a_kernel_whose_bits_differ_for_one_code_is_refused(quant_type, monkeypatch):
    """One flipped bit in the result with this code is enough."""
    code, compiled = codes.remembered_code(quant_type, torch.device("cpu")), runtime.compile_kernel

    class Wrong(compiled):
        def __call__(self, x, y, z, stream, *arguments):
            super().__call__(x, y, z, stream, *arguments)
            _, _, address, _, _, _, out = arguments[5:12]
            if address == code.data_ptr():
                ctypes.c_uint8.from_address(out).value ^= 1

    variant = compilation.Variant(4, torch.float16)
    assert compilation.CompiledKernel(variant, code.device).elements == compilation.elements_of(variant)
    monkeypatch.setattr(runtime, "compile_kernel", Wrong)
    monkeypatch.setattr(runtime, "name_of", lambda device: "the CPU")
    with pytest.raises(
        runtime.KernelUnavailable, match=f"bits differ from the reference .* for {quant_type} "
    ) as refused:
        compilation.CompiledKernel(variant, code.device)
    assert refused.value.reason == "KERNEL_FAILED"


def test_triton_under_its_interpreter_compiles_nothing():
    code = """
    from nf4_patch.nf4 import runtime
    from nf4_patch.nf4.dequantize import kernels
    try:
        runtime.compile_kernel(kernels.dequantize_kernel, (), {})
    except runtime.KernelUnavailable as error:
        print(error)
    """
    assert "TRITON_INTERPRET is set" in python(code, TRITON_INTERPRET="1").stdout
