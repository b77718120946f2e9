"""The patch in the real bitsandbytes: numbers, arguments, reasons, and the direct functions."""

from __future__ import annotations

import contextlib
import re

import bitsandbytes as bnb
import bitsandbytes.functional as F
import numpy
import pytest
import torch
from fuzz import FAULTS, broken
from oracle import expected, quantized
from target import TARGET, fallbacks, linear, replaced_by, same, step

import nf4_patch
from nf4_patch.nf4 import codes, runtime
from nf4_patch.patching import guards, op
from nf4_patch.patching.counters import FallbackError, counters
from nf4_patch.patching.quant_state import fields_of
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch
from nf4_patch.patching.targets import TARGETS

NESTED = pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])


def test_linear4bit_forward_and_backward_are_bit_equal(on):
    layer = linear(on)
    with_patch = step(layer, on)
    hits = nf4_patch.status().hits
    nf4_patch.disable()
    assert same(with_patch, step(layer, on))
    assert nf4_patch.status().hits == hits == (2 if on.type == "cuda" else 1)  # a CPU forward never dequantizes


def test_dequant_linear_fallback(on, linear_op):
    """bitsandbytes 0.50's forward."""
    import bitsandbytes.backends.cuda.ops as cuda_ops

    nf4_patch.enable()
    name = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"
    bias = torch.randn(96, device=on, dtype=torch.float16)
    for nested, quant_type in ((True, "nf4"), (True, "fp4"), (False, "nf4"), (False, "fp4")):
        packed, state = quantized((96, 256), torch.bfloat16, on, nested=nested, quant_type=quant_type)
        x = torch.randn(5, 256, device=on, dtype=torch.float16)
        state.dtype = torch.float16  # the weight is decoded to the activation's dtype, not to the state's
        want = torch.nn.functional.linear(x, expected(packed, state), bias)
        absmax, nest = state.absmax, {}
        if nested:
            absmax = state.state2.absmax
            nest = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code, "absmax_offset": state.offset}
        got = cuda_ops._dequant_linear_fallback(x, packed, [96, 256], absmax, 64, quant_type, bias, **nest)
        assert torch.equal(got, want)
    assert counters.hits(name) == 4 and not fallbacks(name)
    wrong = torch.randn(5, 255, device=on, dtype=torch.float16)
    with pytest.raises(RuntimeError) as own:
        torch.nn.functional.linear(wrong, want.new_empty(96, 256), bias)
    with pytest.raises(RuntimeError) as raised:  # by the matmul, once: the original is not tried as well
        cuda_ops._dequant_linear_fallback(wrong, packed, [96, 256], absmax, 64, quant_type, bias)
    assert str(raised.value) == str(own.value)
    assert counters.hits(name) == 5 and not fallbacks(name) and not counters.errors


@pytest.mark.parametrize(
    ("shape", "storage"),
    [((96, 256), torch.uint8), ((96, 256), torch.bfloat16), ((2, 2), torch.bfloat16), ((2, 4), torch.float32),
     ((1, 2), torch.uint8), ((2, 1), torch.uint8)],
)  # fmt: skip
def test_how_the_bytes_lie_does_not_matter_to_the_linear_functions(on, linear_op, monkeypatch, shape, storage):
    """[bytes, 1], [1, bytes], and one element, which is both: the same product; dequantize_4bit transposes what has one row."""
    import bitsandbytes.backends.cuda.ops as cuda_ops

    nf4_patch.enable()
    name = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"
    packed, state = quantized(shape, torch.bfloat16, on, storage=storage)
    raw = packed.view(torch.uint8).view(-1, 1)
    nf4_patch.disable()
    weight = F.dequantize_4bit(raw, state)
    weight = weight.t() if raw.shape[0] == 1 else weight
    nf4_patch.enable()
    assert weight.shape == shape
    nest = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code, "absmax_offset": state.offset}
    x = torch.randn(600, shape[1], device=on, dtype=torch.bfloat16)  # too many to multiply in 4 bits on any GPU
    for each in (packed, packed.t(), packed.view(-1)):
        for function in (cuda_ops._dequant_linear_fallback, torch.ops.bitsandbytes.gemm_4bit):
            got = function(x, each, shape, state.state2.absmax, 64, "nf4", **nest)
            assert torch.equal(got, torch.nn.functional.linear(x, weight))
        for dequantize in (F.dequantize_4bit, nf4_patch.dequantize_nf4):
            got = dequantize(each, state)
            assert torch.equal(got, weight.t() if each.shape[0] == 1 else weight)
        with torch.utils.flop_counter.FlopCounterMode(display=False):  # through the op
            assert torch.equal(F.dequantize_4bit(each, state), got)
        with monkeypatch.context() as on_a_cpu:  # by the formula
            on_a_cpu.setattr(runtime, "DEVICE", "cuda")
            assert torch.equal(op.dequantize(*fields_of(each, state)), got)
            assert torch.equal(nf4_patch.dequantize_nf4(each, state, weight.new_empty(shape)), got)
    layer = bnb.nn.Linear4bit(shape[1], shape[0], bias=False, compute_dtype=torch.bfloat16, quant_storage=storage)
    layer = layer.to(on)
    results = []
    for switch_it in (nf4_patch.enable, nf4_patch.disable):
        switch_it()
        with torch.no_grad():
            results.append(layer(x))
    assert torch.equal(*results)
    assert not fallbacks(name) and not fallbacks()


SAID_HALF = "state2 said fp16"
UNSUPPORTED = FAULTS | {
    SAID_HALF: ("state2.dtype", lambda dtype: torch.float16, ("STATE_FIELDS",)),
    **{f"{field} {type(junk).__name__}": (field, lambda _, junk=junk: junk, (reason,)) for field, junk, reason in (
        ("blocksize", "64", "BLOCKSIZE"), ("blocksize", torch.zeros(2), "BLOCKSIZE"), ("state2.blocksize", None, "BLOCKSIZE"),
        ("state2.blocksize", 256.0, "BLOCKSIZE"), ("quant_type", ["nf4"], "QUANT_TYPE"), ("dtype", "float16", "OUTPUT_DTYPE"),
        ("dtype", numpy.zeros(2), "OUTPUT_DTYPE"), ("shape", "64x128", "SIZE_MISMATCH"), ("shape", 8192, "SIZE_MISMATCH"),
        ("shape", (64.0, 128.0), "SIZE_MISMATCH"), ("shape", [-64, -128], "SIZE_MISMATCH"))},
    **{f"{field} sparse": (field, lambda t: t.to_sparse(), ("NOT_CONTIGUOUS",))
       for field in ("packed", "absmax", "state2.absmax", "offset")},
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", [name for name, row in UNSUPPORTED.items() if row[2] != (None,) and "freed" not in name]
)
def test_what_is_unsupported_has_a_name_and_runs_the_original(on, fault, monkeypatch):
    packed, state = broken(UNSUPPORTED[fault], *quantized((64, 128), torch.float16, on))
    seen = []

    def original(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        seen.append((A, quant_state))
        return "the original's result"

    with replaced_by(original):
        assert F.dequantize_4bit(packed, state) == "the original's result"
        assert seen[0][0] is packed and seen[0][1] is state
        ((reason, times),) = fallbacks().items()
        assert reason.name in UNSUPPORTED[fault][2] and times == 1 and counters.hits(TARGET) == 0
        if not reason.is_expected:
            monkeypatch.setattr(switch, "strict", True)
            with pytest.raises(FallbackError):
                F.dequantize_4bit(packed, state)


def test_tables_say_what_a_user_reads():
    for reason in Reason:
        assert len(reason.sentence) > 20 and not reason.sentence.endswith("."), reason
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert all(target.covers and target.releases and target.tested for target in TARGETS)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_tables_are_those_of_bitsandbytes(quant_type, device):
    """In fp32 whatever the default dtype is at the first use, which is when a table is made."""
    want = F.get_4bit_type(quant_type, device=device)
    packed, state = quantized((64, 128), torch.float16, device, quant_type=quant_type)
    weight = expected(packed, state)
    dtype = torch.get_default_dtype()
    codes._remembered.clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(nf4_patch.dequantize_nf4(packed, state), weight)
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(codes.remembered_code(quant_type, device), want)
    assert torch.equal(nf4_patch.dequantize_nf4(packed, state), weight)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_arguments_that_agree_with_the_state_are_hits(name, on):
    packed, state = quantized((64, 128), torch.float16, on, blocksize=128, quant_type=name)
    want = expected(packed, state)
    counters.reset()
    wrapper = getattr(F, f"dequantize_{name}")
    out = torch.empty_like(want)
    results = [
        wrapper(packed, state),
        wrapper(packed, quant_state=state, out=out),
        wrapper(packed.t(), state).t(),
        F.dequantize_4bit(packed, state, None, None, None, name),
        F.dequantize_4bit(packed, state, state.absmax, out, 128, name),
        F.dequantize_4bit(packed, state, blocksize=64),  # the default of some releases, written out
        F.dequantize_4bit(packed, state, quant_type="fp4"),  # the default written out
        F.dequantize_4bit(packed, state, quant_type=name),
    ]
    assert same(results, [want] * len(results))
    assert results[1] is out and results[4] is out
    assert counters.hits(TARGET) == len(results) and not fallbacks()


def test_arguments_that_differ_from_the_state_run_the_original(on):
    packed, state = quantized((64, 128), torch.float16, on, blocksize=128, quant_type="fp4")
    want = expected(packed, state)
    counters.reset()
    for arguments in ({"absmax": state.absmax.clone()}, {"blocksize": 256}, {"quant_type": "nf4"}):
        result = F.dequantize_4bit(packed, state, **arguments)
        if on.type == "cuda":
            assert torch.equal(result, want)
    assert fallbacks() == {Reason.ARGUMENTS: 3}
    for args, kwargs in (((None,) * 5, {}), ((None,), {"absmax": None}), ((), {"scale": 1})):
        with pytest.raises(TypeError):
            F.dequantize_4bit(packed, state, *args, **kwargs)
    assert fallbacks() == {Reason.ARGUMENTS: 6}


@NESTED
def test_cpu_packing_has_its_name(nested, device):
    """A weight that bitsandbytes repacked for a CPU with AVX512-BF16."""
    convert = getattr(F, "_convert_weight_packed_for_cpu", None)
    if convert is None:
        pytest.skip("this release of bitsandbytes has no CPU packing")
    packed, state = convert(*quantized((64, 128), torch.bfloat16, torch.device("cpu"), nested=nested))
    with nf4_patch.enabled():
        counters.reset()
        with contextlib.suppress(Exception):  # what the original makes of it is its own
            F.dequantize_4bit(packed, state)
        assert fallbacks() == {Reason.CPU_PACKING: 1}
        with contextlib.suppress(Exception):
            torch.compile(lambda w: F.dequantize_4bit(w, state), backend="eager")(packed)
        assert counters.hits(TARGET) == 0
    counters.reset()
    with pytest.raises(ValueError, match=Reason.CPU_PACKING.sentence):
        nf4_patch.dequantize_nf4(packed, state)


def test_an_attribute_error_is_taken_for_a_missing_field_only_where_one_is_missing(on, monkeypatch):
    packed, state = quantized((64, 128), torch.float16, on)

    def mistaken(*args):
        raise AttributeError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr(guards, "why_not", mistaken)
        F.dequantize_4bit(packed, state)
    assert fallbacks() == {Reason.INTERNAL_ERROR: 1}
    counters.reset()
    del state.absmax
    with pytest.raises(AttributeError):  # the original's own
        F.dequantize_4bit(packed, state)
    assert fallbacks() == {Reason.STATE_FIELDS: 1}
    with pytest.raises(ValueError, match=Reason.STATE_FIELDS.sentence):
        nf4_patch.dequantize_nf4(packed, state)


# The direct functions


@NESTED
@pytest.mark.parametrize("interpreted", [True, False], ids=["kernel", "reference"])
def test_direct_api(nested, interpreted, monkeypatch):
    """The kernel; on a CPU without the interpreter the reference."""
    device = torch.device("cuda" if torch.cuda.is_available() and interpreted else "cpu")
    if not interpreted:
        monkeypatch.setattr(runtime, "DEVICE", "cuda")
    packed, state = quantized((96, 128), torch.bfloat16, device, nested=nested)
    want = expected(packed, state)
    assert torch.equal(nf4_patch.dequantize_nf4(packed, state), want)
    assert torch.equal(nf4_patch.dequantize_nf4(packed.t(), state), want.t())
    out = torch.empty_like(want)
    assert nf4_patch.dequantize_nf4(packed, state, out) is out and torch.equal(out, want)
    layer = linear(device, compress_statistics=nested)
    assert torch.equal(nf4_patch.triton_dequantize_nf4(layer), expected(layer.weight.data, layer.weight.quant_state))


@pytest.mark.parametrize("interpreted", [True, False])
def test_direct_api_raises_value_errors_that_say_what_was_found(interpreted, monkeypatch, device):
    if not interpreted:
        monkeypatch.setattr(runtime, "DEVICE", "cuda")
    packed, state = quantized((96, 128), torch.float16, device)
    found = r"packed torch.uint8 \[100, 1\].*blocksize 64, shape torch.Size\(\[96, 128\]\)"
    for arguments, words in (
        ((None, state), "weight is a NoneType"),
        (("w", state), "weight is a str"),
        ((packed, None), "quant_state is a NoneType"),
        ((packed, state, "x"), "out is a str"),
        ((packed, state, torch.empty(3)), Reason.OUT_MISMATCH.sentence),
        ((packed[:100], state), f"{re.escape(Reason.SIZE_MISMATCH.sentence)}.*{found}"),
    ):
        with pytest.raises(ValueError, match=words):
            nf4_patch.dequantize_nf4(*arguments)
    with pytest.raises(ValueError, match="Linear has no quantized weight"):
        nf4_patch.triton_dequantize_nf4(torch.nn.Linear(4, 4))
    for field, value, reason in (
        ("absmax", None, Reason.STATE_FIELDS), ("offset", 0.5, Reason.STATE_FIELDS), ("blocksize", None, Reason.BLOCKSIZE),
        ("shape", None, Reason.SIZE_MISMATCH), ("dtype", None, Reason.OUTPUT_DTYPE), ("quant_type", None, Reason.QUANT_TYPE),
    ):  # fmt: skip
        packed, state = quantized((96, 128), torch.float16, device)
        setattr(state, field, value)
        with pytest.raises(ValueError, match=rf"{re.escape(reason.sentence)}.*packed torch\.uint8"):
            nf4_patch.dequantize_nf4(packed, state)
    packed, state = quantized((96, 128), torch.float16, device)
    state.code = 3  # never read
    assert torch.equal(nf4_patch.dequantize_nf4(packed, state), expected(packed, state))
