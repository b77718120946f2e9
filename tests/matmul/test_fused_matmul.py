"""The switch of the fused matmul, and how its replacements in bitsandbytes and Unsloth handle every call, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import ModuleType

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from bitsandbytes.autograd import _functions as autograd
from oracle import expected, quantized
from target import Plain, row, target_like
from torch.testing._internal.two_tensor import TwoTensor

import nf4_patch
from nf4_patch.libraries.bitsandbytes.adapters import dequant_linear, gemm, gemv, matmul_4bit
from nf4_patch.libraries.unsloth.adapters import fast_gemv, gemv_rows, matmul_lora
from nf4_patch.matmul.product import FusedMatmul
from nf4_patch.patching.counters import FallbackError, counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch


def test_who_copied_the_name_gets_what_is_switched_on(monkeypatch):
    """A copy of the function that was made while the option was off is switched on too."""
    original = autograd.matmul_4bit
    monkeypatch.setattr(bnb, "matmul_4bit", original)  # whatever an earlier test put at one of the two names
    late = ModuleType("imported_while_off")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    nf4_patch.enable()
    assert autograd.matmul_4bit is bnb.matmul_4bit is original
    late.matmul_4bit = bnb.matmul_4bit
    with nf4_patch.enabled(matmul="auto"):
        assert autograd.matmul_4bit is bnb.matmul_4bit is late.matmul_4bit is not original
        nf4_patch.enable(matmul="off")
        assert autograd.matmul_4bit is bnb.matmul_4bit is late.matmul_4bit is original
    status = row("bitsandbytes.autograd._functions.matmul_4bit")
    assert (status.state, status.note) == ("inactive", 'enable(matmul="auto") turns it on')


def replaced(name):
    """Return the replacement of a stand-in, a function that makes its arguments, and the stand-in's calls.

    Only the stand-in gives its result.
    """
    make, arguments_of, keywords = CALLS[name]
    seen = []

    def original(*arguments, **keywords):
        seen.append((arguments, keywords))
        return "original" if seen else gemm_4bit  # noqa: F821 (the name tells bitsandbytes 0.50)

    return functools.partial(make(target_like("unsloth", name, "matmul"), original), **keywords), arguments_of, seen


# What makes a replacement, and what the library gives it, of x, the packed weight and its state, and by name.
CALLS = {
    "gemm": (
        gemm,
        lambda x, w, s: (x, w, list(s.shape), s.state2.absmax, 64, "nf4", None, s.absmax, s.state2.code, s.offset),
        {},
    ),
    "matmul": (matmul_4bit, lambda x, w, s: (x, w, s, None, None), {}),
    "gemv": (gemv, lambda x, w, s: (x, w, None, False, False, s), {}),
    "fast_gemv": (fast_gemv, lambda x, w, s: (x, w, s, None), {}),
    "rows": (gemv_rows, lambda x, w, s: (x, w, s, None), {}),
    "lora": (matmul_lora, lambda x, w, s: (x, w, s, None, None, None, None), {"use_global_buffer": False}),
    "lora by position": (matmul_lora, lambda x, w, s: (x, w, s, None, None, None, None, False), {}),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="x is on the CPU on purpose")
@pytest.mark.parametrize("name", CALLS)
def test_refused_on_the_cpu_with_untouched_arguments(name, on_with_matmul):
    replacement, arguments_of, seen = replaced(name)
    packed, state = quantized((128, 256), torch.bfloat16, "cpu")
    arguments = arguments_of(torch.randn(1, 1, 256, dtype=torch.bfloat16), packed, state)
    assert replacement(*arguments) == "original"
    assert all(a is b for a, b in zip(seen[0][0], arguments, strict=True)) and seen[0][1] == replacement.keywords
    assert counters.fallbacks == {(f"unsloth.test.{name}", Reason.NOT_CUDA): 1}


@pytest.mark.parametrize("name", ["gemv", "fast_gemv", "matmul", "rows", "lora"])
def test_reasons_of_a_state(name, device, on_with_matmul):
    replacement, arguments_of, seen = replaced(name)
    packed, state = quantized((128, 256), torch.bfloat16, device)
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16, device=device)
    with_gradient = x.clone().requires_grad_()
    more = torch.randn(1, 2, 256, dtype=torch.bfloat16, device=device) if "gemv" in name else with_gradient
    for each_x, each_state in ((x, None), (x, [1, 2]), (more, state), (with_gradient, state)):
        replacement(*arguments_of(each_x, packed, each_state))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        replacement(*arguments_of(x, packed, state))
    assert len(seen) == 5
    assert counters.fallbacks == {
        (f"unsloth.test.{name}", Reason.NOT_4BIT): 2,
        (f"unsloth.test.{name}", Reason.MATMUL_OPERANDS): 2,
        (f"unsloth.test.{name}", Reason.DISPATCH_MODE): 1,
    }


@pytest.mark.parametrize("trained", ["A", "B"])
def test_an_adapter_of_which_one_factor_is_trained_is_the_originals(trained, device, on_with_matmul):
    """The fused matmul has no gradient."""
    replacement, _, seen = replaced("lora")
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16, device=device)
    a, b = (
        torch.zeros(shape, device=device).requires_grad_(name == trained)
        for name, shape in (("A", (8, 256)), ("B", (128, 8)))
    )
    packed, state = quantized((128, 256), torch.bfloat16, device)
    assert replacement(x, packed, state, a, b, 1.0) == "original"
    assert seen and counters.fallbacks == {("unsloth.test.lora", Reason.MATMUL_OPERANDS): 1}


def test_a_bias_that_takes_part_in_dispatch_is_the_originals(on_with_matmul):
    """The numbers of such a bias do not lie at its address."""
    replacement, _, seen = replaced("matmul")
    packed, state = quantized((128, 256), torch.bfloat16, "cpu")
    bias = TwoTensor(torch.ones(128).bfloat16(), torch.ones(128).bfloat16())
    replacement(torch.randn(1, 256).bfloat16(), packed, state, None, bias)
    assert seen and counters.fallbacks == {("unsloth.test.matmul", Reason.TENSOR_SUBCLASS): 1}


@pytest.mark.parametrize("name", ["gemv", "matmul"])
def test_an_input_of_a_class_of_its_own_is_the_originals(name, on_with_matmul):
    replacement, arguments_of, seen = replaced(name)
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16).as_subclass(Plain)
    replacement(*arguments_of(x, *quantized((128, 256), torch.bfloat16, "cpu")))
    assert seen and counters.fallbacks == {(f"unsloth.test.{name}", Reason.TENSOR_SUBCLASS): 1}


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_autocast_to_another_dtype_is_the_originals(name, monkeypatch, on_with_matmul):
    """The original multiplies and rounds in the dtype of autocast."""
    monkeypatch.setattr(FusedMatmul, "run", lambda self, *arguments: "product")
    packed, state = quantized((128, 256), torch.bfloat16, "cpu", nested=False)
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    if name == "matmul":
        replacement, arguments_of, _ = replaced(name)
        arguments = arguments_of(x, packed, state)
    else:
        replacement = dequant_linear(target_like("bitsandbytes"), lambda *arguments: "original")
        arguments = (x, packed, state.shape, state.absmax, 64, "nf4")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            result = replacement(*arguments)
        assert (isinstance(result, str) and result == "product") == (dtype is torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitsandbytes runs its CPU kernels here")
def test_bitsandbytes_gives_its_own_bits_on_the_cpu(on_with_matmul):
    """The real functions run. A CPU has no fused matmul, so the result has the original's bits."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 128, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).to("cpu")
    x = torch.randn(1, 256, dtype=torch.bfloat16)
    packed, state = quantized((128, 256), torch.bfloat16, "cpu")
    with torch.no_grad():
        got, one = layer(x), F.gemv_4bit(x, packed, state=state)
        assert counters.fallbacks["bitsandbytes.functional.gemv_4bit", Reason.NOT_CUDA] == 1
        nf4_patch.disable()
        assert torch.equal(got, layer(x))
        assert torch.equal(one, F.gemv_4bit(x, packed, state=state))


def test_a_product_that_cannot_be_compiled_is_counted_and_strict_raises(monkeypatch, device):
    monkeypatch.setattr(FusedMatmul, "run", lambda self, *arguments: Reason.KERNEL_FAILED)
    replaced = dequant_linear(target_like("bitsandbytes"), lambda *arguments: "the original")
    packed, state = quantized((64, 128), torch.bfloat16, device, nested=False)
    x = torch.randn(4, 128, device=device).bfloat16()
    monkeypatch.setattr(switch, "on", True)
    monkeypatch.setattr(switch.gates["matmul"], "on", True)
    for strict in (False, True):
        monkeypatch.setattr(switch, "strict", strict)
        with pytest.raises(FallbackError) if strict else contextlib.nullcontext():
            y = replaced(x, packed, state.shape, state.absmax, 64, "nf4")
    assert torch.equal(y, torch.nn.functional.linear(x, expected(packed, state)))
    assert counters.fallbacks["bitsandbytes.test.test", Reason.KERNEL_FAILED] == 2
