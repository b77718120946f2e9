"""The fused matmul without a GPU: its switch, its table, its reasons, and its PTX compiled for every GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from bitsandbytes.autograd import _functions as autograd
from oracle import fields_of, quantized
from subprocess_python import INTERPRETED, python

import nf4_patch
from nf4_patch.config import Config, ConfigError
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import reference
from nf4_patch.nf4.layout import Layout
from nf4_patch.nf4.matmul import hopper, kernels, launch, small_m
from nf4_patch.nf4.matmul import reference as matmul_reference
from nf4_patch.nf4.matmul.tuning import SMALL_M_CANDIDATES, SMALL_M_ROWS, TILE_COUNTS, HopperConfig
from nf4_patch.patching import fused_matmul
from nf4_patch.patching.adapters.bitsandbytes import replace_gemm, replace_gemv, replace_matmul_4bit
from nf4_patch.patching.adapters.unsloth import replace_fast_gemv, replace_gemv_rows, replace_matmul_lora
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch
from nf4_patch.patching.targets import TARGETS

H200 = (9, 0)
PRODUCTS = [target.name for target in TARGETS if target.only == "matmul"]


@pytest.fixture
def refusing():
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


def test_status_says_that_it_stands_by(monkeypatch):
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
def test_refused_on_the_cpu_with_untouched_arguments(name, refusing):
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
def test_reasons_of_a_state(name, refusing):
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


def test_an_error_of_ours_runs_the_original(refusing, monkeypatch):
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
def test_bitsandbytes_gives_its_own_bits_on_the_cpu(refusing):
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


def test_table_of_measured_sizes(monkeypatch):
    """Every Llama layer up to 64 rows on the H200, large ones past them; nothing on a GPU that was not measured."""
    monkeypatch.setattr(hopper, "RELEASE", hopper.RELEASES[0])
    shapes = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672)]
    for n, k in shapes:
        for m in (1, 2, 8, 9, 16, 17, 32, 33, 64):
            assert launch.config_for(H200, m, n, k) is not None, (m, n, k)
        for m in (65, 128, 513, 4096):
            config = launch.config_for(H200, m, n, k)
            assert isinstance(config, HopperConfig) if m <= 128 and n * k >= 26_000_000 else config is None
        for capability in ((7, 5), (8, 0), (8, 9), (10, 0), (12, 0)):
            assert launch.config_for(capability, 1, n, k) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H200)
    fused_matmul.is_measured.cache_clear()
    assert fused_matmul.is_measured(0, 64, 4096, 4096)
    assert not fused_matmul.is_measured(0, 65, 4096, 4096)
    fused_matmul.is_measured.cache_clear()


def test_the_first_fitting_row_is_reached():
    """No row of the table is dead: each is the first for some size."""
    found = {
        id(launch.config_for(H200, m, n, k)) for m in (1, 16, 64) for n in (1024, 4096, 14336) for k in (4096, 14336)
    }
    assert found == {id(row.config) for row in SMALL_M_ROWS}


def test_every_length_of_a_prompt_shares_six_kernels():
    """1 to 64 rows of one layer: the PTX follows the tiles, not the rows."""
    for n, k in [(4096, 4096), (14336, 4096), (4096, 14336)]:
        found = {
            small_m.plan(launch.config_for(H200, m, n, k), 132, m, n, k, False, True, False).ptx for m in range(1, 65)
        }
        assert len(found) <= 6, (n, k, len(found))


def test_plan_covers_every_row_once():
    for row in SMALL_M_ROWS:
        for n in (1, 17, 1000, 4096, 50001):
            for k in (64, 4096, 14336):
                cut = small_m.plan(row.config, 132, row.m, n, k, False, True, False)
                assert 1 <= cut.sm_partitions <= -(-n // row.config.rows)
                assert cut.ctas % (cut.sm_partitions * cut.split_k) == 0
                assert cut.split_k <= -(-k // 256)


def test_bf16_is_refused_before_sm_80(monkeypatch):
    monkeypatch.setattr(kernels, "matmul_4bit_kernel", SimpleNamespace())
    monkeypatch.setattr(launch.triton.runtime, "JITFunction", SimpleNamespace)
    device = torch.device("cuda", 0)
    x = SimpleNamespace(is_cuda=True, device=device, numel=lambda: 4096)
    packed = SimpleNamespace(device=device, data_ptr=lambda: 256)
    layout = Layout(packed, None, None, None, None, None, 64, 0, (4096, 4096), None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def why(dtype, capability):
        x.dtype = dtype
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return launch.unsupported(x, layout)

    assert why(torch.bfloat16, (7, 5)).endswith(
        "bfloat16; tensor cores multiply it from compute capability 8.0 on, this GPU has 7.5"
    )
    assert why(torch.bfloat16, (8, 0)) == why(torch.float16, (7, 5)) == "no measured config for 1 rows on a GPU"


def test_candidates_are_offered_and_never_taken():
    for row in SMALL_M_CANDIDATES:
        assert row.capability == (7, 5)
        assert launch.config_for(row.capability, 1, 4096, 4096) is None
        assert launch.config_for(row.capability, row.m, 4096, 4096, SMALL_M_CANDIDATES) is row.config


class Compiler:
    """Stands where Triton's JITFunction stands and counts what it is asked to compile."""

    def __init__(self):
        self.compiled = []
        self.fails = False

    def warmup(self, *arguments, **values):
        if self.fails:
            self.compiled.append("failed")
            raise RuntimeError("ptxas says no")
        self.compiled.append(values.get("PTX", "sum"))
        return object()


@pytest.fixture
def compiler(monkeypatch):
    """An H200 without the H200: everything of matmul_4bit but the launches, which are recorded."""
    made, launches = Compiler(), []
    state = SimpleNamespace(compiler=made, launches=launches, capturing=False)
    monkeypatch.setattr(kernels, "matmul_4bit_kernel", made)
    monkeypatch.setattr(kernels, "sum_slices_kernel", made)
    monkeypatch.setattr(runtime, "_entries", {})
    monkeypatch.setattr(launch, "_kernels", {})
    entry = runtime.Entry(lambda *call: launches.append(call), (), (), "test")
    monkeypatch.setattr(runtime.Entry, "of", lambda compiled, values: entry)
    monkeypatch.setattr(runtime, "current_device", lambda: -1)  # what a CPU tensor's get_device() is
    monkeypatch.setattr(runtime, "current_stream", lambda index: 7)
    monkeypatch.setattr(runtime, "empty_strided_cuda", lambda *a: torch.empty_strided(*a[:2], dtype=a[2]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return state


def multiply(m, packed, state, **kwargs):
    n, k = state.shape
    x = torch.zeros(m, k, dtype=torch.bfloat16)
    layout = Layout(packed, *fields_of(state))
    return launch.matmul_4bit(x, layout, config=launch.config_for(H200, m, n, k), **kwargs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu/test_small_m.py asks the compiler itself")
def test_a_new_number_of_rows_compiles_nothing(compiler):
    packed, state = quantized((4096, 512), torch.bfloat16, "cpu")
    for count in TILE_COUNTS:
        multiply(8 * count, packed, state)
    compiled = list(compiler.compiler.compiled)
    assert len([ptx for ptx in compiled if ptx != "sum"]) == 6
    for m in range(1, 65):
        assert multiply(m, packed, state).shape == (m, 4096)
        assert compiler.launches[-1][0] > 0
    assert compiler.compiler.compiled == compiled
    assert len(compiler.launches) >= 70
    # inside a capture, too: nothing is compiled for a number of rows that is new there
    launch._kernels.clear()
    compiler.capturing = True
    multiply(5, packed, state)
    with pytest.raises(runtime.KernelUnavailable) as caught:
        multiply(5, packed, state, bias=torch.zeros(4096, dtype=torch.bfloat16))
    assert caught.value.reason == "GRAPH_CAPTURE"


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu/test_small_m.py asks the compiler itself")
def test_a_failed_compilation_is_remembered(compiler):
    packed, state = quantized((256, 512), torch.bfloat16, "cpu")
    compiler.compiler.fails = True
    for m in (1, 1, 2):
        with pytest.raises(runtime.KernelUnavailable, match="RuntimeError: ptxas says no") as caught:
            multiply(m, packed, state)
        assert caught.value.reason == "KERNEL_FAILED"
    assert compiler.compiler.compiled == ["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu/test_small_m.py looks at the numbers")
def test_out_is_what_is_written(compiler):
    packed, state = quantized((256, 512), torch.bfloat16, "cpu")
    out = torch.empty(4, 256, dtype=torch.bfloat16)
    assert multiply(4, packed, state, out=out) is out
    assert out.data_ptr() in compiler.launches[-1]
    assert packed.data_ptr() in compiler.launches[-1]


@pytest.mark.parametrize("nested", [True, False])
def test_reference_is_linear_with_the_rounded_weight(nested):
    packed, state = quantized((96, 256), torch.float16, "cpu", nested=nested)
    layout = Layout(packed, *fields_of(state))
    x, bias = torch.randn(5, 256).half(), torch.randn(96).half()
    weight = reference.dequantize(layout)
    want = (x.float() @ weight.float().t() + bias.float()).half()
    assert torch.equal(matmul_reference.matmul(x, layout, bias), want)


@pytest.mark.full
def test_every_row_compiles_for_every_gpu():
    """ptxas takes every row's PTX from sm_80 on, every candidate's for sm_75; no local memory, but for one 8-byte address
    past 56 rows of X on sm_80 and newer.

    There all 255 registers are taken (Triton 3.7.1; the weight then comes through as before, 2.0 to 3.0x at 64 rows).
    """
    done = python((Path(__file__).parents[1] / "support" / "compile_products.py").read_text())
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {int(line[0]) for line in lines} == {75, 80, 86, 89, 90, 100, 120}
    assert sum(line[0] == "75" for line in lines) == 3 * (2 + len(TILE_COUNTS))
    assert sum(line[0] == "90" for line in lines) >= 2 * len(SMALL_M_ROWS)
    for arch, registers, stack, shared, name in lines:
        assert int(shared) <= 48 * 1024, name
        assert int(registers) <= 255, name
        assert int(stack) <= (8 if name.startswith("x:64x") and arch != "75" else 0), (arch, name, "spills")


OLD = Path(sys.prefix) / "unsloth-2026.9.7"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs it: gpu/test_small_m.py")
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
