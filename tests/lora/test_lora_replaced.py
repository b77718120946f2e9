"""If the script or another library replaced a function, fused LoRA does not compute it, and the new function runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import types

import bitsandbytes as bnb
import pytest
import test_lora as lora
import torch
from alternation import crossed
from target import fallbacks, row

import nf4_patch
from nf4_patch.libraries.peft.computed import COMPUTED
from nf4_patch.patching import placement
from nf4_patch.patching.counters import counters
from nf4_patch.patching.originals import is_own
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.state import State

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = list(itertools.product((BF16, FP32), (None, BF16)))  # of the adapters and of autocast
FORWARD = "peft.tuners.lora.bnb.Linear4bit.forward"


@pytest.fixture(scope="module", autouse=True)
def functions_of_the_gpu():
    """Import functions that bitsandbytes itself imports only if there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        importlib.import_module("bitsandbytes.backends.cuda.ops")
        yield


def holder_of(path):
    """Return the object that holds the function at a path of COMPUTED, and the function's name in it."""
    if path.startswith("bitsandbytes.MatMul4Bit"):
        return bnb.autograd._functions.MatMul4Bit, path.rpartition(".")[2]
    found, (*parts, name) = sys.modules[path.partition(".")[0]], path.split(".")[1:]
    for part in parts:
        found = getattr(found, part)
    return found, name


def wraps(function, scale=3):
    """Wrap a function so that its result is scaled. The wrapper has the function's name and module."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        return scale * result if isinstance(result, torch.Tensor) else result

    return wrapper


def of_its_module(function):
    """Compile a function as if it belonged to the library's module."""
    names = vars(sys.modules[function.__module__])
    names["stock_of_the_test"] = function
    code = compile(
        f"def {function.__name__}(*args, **kwargs): return 3 * stock_of_the_test(*args, **kwargs)", "x", "exec"
    )
    return types.FunctionType(code.co_consts[0], names)


class Callable:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return 3 * self.function(*args, **kwargs)


@contextlib.contextmanager
def put(path, replacement, make=wraps):
    holder, name = holder_of(path)
    before = vars(holder)[name]
    made = make(getattr(holder, name))
    setattr(holder, name, staticmethod(made) if isinstance(before, staticmethod) else made)
    try:
        yield
    finally:
        setattr(holder, name, before)


def results(model, x, autocast):
    torch.manual_seed(3)
    return lora.step(model, x, autocast)


@pytest.mark.parametrize(("path", "dtypes"), crossed([path for path, *_ in COMPUTED], DTYPES), ids=str)
def test_a_wrapper_put_in_place_after_enable_runs(device, path, dtypes, caplog):
    adapter, autocast = dtypes
    model, x = lora.adapted(device, adapter=adapter, lora_dropout=0.2), lora.inputs(device)
    with put(path, wraps):
        want = results(model, x, autocast)
    nf4_patch.enable(lora="fused")
    results(model, x, autocast)
    assert counters.hits(lora.TARGET) and not fallbacks(lora.TARGET)
    counters.reset()
    with put(path, wraps):
        got = results(model, x, autocast)
    assert fallbacks(lora.TARGET) == {Reason.LORA_REPLACED: 1} and not counters.hits(lora.TARGET)
    assert all(map(torch.equal, got, want))
    counters.reset()
    results(model, x, autocast)
    assert counters.hits(lora.TARGET) and not fallbacks(lora.TARGET)


@pytest.mark.parametrize("make", [wraps, of_its_module, Callable])
def test_what_a_replacement_may_look_like(device, make):
    model, x = lora.adapted(device), lora.inputs(device)
    nf4_patch.enable(lora="fused")
    with put("bitsandbytes.matmul_4bit", None, make):
        model(x)
    assert fallbacks(lora.TARGET) == {Reason.LORA_REPLACED: 1}


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_a_forward_of_peft_replaced_before_enable_runs(device, dtypes, caplog):
    """The replaced forward scales LoRA's product by another factor."""
    cls, (adapter, autocast) = importlib.import_module("peft.tuners.lora.bnb").Linear4bit, dtypes
    stock = getattr(cls.forward, "__wrapped__", cls.forward)
    entry = placement.installed.pop(lora.TARGET, None)

    def mine(self, x, *args, **kwargs):
        return stock(self, x, *args, **kwargs) * 2

    model, x = lora.adapted(device, adapter=adapter), lora.inputs(device)
    cls.forward = mine
    try:
        want = results(model, x, autocast)
        nf4_patch.enable(lora="fused", matmul="auto")
        assert row(lora.TARGET).state is State.PATCHED
        got = results(model, x, autocast)
        with torch.no_grad():
            few = model(x[:2]), (nf4_patch.disable(), model(x[:2]))[1]
    finally:
        nf4_patch.disable()
        cls.forward = stock
        placement.installed.pop(lora.TARGET, None)
        if entry is not None:
            placement.installed[lora.TARGET] = entry
    rounding = 0.02 * float(few[1].abs().max()) if device.type == "cuda" else 0.0  # of matmul="auto"
    assert all(map(torch.equal, got, want)) and torch.allclose(*few, rtol=0, atol=rounding)
    assert set(fallbacks(lora.TARGET)) == {Reason.LORA_REPLACED} and not counters.hits(lora.TARGET)


@pytest.mark.parametrize(
    "options", [{}, {"cache": "1GiB"}, {"matmul": "auto"}, {"cache": "auto", "matmul": "auto"}], ids=str
)
def test_our_own_replacements_are_no_replacements(device, options):
    model, x = lora.adapted(device), lora.inputs(device)
    nf4_patch.enable(lora="fused", **options)
    model(x)
    nf4_patch.disable()
    nf4_patch.enable(lora="fused", **options)
    model(x)
    assert not fallbacks(lora.TARGET)


def test_a_known_wrapper_of_another_library_is_no_replacement(device):
    """Unsloth's wrapper only splits weights that are too large for bitsandbytes."""
    source = "def dequantize_4bit(A, *args, **kwargs):\n    return stock(A, *args, **kwargs)"

    def large_tensors(function):
        names = {"stock": function, "__name__": "unsloth_zoo.temporary_patches.bitsandbytes_large_tensors"}
        exec(source, names)
        names["dequantize_4bit"].__wrapped__ = function
        return names["dequantize_4bit"]

    model, x = lora.adapted(device), lora.inputs(device)
    nf4_patch.enable(lora="fused")
    with put("bitsandbytes.functional.dequantize_4bit", None, large_tensors):
        model(x)
    assert not fallbacks(lora.TARGET)


def test_every_function_of_the_table_is_the_librarys_own(device):
    nf4_patch.disable()
    found = {path: getattr(*holder_of(path)) for path, *_ in COMPUTED}
    assert [path for path, module, name in COMPUTED if not is_own(found[path], module, name)] == []


def test_no_users_function_is_kept(device):
    import gc
    import weakref

    model, x = lora.adapted(device), lora.inputs(device)
    nf4_patch.enable(lora="fused")

    def make(function):
        made = wraps(function, 1)
        kept.append(weakref.ref(made))
        return made

    kept = []
    with put("torch.nn.Linear.forward", None, make):
        model(x)
    gc.collect()
    assert [each() for each in kept] == [None]
