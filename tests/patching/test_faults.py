"""Injected faults: an error below or inside nf4_patch never ends training, and is reported by name.

gpu/test_gpu_faults.py has the faults that need a compiler and a GPU.
"""

from __future__ import annotations

import gc
import logging
import sys
import types
import weakref

import bitsandbytes.functional as F
import pytest
import torch
from oracle import expected, quantized
from subprocess_python import program
from target import TARGET, fallbacks, raising, replaced_by, row, same

import nf4_patch
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import launch
from nf4_patch.patching import guards, placement, replacement, target
from nf4_patch.patching.counters import counters, warn_once
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch

MISTAKE = ValueError("a mistake of ours at 0x7f")


def before_the_patch(packed, state):
    """Return the result of bitsandbytes with the patch off, so that no launch is remembered for the weight."""
    nf4_patch.disable()
    want = expected(packed, state)
    nf4_patch.enable()
    return want


@pytest.mark.parametrize("mistake", [MISTAKE, TypeError(MISTAKE)], ids=["a value", "a type"])
def test_our_own_error_runs_the_original_and_is_logged_once(on, mistake, monkeypatch, caplog):
    packed, state = quantized((64, 128), torch.float16, on)
    want = before_the_patch(packed, state)
    counters.reset()
    monkeypatch.setattr(guards, "why_not", raising(mistake))
    with caplog.at_level(logging.ERROR, "nf4_patch"):
        for _ in range(5):
            assert torch.equal(F.dequantize_4bit(packed, state), want)
    assert fallbacks() == {Reason.INTERNAL_ERROR: 5}
    assert len([r for r in caplog.records if r.exc_info]) == 1  # one traceback, not one a call
    assert f"{type(mistake).__name__}: a mistake of ours" in "\n".join(nf4_patch.status().errors)
    assert "INTERNAL_ERROR" in str(nf4_patch.status())


TRITONS = RuntimeError("Triton Error [CUDA]: out of memory")


@pytest.mark.parametrize(
    ("error", "strict"),
    [(MISTAKE, True), (KeyboardInterrupt(), False), (torch.cuda.OutOfMemoryError("full"), False),
     (torch.cuda.OutOfMemoryError("full"), True), (TRITONS, False)],
    ids=["a mistake, strict", "interrupt", "memory", "memory, strict", "memory at a launch"],
)  # fmt: skip
def test_what_is_raised(on, error, strict, monkeypatch):
    """Out-of-memory errors are never hidden.

    The original would need the same memory, and a second attempt would hide where it ran out.
    """
    packed, state = quantized((64, 128), torch.float16, on)
    if runtime.is_out_of_memory(error):
        monkeypatch.setattr(launch, "dequantize", raising(error))
        monkeypatch.setattr(launch.Launch, "run", raising(error))
    else:
        monkeypatch.setattr(guards, "why_not", raising(error))
    monkeypatch.setattr(switch, "strict", strict)
    with pytest.raises(type(error)) as caught:
        F.dequantize_4bit(packed, state)
    assert caught.value is error
    assert error is MISTAKE or fallbacks() == {}


def test_error_messages_that_vary_do_not_fill_the_memory(on, monkeypatch):
    packed, state = quantized((64, 128), torch.float16, on)
    addresses = iter(range(10_000))

    def varying(*args, **kwargs):
        raise RuntimeError(f"at {next(addresses):#x}")

    monkeypatch.setattr(guards, "why_not", varying)
    monkeypatch.setattr(replacement.logger, "disabled", True)
    for _ in range(300):
        F.dequantize_4bit(packed, state)
    assert fallbacks() == {Reason.INTERNAL_ERROR: 300}
    assert len(counters.errors) == 100


def test_two_kernel_failures_are_counted_under_their_own_names(on, monkeypatch):
    messages = iter(["ptxas exited with 1", "no space left on device"] * 10)

    def unavailable(self, layout, *rest):
        return self.fallbacks.unavailable(runtime.KernelUnavailable(next(messages)))

    monkeypatch.setattr(Dequantizer, "resolve", unavailable)
    packed, state = quantized((64, 128), torch.float16, on)
    for _ in range(20):
        F.dequantize_4bit(packed, state)
    assert fallbacks() == {Reason.KERNEL_FAILED: 20}
    assert counters.errors == {"ptxas exited with 1": 10, "no space left on device": 10}


@pytest.mark.parametrize("error", [TRITONS, torch.cuda.OutOfMemoryError("full"), MemoryError()])
def test_out_of_memory_while_a_kernel_is_loaded_is_not_remembered(error):
    known: dict = {}
    with pytest.raises((torch.cuda.OutOfMemoryError, MemoryError)) as caught:
        runtime.built_once(known, "kernel", raising(error))
    assert str(caught.value) == str(error)
    assert runtime.built_once(known, "kernel", lambda: "built") == "built"


@pytest.mark.parametrize("error", [ValueError("ptxas"), runtime.KernelUnavailable("ptxas", "MISALIGNED")])
def test_a_remembered_failure_keeps_no_weight_alive(error):
    """The failure does not grow either.

    An exception that is raised repeatedly collects the frames of every raise in its traceback.
    """
    known: dict = {}

    def use(weight):
        runtime.built_once(known, "kernel", raising(error))

    weight = torch.empty(1)
    alive = weakref.ref(weight)
    for _ in range(3):
        with pytest.raises(runtime.KernelUnavailable, match="ptxas") as caught:
            use(weight)
        assert caught.value.reason == getattr(error, "reason", "KERNEL_FAILED")
    del weight, caught
    error.__traceback__ = None  # ours
    gc.collect()
    assert alive() is None
    assert known["kernel"].__traceback__ is None


def test_a_compiled_graph_goes_on_without_the_kernel(on, monkeypatch, caplog):
    """torch.compile's graph has no original, so it uses the plain formula, with the same bits."""
    packed, state = quantized((64, 128), torch.bfloat16, on)
    want = before_the_patch(packed, state)
    warn_once.cache_clear()
    monkeypatch.setattr(launch, "dequantize", raising(runtime.KernelUnavailable("ptxas exited with 1")))
    compiled = torch.compile(lambda p: F.dequantize_4bit(p, state) * 1, backend="aot_eager", fullgraph=True)
    with caplog.at_level(logging.WARNING, "nf4_patch"):
        for _ in range(3):
            assert torch.equal(compiled(packed), want)
    assert len([r for r in caplog.records if "ptxas exited with 1" in r.getMessage()]) == 1


def test_a_hook_that_raises_leaves_the_function_alone(monkeypatch, caplog):
    make, original = target.Target.make, F.dequantize_4bit
    broken = raising(MISTAKE)
    monkeypatch.setattr(
        target.Target, "make", lambda self, *args: (broken if self.name == TARGET else make)(self, *args)
    )
    with replaced_by(original):
        assert F.dequantize_4bit is original and str(MISTAKE) in caplog.text
        assert row().state == "refused" and "nf4_patch raised an error" in row().note


def test_without_triton():
    program("missing_dependency", "triton", "decode")


@pytest.mark.full
def test_without_a_gpu(tmp_path):
    """On a GPU machine, PyTorch is built for CUDA, but finds no GPU."""
    program("without_gpu", tmp_path / "model", CUDA_VISIBLE_DEVICES="")


@pytest.mark.full
def test_rows_that_bitsandbytes_decodes_wrongly_on_a_cpu():
    program("rows_on_cpu", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("name", ["wrapt", "triton"])
def test_a_missing_dependency_never_breaks_the_import_of_bitsandbytes(name):
    done = program("missing_dependency", name, NF4_PATCH="1")
    assert done.stdout.split() == ["imported"]
    assert name != "wrapt" or ("nf4_patch stays off" in done.stderr and "wrapt" in done.stderr)


def test_an_unknown_release_is_refused_by_name_and_the_rest_is_patched(monkeypatch):
    """A newer Unsloth has a function with another argument."""

    def _fast_dequantize_bnb(W, quant_state=None, out=None, use_global_buffer=False, *, layout): ...

    fake = types.ModuleType("unsloth.kernels.utils")
    fake._fast_dequantize_bnb = _fast_dequantize_bnb
    name = f"{fake.__name__}._fast_dequantize_bnb"
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setitem(placement.installed, name, None)  # and away afterwards
    nf4_patch.enable()
    assert row(name).state == "refused" and "layout" in row(name).note
    assert row(f"{fake.__name__}.fast_dequantize").state == "absent" and row().state == "patched"
    assert fake._fast_dequantize_bnb is _fast_dequantize_bnb


@pytest.mark.parametrize(
    ("what", "note"),
    [(42, ""), ("text", ""), (None, ""), (print, ""), (type("C", (), {})(), ""),
     (lambda A, quant_state, rank, scale: None, "(A, quant_state, rank, scale)")],
    ids=["int", "text", "None", "builtin", "instance", "another signature"],
)  # fmt: skip
def test_something_else_at_the_patched_name(what, note):
    with replaced_by(what):
        assert row().state == "refused" and note in row().note
        assert F.dequantize_4bit is what


def test_garbage_arguments_get_the_originals_error(on):
    """If the original raises an error for arguments, the replacement raises the same error."""
    packed, state = quantized((64, 128), torch.float16, on)
    for arguments in [(None, state), ("text", state), (packed, 42), (packed, None), (packed.cpu().numpy(), state), ()]:
        nf4_patch.disable()
        with pytest.raises(Exception) as want:  # noqa: PT011
            F.dequantize_4bit(*arguments)
        nf4_patch.enable()
        with pytest.raises(type(want.value)) as got:
            F.dequantize_4bit(*arguments)
        if arguments:
            assert str(got.value) == str(want.value)


def test_functorch_transforms_that_the_original_supports(on):
    packed, state = quantized((64, 128), torch.float32, on)
    x = torch.randn(3, 64, device=on)

    def product(row):
        return row @ F.dequantize_4bit(packed, state)

    def transformed():
        return torch.func.vmap(product)(x), torch.func.grad(lambda r: product(r).sum())(x[0])

    nf4_patch.disable()
    want = transformed()
    nf4_patch.enable()
    assert same(transformed(), want)
    assert fallbacks() == {Reason.FUNCTORCH_TRANSFORM: 2}
