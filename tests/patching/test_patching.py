"""The patch in the real bitsandbytes: order, switches, arguments, reasons, numbers."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import re

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from oracle import expected, quantized
from subprocess_python import INTERPRETED, python

import nf4_patch
from nf4_patch.config import VARIABLES, Config, ConfigError
from nf4_patch.nf4.dequantize import compilation
from nf4_patch.patching import guards, hooks, quant_state
from nf4_patch.patching.counters import FallbackError, counters
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.switch import switch
from nf4_patch.patching.targets import TARGETS

DEQUANTIZE = "bitsandbytes.functional.dequantize_4bit"


def fallbacks(target=DEQUANTIZE):
    return {reason: n for (name, reason), n in counters.fallbacks.items() if name == target}


@pytest.fixture
def on(device):
    """The patch is on; the test itself looks at what fell back."""
    nf4_patch.enable()
    counters.reset()
    yield device
    nf4_patch.disable()
    counters.reset()


def linear(device, dtype=torch.bfloat16, **kwargs):
    layer = bnb.nn.Linear4bit(256, 128, bias=False, quant_type="nf4", compute_dtype=dtype, **kwargs)
    torch.manual_seed(0)
    layer.weight.data.normal_(std=0.02)
    return layer.to(device).train()


def step(layer, device, dtype=torch.bfloat16):
    torch.manual_seed(1)
    x = torch.randn(600, 256, dtype=dtype).to(device).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def test_import_is_cheap_and_silent():
    code = """
    import sys, time
    start = time.perf_counter()
    import nf4_patch
    elapsed = time.perf_counter() - start
    heavy = {"torch", "triton", "bitsandbytes", "unsloth", "transformers", "wrapt", "rich", "click"} & set(sys.modules)
    assert not heavy, heavy
    assert elapsed < 0.2, elapsed
    """
    done = python(code, fresh=True)
    assert done.stdout == ""
    assert done.stderr == ""


def test_asking_and_switching_import_no_torch():
    python("""
    import sys
    import nf4_patch
    assert not nf4_patch.is_enabled()
    nf4_patch.enable()
    assert nf4_patch.is_enabled()
    assert nf4_patch.status().enabled
    nf4_patch.disable()
    assert "torch" not in sys.modules
    """, fresh=True)  # fmt: skip


@pytest.mark.parametrize("first", ["nf4_patch.enable()", "import bitsandbytes.functional"])
def test_either_import_order(first):
    second = "import bitsandbytes.functional" if "enable" in first else "nf4_patch.enable()"
    python(f"""
    {INTERPRETED.strip().replace(chr(10), "; ")}
    import nf4_patch
    {first}
    {second}
    import torch, bitsandbytes.functional as F
    packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
    got = F.dequantize_4bit(packed, state)
    assert nf4_patch.status().hits == 1, nf4_patch.status()
    nf4_patch.disable()
    assert not hasattr(F.dequantize_4bit, "__wrapped__")
    assert torch.equal(got, F.dequantize_4bit(packed, state))
    nf4_patch.enable()
    F.dequantize_4bit(packed, state)
    assert nf4_patch.status().hits == 2, nf4_patch.status()
    """)


def test_environment_enables_with_no_change_of_code():
    if not importlib.metadata.entry_points(group="bitsandbytes.backends", name="nf4_patch"):
        assert not os.environ.get("CI"), "the package is on the path but not installed"
        pytest.skip("nf4_patch is not installed: no entry point")
    code = """
    import bitsandbytes.functional as F
    print(hasattr(F.dequantize_4bit, "__wrapped__"))
    """
    assert python(code, NF4_PATCH="1").stdout.split() == ["True"]
    assert python(code).stdout.split() == ["False"]
    assert python("import nf4_patch; print(nf4_patch.is_enabled())", NF4_PATCH="1").stdout.split() == ["True"]


@pytest.mark.parametrize(
    "off", [{"NF4_PATCH": "0"}, {"NF4_USE_TRITON": "0"}, {"NF4_PATCH": "1", "NF4_USE_TRITON": "0"}]
)
def test_environment_off_always_wins(off):
    code = """
    import nf4_patch
    assert nf4_patch.enable() is False
    import bitsandbytes.functional as F
    assert not hasattr(F.dequantize_4bit, "__wrapped__")
    assert not nf4_patch.is_enabled()
    """
    python(code, **off)


def test_unknown_value_is_an_error_that_lists_the_allowed_and_never_breaks_an_import():
    with pytest.raises(ConfigError, match=r"NF4_PATCH='banana' is not known; allowed: 0, 1"):
        Config.read({"NF4_PATCH": "banana"})
    python("import nf4_patch, bitsandbytes; assert not nf4_patch.is_enabled()", NF4_PATCH="banana")
    done = python("import nf4_patch; nf4_patch.enable()", NF4_PATCH_STRICT="perhaps", check=False)
    assert "allowed: 0, 1" in done.stderr


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_every_variable_has_a_default_that_it_allows(variable):
    assert variable.default in ("", *variable.allowed)
    for value in variable.allowed:
        Config.read({variable.name: value})
        Config.read({variable.name: value.upper()})


def test_linear4bit_forward_and_backward_are_bit_equal(on):
    layer = linear(on)
    with_patch = step(layer, on)
    hits = nf4_patch.status().hits
    nf4_patch.disable()
    without = step(layer, on)
    assert hits == (2 if on.type == "cuda" else 1)  # on the CPU bitsandbytes' forward never dequantizes
    assert nf4_patch.status().hits == hits
    assert torch.equal(with_patch[0], without[0])
    assert torch.equal(with_patch[1], without[1])


def test_peft_lora_checkpointed_step(on):
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(linear(on), torch.nn.SiLU(), bnb.nn.Linear4bit(128, 64, quant_type="nf4").to(on))
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights="gaussian"))
    model.to(on)

    def losses():
        torch.manual_seed(2)
        result = []
        for _ in range(2):
            x = torch.randn(600, 256, device=on, dtype=torch.bfloat16).requires_grad_()
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            model.zero_grad()
            loss = y.float().square().mean()
            loss.backward()
            result += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return result

    with_patch = losses()
    assert nf4_patch.status().hits > 0
    assert not fallbacks()
    nf4_patch.disable()
    for a, b in zip(with_patch, losses(), strict=True):
        assert torch.equal(a, b)


def test_dequant_linear_fallback(on, monkeypatch):
    """bitsandbytes 0.50's forward. On a CPU machine the module imports once the raw stream getter exists."""
    if on.type == "cpu":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    import bitsandbytes.backends.cuda.ops as cuda_ops

    nf4_patch.enable()
    name = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"
    bias = torch.randn(96, device=on, dtype=torch.float16)
    for nested in (True, False):
        for quant_type in ("nf4", "fp4"):
            packed, state = quantized((96, 256), torch.bfloat16, on, nested=nested, quant_type=quant_type)
            x = torch.randn(5, 256, device=on, dtype=torch.float16)
            state.dtype = torch.float16  # the weight is decoded to the activation's dtype, not to the state's
            weight = expected(packed, state)
            nest = {}
            absmax = state.absmax
            if nested:
                absmax = state.state2.absmax
                nest = {
                    "absmax_8bit": state.absmax,
                    "absmax_code": state.state2.code,
                    "absmax_offset": state.offset,
                }
            got = cuda_ops._dequant_linear_fallback(x, packed, [96, 256], absmax, 64, quant_type, bias, **nest)
            assert torch.equal(got, torch.nn.functional.linear(x, weight, bias))
    assert counters.hits(name) == 4
    assert not fallbacks(name)


def test_output_argument(on):
    packed, state = quantized((64, 128), torch.float16, on)
    out = torch.empty(64, 128, dtype=torch.float16, device=on)
    assert F.dequantize_4bit(packed, state, out=out) is out
    assert torch.equal(out, expected(packed, state))
    assert counters.hits(DEQUANTIZE) >= 1
    other = torch.empty(128, 64, dtype=torch.float16, device=on)
    with pytest.raises(Exception):  # noqa: B017, PT011 (whatever the original raises)
        F.dequantize_4bit(packed, state, out=other)
    assert fallbacks() == {Reason.OUT_MISMATCH: 1}


def test_transposed_weight(on):
    packed, state = quantized((64, 128), torch.float16, on)
    got = F.dequantize_4bit(packed.t(), state)
    assert got.shape == (128, 64)
    assert torch.equal(got, expected(packed, state).t())
    assert fallbacks() == {}


def broken(reason, device):
    """A weight and state that must be refused for ``reason``."""
    packed, state = quantized((64, 128), torch.float16, device)
    if reason is Reason.QUANT_TYPE:
        state.quant_type = "int8"
    elif reason is Reason.OUTPUT_DTYPE:
        state.dtype = torch.float64
    elif reason is Reason.STORAGE_DTYPE:
        packed = packed.view(torch.int8)
    elif reason is Reason.BLOCKSIZE:
        state.blocksize = 96
    elif reason is Reason.STATE_FIELDS:
        state.state2.dtype = torch.float16
    elif reason is Reason.SIZE_MISMATCH:
        packed = packed[:100]
    elif reason is Reason.NOT_CONTIGUOUS:
        packed = packed.repeat(1, 2).view(-1)[::2].view(-1, 1)
    elif reason is Reason.MIXED_DEVICES:
        state.absmax = state.absmax.to("meta")
    elif reason is Reason.CPU_PACKING:
        state.packing_format_for_cpu = True
    elif reason is Reason.NOT_4BIT:
        state = [state.absmax, state.shape]
    return packed, state


@pytest.mark.parametrize(
    "reason",
    [
        Reason.QUANT_TYPE, Reason.OUTPUT_DTYPE, Reason.STORAGE_DTYPE, Reason.BLOCKSIZE, Reason.STATE_FIELDS, Reason.SIZE_MISMATCH,
        Reason.NOT_CONTIGUOUS, Reason.MIXED_DEVICES, Reason.CPU_PACKING, Reason.NOT_4BIT,
    ],
    ids=lambda r: r.name,
)  # fmt: skip
def test_refusals_have_a_name_and_run_the_original(on, reason, monkeypatch):
    packed, state = broken(reason, on)
    seen = []

    def original(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        seen.append((A, quant_state))
        return "the original's result"

    nf4_patch.disable()
    monkeypatch.setattr(F, "dequantize_4bit", original)
    hooks.installed.pop(DEQUANTIZE, None)
    nf4_patch.enable()
    try:
        assert F.dequantize_4bit(packed, state) == "the original's result"
        assert seen[0][0] is packed
        assert seen[0][1] is state
        assert fallbacks() == {reason: 1}
        assert counters.hits(DEQUANTIZE) == 0
        if not reason.is_expected:
            from nf4_patch.patching.switch import switch

            monkeypatch.setattr(switch, "strict", True)
            with pytest.raises(FallbackError):
                F.dequantize_4bit(packed, state)
            assert fallbacks() == {reason: 2}
    finally:
        nf4_patch.disable()
        hooks.installed.pop(DEQUANTIZE, None)


@pytest.mark.parametrize("reason", Reason, ids=lambda r: r.name)
def test_every_reason_has_a_sentence(reason):
    assert len(reason.sentence) > 20
    assert not reason.sentence.endswith(".")


def test_one_warning_a_reason(on, caplog):
    packed, state = quantized((64, 128), torch.float16, on)
    state.blocksize = 96
    with caplog.at_level(logging.WARNING, "nf4_patch"):
        for _ in range(3):
            with pytest.raises(ValueError, match="blocksize"):
                F.dequantize_4bit(packed, state)
    assert len([r for r in caplog.records if Reason.BLOCKSIZE.sentence in r.getMessage()]) == 1
    assert fallbacks() == {Reason.BLOCKSIZE: 3}


def test_disable_reaches_through_another_librarys_wrapper(on):
    ours = F.dequantize_4bit

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    F.dequantize_4bit = theirs
    packed, state = quantized((64, 128), torch.float16, on)
    try:
        F.dequantize_4bit(packed, state)
        assert counters.hits(DEQUANTIZE) == 1
        assert {t.name: t.state for t in nf4_patch.status().targets}[DEQUANTIZE] == "wrapped"
        nf4_patch.disable()
        assert F.dequantize_4bit is theirs  # not ours to remove
        F.dequantize_4bit(packed, state)
        assert counters.hits(DEQUANTIZE) == 1
        nf4_patch.enable()
        F.dequantize_4bit(packed, state)
        assert counters.hits(DEQUANTIZE) == 2
    finally:
        F.dequantize_4bit = ours
        nf4_patch.disable()


def test_unknown_signature_is_refused_by_name(monkeypatch):
    nf4_patch.disable()
    original = F.dequantize_4bit
    monkeypatch.setattr(F, "dequantize_4bit", lambda A, quant_state, rank, scale: None)
    hooks.installed.pop(DEQUANTIZE, None)
    nf4_patch.enable()
    try:
        row = {t.name: t for t in nf4_patch.status().targets}[DEQUANTIZE]
        assert row.state == "refused"
        assert "(A, quant_state, rank, scale)" in row.note
    finally:
        nf4_patch.disable()
        hooks.installed.pop(DEQUANTIZE, None)
        monkeypatch.setattr(F, "dequantize_4bit", original)


def test_context_manager_restores_what_was(device):
    nf4_patch.disable()
    with nf4_patch.enabled():
        assert nf4_patch.is_enabled()
        with nf4_patch.enabled():
            pass
        assert nf4_patch.is_enabled()
    assert not nf4_patch.is_enabled()
    assert not hasattr(F.dequantize_4bit, "__wrapped__")


def test_installed_but_never_hit_is_said(on):
    row = {t.name: t for t in nf4_patch.status().targets}[DEQUANTIZE]
    assert (row.state, row.note) == ("patched", "installed, never called")
    assert "never called" in str(nf4_patch.status())


def test_public_names():
    assert set(nf4_patch.__all__) >= {
        "enable", "disable", "is_enabled", "enabled", "status", "dequantize_nf4", "triton_dequantize_nf4",
    }  # fmt: skip
    for name in nf4_patch.__all__:
        assert getattr(nf4_patch, name).__doc__


@pytest.mark.parametrize("nested", [True, False])
def test_direct_api(nested, device):
    nf4_patch.disable()
    packed, state = quantized((96, 128), torch.bfloat16, device, nested=nested)
    want = expected(packed, state)
    assert torch.equal(nf4_patch.dequantize_nf4(packed, state), want)
    assert torch.equal(nf4_patch.dequantize_nf4(packed.t(), state), want.t())
    out = torch.empty_like(want)
    assert nf4_patch.dequantize_nf4(packed, state, out) is out
    assert torch.equal(out, want)
    layer = linear(device, compress_statistics=nested)
    assert torch.equal(nf4_patch.triton_dequantize_nf4(layer), expected(layer.weight.data, layer.weight.quant_state))


def test_direct_api_on_the_cpu_gives_the_reference(monkeypatch):
    from nf4_patch.nf4.dequantize import compilation

    monkeypatch.setattr(compilation, "INTERPRETED", False)
    packed, state = quantized((96, 128), torch.float16, torch.device("cpu"))
    assert torch.equal(nf4_patch.dequantize_nf4(packed, state), expected(packed, state))
    assert torch.equal(nf4_patch.dequantize_nf4(packed.t(), state), expected(packed, state).t())


def test_direct_api_says_what_was_found(device):
    packed, state = quantized((96, 128), torch.float16, device)
    found = r"packed torch.uint8 \[100, 1\].*blocksize 64, shape torch.Size\(\[96, 128\]\)"
    with pytest.raises(ValueError, match=f"{re.escape(Reason.SIZES.sentence)}.*{found}"):
        nf4_patch.dequantize_nf4(packed[:100], state)
    with pytest.raises(ValueError, match="quant_state is a NoneType"):
        nf4_patch.dequantize_nf4(packed, None)
    with pytest.raises(ValueError, match="Linear has no quantized weight"):
        nf4_patch.triton_dequantize_nf4(torch.nn.Linear(4, 4))


def test_every_target_names_its_function():
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    for target in TARGETS:
        assert target.covers
        assert target.releases
        assert target.tested


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_the_tables_are_those_of_bitsandbytes(quant_type, device):
    """In fp32 whatever the default dtype is at the first use, which is when a table is made."""
    want = F.get_4bit_type(quant_type, device=device)
    packed, state = quantized((64, 128), torch.float16, device, quant_type=quant_type)
    weight = expected(packed, state)
    dtype = torch.get_default_dtype()
    quant_state._codes.clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(nf4_patch.dequantize_nf4(packed, state), weight)
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(quant_state.remembered_code(quant_type, device), want)
    assert torch.equal(nf4_patch.dequantize_nf4(packed, state), weight)


def test_arguments_that_agree_with_the_state_are_served(on):
    for name, others in (("nf4", {"quant_type": "nf4"}), ("fp4", {"quant_type": "fp4"})):
        packed, state = quantized((64, 128), torch.float16, on, blocksize=128, quant_type=name)
        want = expected(packed, state)
        counters.reset()
        wrapper = getattr(F, f"dequantize_{name}")
        out = torch.empty_like(want)
        results = [
            wrapper(packed, state),
            wrapper(packed, quant_state=state, out=out),
            F.dequantize_4bit(packed, state, None, None, None, name),
            F.dequantize_4bit(packed, state, state.absmax, out, 128, name),
            F.dequantize_4bit(packed, state, blocksize=64),  # the default of some releases, written out
            F.dequantize_4bit(packed, state, quant_type="fp4"),  # the default written out
            F.dequantize_4bit(packed, state, **others),
        ]
        assert all(torch.equal(result, want) for result in results)
        assert results[1] is out and results[3] is out
        assert counters.hits(DEQUANTIZE) == len(results)
        assert not fallbacks()


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


def test_a_function_imported_by_value_before_enable():
    """In any module, and under any name."""
    python(f"""
    {INTERPRETED.strip().replace(chr(10), "; ")}
    from bitsandbytes.functional import dequantize_4bit, gemv_4bit as product
    import bitsandbytes.functional as F, nf4_patch, torch
    packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=True)
    want = dequantize_4bit(packed, state)
    nf4_patch.enable(matmul="auto")
    assert torch.equal(dequantize_4bit(packed, state), want)
    assert nf4_patch.status().hits == 1, nf4_patch.status()
    assert product is F.gemv_4bit and hasattr(product, "__wrapped__")
    nf4_patch.disable()
    assert not hasattr(dequantize_4bit, "__wrapped__") and not hasattr(product, "__wrapped__")
    """)


def packed_for_cpu(nested):
    """A weight that bitsandbytes repacked for a CPU with AVX512-BF16."""
    convert = getattr(F, "_convert_weight_packed_for_cpu", None)
    if convert is None:
        pytest.skip("this release of bitsandbytes has no CPU packing")
    return convert(*quantized((64, 128), torch.bfloat16, torch.device("cpu"), nested=nested))


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_cpu_packing_has_its_name(nested, device):
    packed, state = packed_for_cpu(nested)
    nf4_patch.enable()
    counters.reset()
    try:
        with contextlib.suppress(Exception):  # what the original makes of it is its own
            F.dequantize_4bit(packed, state)
        assert fallbacks() == {Reason.CPU_PACKING: 1}
        counters.reset()
        with contextlib.suppress(Exception):
            torch.compile(lambda w: F.dequantize_4bit(w, state), backend="eager")(packed)
        assert counters.hits(DEQUANTIZE) == 0
    finally:
        nf4_patch.disable()
        counters.reset()
    with pytest.raises(ValueError, match=Reason.CPU_PACKING.sentence):
        nf4_patch.dequantize_nf4(packed, state)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_a_forward_without_gradient_on_a_cpu_with_avx512_bf16(nested, monkeypatch):
    """The layer repacks its weight by itself; the direct API names it."""
    layer = linear(torch.device("cpu"), compress_statistics=nested).eval()
    if not hasattr(layer, "support_avx512bf16_for_cpu"):
        pytest.skip("this release of bitsandbytes has no CPU packing")
    layer.support_avx512bf16_for_cpu = True  # a CPU without it gets as far as its first multiplication
    with contextlib.suppress(Exception):
        layer(torch.randn(2, 256, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=Reason.CPU_PACKING.sentence):
        nf4_patch.triton_dequantize_nf4(layer)


def test_an_error_that_is_no_missing_field_is_not_taken_for_one(on, monkeypatch):
    packed, state = quantized((64, 128), torch.float16, on)

    def mistaken(*args):
        raise AttributeError("a mistake of ours")

    monkeypatch.setattr(guards, "state_is_odd", mistaken)
    F.dequantize_4bit(packed, state)
    assert fallbacks() == {Reason.INTERNAL_ERROR: 1}


def test_a_state_without_one_of_its_fields(on):
    packed, state = quantized((64, 128), torch.float16, on)
    del state.absmax
    with pytest.raises(AttributeError):  # the original's own
        F.dequantize_4bit(packed, state)
    assert fallbacks() == {Reason.STATE_FIELDS: 1}
    with pytest.raises(ValueError, match=Reason.STATE_FIELDS.sentence):
        nf4_patch.dequantize_nf4(packed, state)


@pytest.mark.parametrize("interpreted", [True, False])
def test_direct_api_raises_value_errors_only(interpreted, monkeypatch, device):
    if not interpreted:
        monkeypatch.setattr(compilation, "INTERPRETED", False)
    packed, state = quantized((96, 128), torch.float16, device)
    for weight, out, words in (
        (None, None, "weight is a NoneType"),
        ("w", None, "weight is a str"),
        (packed, "x", "out is a str"),
        (packed, torch.empty(3), Reason.OUT_MISMATCH.sentence),
    ):
        with pytest.raises(ValueError, match=words):
            nf4_patch.dequantize_nf4(weight, state, out)
    for change in (
        {"absmax": None},
        {"offset": 0.5},
        {"state2": None},
        {"blocksize": None},
        {"shape": None},
        {"code": 3},
    ):
        packed, state = quantized((96, 128), torch.float16, device)
        vars(state).update(change)
        if change == {"code": 3}:  # never read
            assert torch.equal(nf4_patch.dequantize_nf4(packed, state), expected(packed, state))
            continue
        with pytest.raises(ValueError, match=r"packed torch\.uint8"):
            nf4_patch.dequantize_nf4(packed, state)


@pytest.mark.parametrize("value", ["1", "true", "Yes", "ON"])
def test_usual_spellings_of_true_and_false(value):
    opposite = {"1": "0", "true": "false", "Yes": "No", "ON": "OFF"}[value]
    assert Config.read({"NF4_PATCH": value}).requested
    assert Config.read({"NF4_PATCH_STRICT": value}).strict
    assert not Config.read({"NF4_PATCH_STRICT": opposite}).strict
    assert Config.read({"NF4_PATCH": opposite}).forbidden
    assert Config.read({"NF4_PATCH": value, "NF4_USE_TRITON": opposite}).forbidden
    assert not Config.read({"NF4_USE_TRITON": value}).forbidden


def test_an_unknown_value_says_so_in_one_line():
    for code in ("import nf4_patch", "import nf4_patch, bitsandbytes"):
        done = python(f"{code}; assert not nf4_patch.is_enabled()", NF4_PATCH="2")
        lines = [line for line in done.stderr.splitlines() if "NF4_PATCH" in line]
        assert len(lines) == 1 and lines[0].startswith("nf4_patch stays off: NF4_PATCH='2' is not known; allowed: 0, 1")


def test_the_first_fallback_reaches_a_user_without_logging():
    done = python(f"""
    {INTERPRETED.strip().replace(chr(10), "; ")}
    import bitsandbytes.functional as F, nf4_patch, torch
    packed, state = F.quantize_4bit(torch.randn(64, 64), quant_type="nf4")
    state.absmax = state.absmax.double()
    nf4_patch.enable()
    for _ in range(2):
        try:
            F.dequantize_4bit(packed, state)
        except Exception:
            pass
    """)
    assert done.stderr.count(Reason.STATE_FIELDS.sentence) == 1


def test_enable_turns_off_what_the_environment_forbids(on, monkeypatch):
    monkeypatch.setenv("NF4_PATCH", "0")
    assert nf4_patch.enable() is False
    assert not nf4_patch.is_enabled()
    assert not hasattr(F.dequantize_4bit, "__wrapped__")


@pytest.mark.parametrize("matmul", [True, 1, "always", ("auto",)], ids=repr)
def test_enable_names_what_matmul_may_be(matmul):
    with pytest.raises(ConfigError, match=r"off.*auto"):
        nf4_patch.enable(matmul)
    with pytest.raises(ConfigError), nf4_patch.enabled(matmul):
        pass
    with nf4_patch.enabled():
        assert nf4_patch.is_enabled()
    assert not nf4_patch.is_enabled()


def test_nested_blocks_restore_what_each_found():
    with nf4_patch.enabled("auto"):
        with nf4_patch.enabled("off"):
            assert switch.matmul == "off"
        assert switch.matmul == "auto"
        nf4_patch.disable()
    assert not nf4_patch.is_enabled()
    nf4_patch.enable("auto")
    with nf4_patch.enabled("off"):
        assert switch.matmul == "off"
    assert nf4_patch.is_enabled() and switch.matmul == "auto"
    nf4_patch.disable()
