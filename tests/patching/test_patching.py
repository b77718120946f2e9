"""The patch in the real bitsandbytes: numbers, arguments, Reasons, and the direct functions."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading

import bitsandbytes as bnb
import bitsandbytes.functional as F
import numpy
import pytest
import torch
from alternation import crossed
from fuzz import FAULTS, broken
from oracle import expected, layout_of, quantized
from target import TARGET, Plain, Seen, fallbacks, linear, read_by_bitsandbytes, replaced_by, same, step
from threads import together
from torch._subclasses.fake_tensor import FakeTensorMode

import nf4_patch
from nf4_patch.matmul.product import FusedMatmul
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
    """Run bitsandbytes 0.50's forward."""
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


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("shape", "storage"),
    [((96, 256), torch.uint8), ((96, 256), torch.bfloat16), ((2, 2), torch.bfloat16), ((2, 4), torch.float32),
     ((1, 2), torch.uint8), ((2, 1), torch.uint8)],
)  # fmt: skip
def test_how_the_bytes_lie_does_not_matter_to_the_linear_functions(on, linear_op, monkeypatch, shape, storage):
    """Packed bytes [bytes, 1], [1, bytes] and a single element give the same product. dequantize_4bit transposes a
    weight with one row of bytes.
    """
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
    "fault",
    [name for name, row in UNSUPPORTED.items() if row[2] not in ((None,), ("CPU_PACKING",)) and "freed" not in name],
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


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("offset", 0.5, "STATE_FIELDS"), ("offset", 1, "STATE_FIELDS"), ("absmax", None, "STATE_FIELDS"), ("blocksize", None, "BLOCKSIZE"),
     ("blocksize2", None, "BLOCKSIZE"), ("shape", None, "SIZE_MISMATCH"), ("quant_type", ["nf4"], "QUANT_TYPE"),
     ("dtype", "float16", "OUTPUT_DTYPE")],
)  # fmt: skip
def test_values_that_the_op_s_schema_does_not_accept_have_a_reason(field, value, reason, device):
    weight = layout_of(*quantized((64, 128), torch.float16, device))
    assert op.dequantize(*weight._replace(**{field: value})) is Reason[reason]


def test_tables_say_what_a_user_reads():
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert all(target.covers and target.releases and target.tested for target in TARGETS)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_tables_are_those_of_bitsandbytes(quant_type, device):
    """The table is in fp32, whatever the default dtype is when the table is first used."""
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


def test_a_first_use_in_any_context_uploads_the_code_outside_of_it(device, monkeypatch):
    """The code is uploaded in a new thread. torch.compile's warm-up for a CUDA graph does not redirect this thread to
    the graph's memory.
    """
    monkeypatch.setattr(codes, "_remembered", {})
    threads, upload = [], codes.uploaded_code
    monkeypatch.setattr(codes, "uploaded_code", lambda *args: (threads.append(threading.get_ident()), upload(*args))[1])
    with torch.inference_mode(), torch.device("meta"), FakeTensorMode():
        code = codes.remembered_code("nf4", device)
    assert threads and threading.get_ident() not in threads
    assert not code.is_inference() and type(code) is torch.Tensor and code.device.type == device.type
    assert torch.equal(code, F.get_4bit_type("nf4", device=device))
    assert codes.remembered_code("nf4", device) is code and len(threads) == 1
    with pytest.raises(KeyError):
        codes.remembered_code("nf5", device)


def test_threads_that_need_a_code_for_the_first_time_get_one_tensor(device, monkeypatch):
    """A launch holds only the tensor's address. A second tensor in its place would free the memory that the launch reads."""
    monkeypatch.setattr(codes, "_remembered", {})
    both, upload, found = threading.Barrier(2, timeout=30), codes.uploaded_code, []
    monkeypatch.setattr(codes, "uploaded_code", lambda *args: (both.wait(), upload(*args))[1])
    together(*[lambda: found.append(codes.remembered_code("nf4", device))] * 2)
    assert len(found) == 2 and found[0] is found[1] is codes.remembered_code("nf4", device)


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


def evaluated_on_a_cpu(nested):
    """Return a layer that was evaluated on a CPU with AVX512-BF16, where bitsandbytes repacks its weight, and its
    earlier weight.
    """
    convert = getattr(F, "_convert_weight_packed_for_cpu", None)
    if convert is None:
        pytest.skip("this release of bitsandbytes has no CPU packing")
    layer = linear(torch.device("cpu"), 128, 64, weights=torch.bfloat16, compress_statistics=nested).eval()
    dense = expected(layer.weight.data, layer.weight.quant_state)
    layer.support_avx512bf16_for_cpu = False  # this CPU may have it
    layer.weight.data, layer.weight.quant_state = convert(layer.weight.data, layer.weight.quant_state)
    return layer, dense


def merged(layer):
    """Merge with peft."""
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(layer)
    model.is_loaded_in_4bit = True
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
    model.merge_adapter()


def by_transformers(layer):
    """Call ``model.dequantize()``."""
    integration = pytest.importorskip("transformers.integrations.bitsandbytes")
    integration.dequantize_bnb_weight(layer.weight, layer.weight.quant_state)


def weight_of(layer):
    return layer.weight, layer.weight.quant_state


DEQUANTIZED = {
    "dequantize_4bit": lambda layer: F.dequantize_4bit(*weight_of(layer)),
    "transposed": lambda layer: F.dequantize_4bit(layer.weight.t(), layer.weight.quant_state),
    "by keyword": lambda layer: F.dequantize_nf4(layer.weight, quant_state=layer.weight.quant_state),
    "compiled": lambda layer: torch.compile(F.dequantize_4bit, backend="eager")(*weight_of(layer)),
    "in a compiled function": lambda layer: torch.compile(
        lambda *weight: F.dequantize_4bit(*weight) + 1, backend="eager"
    )(*weight_of(layer)),
    "merge": merged,
    "transformers": by_transformers,
    "dequantize_nf4": lambda layer: nf4_patch.dequantize_nf4(*weight_of(layer)),
    "triton_dequantize_nf4": nf4_patch.triton_dequantize_nf4,
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("mode", "how"), crossed(itertools.product((True, False), "01"), DEQUANTIZED), ids=str)
def test_what_is_in_cpu_packing_is_not_dequantized(mode, how, fresh_dynamo, monkeypatch):
    """The result would be wrong without a message. The evaluation itself is right, with the patch and without."""
    nested, strict = mode
    monkeypatch.setenv("NF4_PATCH_STRICT", strict)
    layer, _ = evaluated_on_a_cpu(nested)
    nf4_patch.enable()
    with pytest.raises(ValueError, match="CPU_PACKING"):
        DEQUANTIZED[how](layer)
    if "nf4" not in how:
        assert set(fallbacks()) == {Reason.CPU_PACKING}
    assert counters.hits(TARGET) == 0


@NESTED
def test_the_advice_for_cpu_packing_works(nested, device):
    """``state_dict`` and ``.cuda()`` convert a weight back, with new scales. The result is right only with double quantization."""
    layer, dense = evaluated_on_a_cpu(nested)
    layer.to(device) if device.type == "cpu" else layer.to("cpu")
    nf4_patch.enable()
    with pytest.raises(ValueError, match="CPU_PACKING"):
        F.dequantize_4bit(*weight_of(layer))
    layer.state_dict() if device.type == "cpu" else layer.cuda()
    if nested:
        assert (F.dequantize_4bit(*weight_of(layer)).cpu() - dense).norm() < 0.02 * dense.norm()


def test_a_matmul_with_cpu_packing_is_refused_on_a_gpu(on, linear_op):
    """After ``.to("cuda")``, a matmul gets no state, and an absmax [K / blocksize, N] in bf16."""
    import bitsandbytes.backends.cuda.ops as cuda_ops

    packed, state = weight_of(evaluated_on_a_cpu(nested=False)[0].to(on))
    x = torch.randn(600, 128, dtype=torch.bfloat16, device=on)
    for matmul in ("off", "auto"):
        nf4_patch.enable(matmul=matmul)
        with pytest.raises(ValueError, match="CPU_PACKING"):
            cuda_ops._dequant_linear_fallback(x, packed, state.shape, state.absmax, 64, "nf4")
    state.absmax = state.absmax.view(-1)  # another fault: the original runs
    if on.type == "cpu":
        with contextlib.suppress(Exception):
            cuda_ops._dequant_linear_fallback(x, packed, state.shape, state.absmax, 64, "nf4")
        name = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"
        assert fallbacks(name) == {Reason.CPU_PACKING: 2, Reason.STATE_FIELDS: 1}


@NESTED
@pytest.mark.parametrize("options", [{}, {"matmul": "auto"}, {"lora": "fused"}, {"cache": "1MiB"}], ids=str)
def test_an_evaluation_on_a_cpu_is_that_of_bitsandbytes(nested, options):
    layer = linear(torch.device("cpu"), 128, 64, weights=torch.bfloat16, compress_statistics=nested).eval()
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16")
    x = torch.randn(1, 128, dtype=torch.bfloat16)
    nf4_patch.disable()
    with torch.no_grad():
        want = layer(x)
        assert layer.weight.quant_state.packing_format_for_cpu
        nf4_patch.enable(**options)
        assert torch.equal(layer(x), want)


# --- who else takes part in the functions of PyTorch ---


class Doubled(torch.Tensor):
    """Scales whose class has a ``__torch_function__`` that doubles every result."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        floating = isinstance(result, torch.Tensor) and result.is_floating_point() and "__get__" not in str(function)
        return result * 2 if floating else result


def scales(state, kind):
    """Yield each of a state's scales in turn, converted to the class."""
    for holder, name in ((state, "absmax"), (state, "offset"), (state.state2, "absmax"), (state.state2, "code")):
        if getattr(holder, name, None) is not None:
            tensor = getattr(holder, name)
            setattr(holder, name, tensor.as_subclass(kind))
            yield name
            setattr(holder, name, tensor)


@NESTED
@pytest.mark.parametrize("kind", [Doubled, Plain])
def test_scales_with_functions_of_their_own_are_the_originals(on, nested, kind):
    """The scales may have been plain tensors in an earlier call. Also try a layer, and cached weights."""
    packed, state = quantized((64, 128), torch.bfloat16, on, nested=nested)
    packed = torch.nn.Parameter(packed, requires_grad=False)
    nf4_patch.disable()
    plain = F.dequantize_4bit(packed, state)
    want = {name: F.dequantize_4bit(packed, state) for name in scales(state, kind)}
    for options in ({}, {"cache": "1MiB"}):
        nf4_patch.enable(**options)
        assert torch.equal(F.dequantize_4bit(packed, state), plain)
        read_by_bitsandbytes(packed, state)
        for name in scales(state, kind):
            for call in (F.dequantize_4bit, read_by_bitsandbytes):
                got = call(packed, state)
                assert torch.equal(got, want[name]) and type(got) is type(want[name]), name
        assert torch.equal(F.dequantize_4bit(packed, state), plain)
    assert set(fallbacks()) == {Reason.TENSOR_SUBCLASS}
    assert kind is Plain or any(not torch.equal(each, plain) for each in want.values())


def compiled(function):
    return torch.compile(function, backend="eager")


@pytest.mark.every(2)
@pytest.mark.parametrize("run", [lambda function: function, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("cached", ["off", "1MiB"])
@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="Dynamo of PyTorch 2.11 guards on the list of the test's own mode"
)
def test_a_torch_function_mode_sees_what_it_sees_without_the_patch(on, run, cached, fresh_dynamo):
    packed, state = quantized((64, 128), torch.bfloat16, on)
    packed = torch.nn.Parameter(packed, requires_grad=False)
    seen = []
    for switch_it in (nf4_patch.disable, lambda: nf4_patch.enable(cache=cached)):
        switch_it()
        torch._dynamo.reset()
        call = run(lambda: read_by_bitsandbytes(packed, state))
        call()
        with Seen() as mode:
            seen.append((mode.functions, call()))
    (without, want), (patched, got) = seen
    assert without == patched and any("dequantize_4bit" in name for name in without)
    assert torch.equal(got, want)
    assert run is compiled or fallbacks() == {Reason.FUNCTION_MODE: 1}


def test_a_default_device_is_no_mode_that_sees_anything(patched, device):
    packed, state = quantized((64, 128), torch.bfloat16, device)
    torch.set_default_device(device)
    try:
        F.dequantize_4bit(packed, state)
        with torch.device("meta"):
            F.dequantize_4bit(packed, state)
    finally:
        torch.set_default_device(None)
    assert counters.hits(TARGET) == 2


def test_the_direct_functions_work_under_a_mode(device):
    packed, state = quantized((64, 128), torch.bfloat16, device)
    want, out = nf4_patch.dequantize_nf4(packed, state), torch.empty(64, 128, dtype=torch.bfloat16, device=device)
    with Seen():
        assert torch.equal(nf4_patch.dequantize_nf4(packed, state), want)
        assert nf4_patch.dequantize_nf4(packed, state, out) is out and torch.equal(out, want)


@pytest.mark.parametrize("kind", [Doubled, Plain])
def test_activations_with_functions_of_their_own_are_not_multiplied_by_the_fused_kernel(kind):
    packed, state = quantized((64, 128), torch.bfloat16, "cpu")
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    fused = FusedMatmul("a test")
    assert fused.of_state(x, packed, state) is Reason.NOT_CUDA
    assert fused.of_state(x.as_subclass(kind), packed, state) is Reason.TENSOR_SUBCLASS
    assert fused.of_state(x, packed, state, x[0, :64].as_subclass(kind)) is Reason.TENSOR_SUBCLASS
    with Seen():
        assert fused.of_state(x, packed, state) is Reason.FUNCTION_MODE


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
    """The kernel runs, or the reference on a CPU without the interpreter."""
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
