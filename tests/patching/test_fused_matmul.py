"""The switch of the fused matmul, and what its replacements in bitsandbytes and Unsloth do with every call. No GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from bitsandbytes.autograd import _functions as autograd
from oracle import quantized
from subprocess_python import INTERPRETED, python

import nf4_patch
from nf4_patch.config import Config, ConfigError
from nf4_patch.patching import fused_matmul
from nf4_patch.patching.adapters.bitsandbytes import replace_gemm, replace_gemv, replace_matmul_4bit
from nf4_patch.patching.adapters.unsloth import replace_fast_gemv, replace_gemv_rows, replace_matmul_lora
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch


@pytest.fixture
def on_auto():
    """Switched on; what falls back is what these tests look at."""
    nf4_patch.enable(matmul="auto")
    counters.reset()
    yield
    nf4_patch.disable()
    counters.reset()


def rows_of_status():
    return {target.name: target for target in nf4_patch.status().targets}


def test_switch_and_variable(monkeypatch):
    monkeypatch.delenv("NF4_PATCH_MATMUL", raising=False)
    assert Config.read().matmul == "off"
    try:
        for variable, argument, wanted in [
            (None, None, "off"), ("auto", None, "auto"), ("auto", "off", "off"), ("off", "auto", "auto"),
            ("", None, "off"), ("AUTO", None, "auto"),
        ]:  # fmt: skip
            if variable is None:
                monkeypatch.delenv("NF4_PATCH_MATMUL", raising=False)
            else:
                monkeypatch.setenv("NF4_PATCH_MATMUL", variable)
            assert nf4_patch.enable(matmul=argument)
            assert switch.matmul == wanted, (variable, argument)
    finally:
        nf4_patch.disable()
    for bad in ({"NF4_PATCH_MATMUL": "on"}, {"NF4_PATCH_MATMUL": "1"}):
        with pytest.raises(ConfigError, match=r"NF4_PATCH_MATMUL=.*allowed: off, auto"):
            Config.read(bad)
    with pytest.raises(ConfigError, match="NF4_PATCH_MATMUL='always'"):
        nf4_patch.enable(matmul="always")


def test_status_says_that_it_is_inactive(monkeypatch):
    monkeypatch.delenv("NF4_PATCH_MATMUL", raising=False)
    nf4_patch.enable()
    try:
        row = rows_of_status()["bitsandbytes.functional.gemv_4bit"]
        assert row.state == "inactive"
        assert row.note == 'enable(matmul="auto") puts it in place'
        nf4_patch.enable(matmul="auto")
        assert rows_of_status()["bitsandbytes.functional.gemv_4bit"].state == "patched"
    finally:
        nf4_patch.disable()


def test_it_is_in_place_only_where_it_is_switched_on(monkeypatch):
    """Switched off, the fused matmul costs nobody a Python frame, eager or traced; who copied the name gets both."""
    monkeypatch.delenv("NF4_PATCH_MATMUL", raising=False)
    original = autograd.matmul_4bit
    late = ModuleType("imported_while_off")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    try:
        nf4_patch.enable()
        assert autograd.matmul_4bit is bnb.matmul_4bit is original
        late.multiply = bnb.matmul_4bit
        with nf4_patch.enabled(matmul="auto"):
            assert autograd.matmul_4bit is bnb.matmul_4bit is late.multiply is not original
            assert original is autograd.matmul_4bit.__wrapped__
            nf4_patch.enable(matmul="off")
            assert autograd.matmul_4bit is bnb.matmul_4bit is late.multiply is original
        assert nf4_patch.is_enabled() and autograd.matmul_4bit is original
        assert rows_of_status()["bitsandbytes.autograd._functions.matmul_4bit"].state == "inactive"
    finally:
        nf4_patch.disable()
    assert autograd.matmul_4bit is bnb.matmul_4bit is late.multiply is original


def calls_of(name):
    """A stand-in for an original: its arguments, and a result that only it gives."""
    seen = []
    if name == "gemm":

        def original(A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset):
            seen.append((A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset))
            return "original"
    elif name == "gemv":

        def original(A, B, out, transposed_A, transposed_B, state):
            seen.append((A, B, out, transposed_A, transposed_B, state))
            return "original"
    elif name == "matmul":

        def original(A, B, quant_state, out, bias):
            seen.append((A, B, quant_state, out, bias))
            return "original" if seen else gemm_4bit  # noqa: F821 (the name tells bitsandbytes 0.50)
    elif name == "lora":

        def original(X, W, W_quant, A, B, s, out, use_global_buffer):
            seen.append((X, W, W_quant, A, B, s, out, use_global_buffer))
            return "original"
    else:

        def original(X, W, quant_state, out):
            seen.append((X, W, quant_state, out))
            return "original"

    return original, seen


def call(name, replacement, x, packed, state, out=None):
    if name == "gemm":
        second = (state.absmax, state.state2.code, state.offset)
        arguments = (x, packed, list(state.shape), state.state2.absmax, 64, "nf4", None, *second)
    elif name == "gemv":
        arguments = (x, packed, out, False, False, state)
    elif name == "matmul":
        arguments = (x, packed, state, out, None)
    elif name == "lora":
        arguments = (x, packed, state, None, None, None, out)
        return replacement(*arguments, use_global_buffer=False), (*arguments, False)
    else:
        arguments = (x, packed, state, out)
    return replacement(*arguments), arguments


MAKERS = {
    "gemm": replace_gemm,
    "matmul": replace_matmul_4bit,
    "gemv": replace_gemv,
    "fast_gemv": replace_fast_gemv,
    "rows": replace_gemv_rows,
    "lora": replace_matmul_lora,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="x is on the CPU on purpose")
@pytest.mark.parametrize("name", MAKERS)
def test_refused_on_the_cpu_with_untouched_arguments(name, on_auto):
    original, seen = calls_of(name)
    replacement = MAKERS[name](name, original)
    packed, state = quantized((128, 256), torch.bfloat16, "cpu")
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    result, arguments = call(name, replacement, x, packed, state)
    assert result == "original"
    assert all(a is b for a, b in zip(seen[0], arguments, strict=True))
    assert counters.fallbacks == {(name, Reason.NOT_CUDA): 1}
    # off: the original at once, nothing counted
    nf4_patch.enable(matmul="off")
    counters.reset()
    assert call(name, replacement, x, packed, state)[0] == "original"
    nf4_patch.disable()
    assert call(name, replacement, x, packed, state)[0] == "original"
    assert len(seen) == 3
    assert not counters.fallbacks


@pytest.mark.parametrize("name", ["gemv", "fast_gemv", "matmul", "rows", "lora"])
def test_reasons_of_a_state(name, on_auto):
    original, seen = calls_of(name)
    replacement = MAKERS[name](name, original)
    packed, state = quantized((128, 256), torch.bfloat16, "cpu")
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    more = torch.randn(1, 2, 256, dtype=torch.bfloat16)
    mode = torch.utils.flop_counter.FlopCounterMode(display=False)
    call(name, replacement, x, packed, None)
    call(name, replacement, x, packed, [1, 2])
    if "gemv" in name:
        call(name, replacement, more, packed, state)
    else:
        call(name, replacement, x.clone().requires_grad_(), packed, state)
    call(name, replacement, x.clone().requires_grad_(), packed, state)
    with mode:
        call(name, replacement, x, packed, state)
    assert len(seen) == 5
    assert counters.fallbacks == {
        (name, Reason.NOT_4BIT): 2,
        (name, Reason.MATMUL_OPERANDS): 2,
        (name, Reason.DISPATCH_MODE): 1,
    }


def test_an_error_of_ours_runs_the_original(on_auto, monkeypatch):
    def broken(*arguments, **kwargs):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("nf4_patch.patching.fused_matmul.FusedMatmul.run", broken)
    original, _ = calls_of("gemv")
    packed, state = quantized((128, 256), torch.bfloat16, "cpu")
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    assert call("gemv", replace_gemv("gemv", original), x, packed, state)[0] == "original"
    assert counters.fallbacks == {("gemv", Reason.INTERNAL_ERROR): 1}
    assert counters.errors == {"ZeroDivisionError: on purpose": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitsandbytes runs its CPU kernels here")
def test_bitsandbytes_gives_its_own_bits_on_the_cpu(on_auto):
    """The real functions: a CPU has no fused matmul, so the result is the original's to the bit."""
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


def test_up_to_64_rows_are_measured(monkeypatch):
    """The answer for a layer of Llama on an H200."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fused_matmul.is_measured.cache_clear()
    assert fused_matmul.is_measured(0, 64, 4096, 4096)
    assert not fused_matmul.is_measured(0, 65, 4096, 4096)
    fused_matmul.is_measured.cache_clear()


OLD = Path(sys.prefix) / "unsloth-2026.9.7"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs it: tests/gpu/test_small_m_layers.py")
@pytest.mark.parametrize("release", ["2026.10.9", pytest.param("2026.9.7", marks=pytest.mark.full)])
@pytest.mark.parametrize("order", [pytest.param("enable; unsloth", marks=pytest.mark.full), "unsloth; enable"])
def test_unsloth_row_is_in_every_holder(release, order, tmp_path):
    path = OLD if release == "2026.9.7" else None
    if (path is not None and not path.is_dir()) or importlib.util.find_spec("unsloth") is None:
        assert not os.environ.get("CI"), f"unsloth {release} is missing: scripts/test installs it"
        pytest.skip(f"unsloth {release} is not installed: scripts/test installs it")
    attribute = "fast_gemv" if path else "_fast_gemv_bnb"
    first, second = (
        {"enable": "import nf4_patch; nf4_patch.enable(matmul='auto')", "unsloth": "import unsloth"}[word]
        for word in order.split("; ")
    )
    code = f"""
{INTERPRETED}
{first}
{second}
import torch, nf4_patch, unsloth.kernels
from unsloth.kernels import utils
name = "unsloth.kernels.utils.{attribute}"
def row():
    return next(t for t in nf4_patch.status().targets if t.name == name)
assert row().state == "patched", nf4_patch.status()
x, w = torch.randn(1, 1, 8), torch.randn(8, 4)
for holder in (utils, unsloth.kernels):
    assert torch.equal(holder.fast_gemv(x, w, None), x @ w)
assert row().fallbacks == {{"NOT_4BIT": 2}}, row()
lora = next(t for t in nf4_patch.status().targets if t.name == "unsloth.kernels.utils.matmul_lora")
assert lora.state == "patched", nf4_patch.status()
from unsloth.kernels import fast_lora
assert fast_lora.matmul_lora is utils.matmul_lora
a, b = torch.randn(2, 8), torch.randn(4, 2)
got = fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5)
nf4_patch.disable()
assert torch.equal(got, fast_lora.matmul_lora(x, w.t(), None, a, b, 0.5))
assert "nf4_patch" not in fast_lora.matmul_lora.__code__.co_filename
assert torch.equal(utils.fast_gemv(x, w, None), x @ w)
assert row().fallbacks == {{"NOT_4BIT": 2}}, row()
assert "nf4_patch" not in utils.{attribute}.__code__.co_filename
assert "nf4_patch" not in unsloth.kernels.fast_gemv.__code__.co_filename
"""
    python(code, path=path, cwd=tmp_path, UNSLOTH_ALLOW_CPU="1")
