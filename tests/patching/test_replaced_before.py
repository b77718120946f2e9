"""If somebody replaced a function before enable(), and nf4_patch would compute its result itself, the new function runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from alternation import crossed
from oracle import quantized
from target import Object, fallbacks, row

import nf4_patch
from nf4_patch.matmul.product import FusedMatmul
from nf4_patch.patching import placement
from nf4_patch.patching.counters import counters
from nf4_patch.patching.originals import is_own
from nf4_patch.patching.reasons import Reason
from nf4_patch.patching.targets import TARGETS

MATMUL = "bitsandbytes.autograd._functions.matmul_4bit"
GEMV = "bitsandbytes.functional.gemv_4bit"
KERNEL = "bitsandbytes.backends.cuda.ops._gemm_4bit_kernel_impl"
LINEAR = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"
ROWS = {target.name: target for target in TARGETS if target.own}


def arguments_of(name, device):
    packed, state = quantized((128, 256), torch.bfloat16, device)
    x = torch.randn(1, 256, dtype=torch.bfloat16, device=device)
    if name == MATMUL:
        return x, packed, state
    if name == GEMV:
        return x, packed, None, False, False, state
    return x, packed, state.shape, state.state2.absmax, 64, "nf4", None, state.absmax, state.state2.code, state.offset


def tripled(function):
    """Wrap a function as a script would, so that its result shows which function computed it."""
    return functools.wraps(function)(lambda *args, **kwargs: torch.full((3,), 3.0))


def another(function):
    """Define another function with the same parameters, outside of any library."""
    names = "=None, ".join(inspect.signature(function).parameters) + "=None"
    found = {"torch": torch}
    exec(f"def {function.__name__}({names}): return torch.full((3,), 3.0)", found)
    return found[function.__name__]


def sibling(function):
    """Compile a function as if it belonged to the library's module."""
    names = vars(sys.modules[function.__module__])
    return type(function)(tripled(function).__code__, names, function.__name__)


def current(name):
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


@contextlib.contextmanager
def in_place(name, make):
    """Put a function in place before enable(), also in the module from which layers call it."""
    nf4_patch.disable()
    module, _, attribute = name.rpartition(".")
    entries, original = dict(placement.installed), current(name)
    holders = [sys.modules[module], *[bnb] * (name == MATMUL)]
    theirs = make(original)
    for holder in holders:
        setattr(holder, attribute, theirs)
    placement.installed.clear()
    try:
        yield theirs
    finally:
        nf4_patch.disable()
        for holder in holders:
            setattr(holder, attribute, original)
        placement.installed.clear()
        placement.installed.update(entries)


@pytest.fixture
def product(monkeypatch):
    """Replace the product that nf4_patch's matmul computes."""
    value, run, used = torch.full((7,), 7.0), FusedMatmul.run, [True]
    monkeypatch.setattr(FusedMatmul, "run", lambda self, *arguments: value if used else run(self, *arguments))
    yield value
    used.clear()  # later tests may run replacements that were made now


@pytest.mark.every(2)
@pytest.mark.parametrize(("make", "name"), crossed((tripled, another), (MATMUL, GEMV, KERNEL, LINEAR)))
def test_their_function_runs(linear_op, product, name, make):
    arguments, theirs = arguments_of(name, linear_op), torch.full((3,), 3.0)
    with torch.no_grad():
        with in_place(name, lambda original: original):  # so that the replacement is made after ``product``
            nf4_patch.enable(matmul="auto")
            assert torch.equal(current(name)(*arguments), product)
        with in_place(name, make):
            nf4_patch.enable(matmul="auto")
            counters.reset()
            assert torch.equal(current(name)(*arguments), theirs)
            assert fallbacks(name) == {Reason.REPLACED: 1} and not counters.hits(name)
            assert row(name).fallbacks == {"REPLACED": 1}
            nf4_patch.enable(matmul="off")
            assert torch.equal(current(name)(*arguments), theirs)


@pytest.mark.parametrize("make", [tripled, another])
def test_theirs_runs_under_plain_enable_too(linear_op, make, caplog):
    """nf4_patch computes only F.linear of the dequantized weight. The new function may do something else."""
    arguments = arguments_of(LINEAR, linear_op)
    with in_place(LINEAR, make):
        nf4_patch.enable()
        caplog.clear()
        for _ in range(2):
            assert torch.equal(current(LINEAR)(*arguments), torch.full((3,), 3.0))
    assert fallbacks(LINEAR) == {Reason.REPLACED: 2}
    assert sum(LINEAR in message for message in caplog.messages) <= 1  # once in a process


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [MATMUL, LINEAR])
def test_a_harmless_wrapper_is_still_replaced(linear_op, product, name):
    """PyTorch's own decorators are harmless, and so is a replacement of nf4_patch that somebody kept and put back."""
    arguments = arguments_of(name, linear_op)
    nf4_patch.enable(matmul="auto")
    ours = current(name)
    for make in (torch.no_grad(), lambda original: ours):
        with in_place(name, make), torch.no_grad():
            nf4_patch.enable(matmul="auto")
            assert torch.equal(current(name)(*arguments), product)
    assert not fallbacks(name)


def test_a_partial_function_does_not_stop_enable(linear_op):
    """A partial function has no code that nf4_patch could read."""
    with in_place(MATMUL, functools.partial), torch.no_grad():
        nf4_patch.enable(matmul="auto")
        bnb.matmul_4bit(*arguments_of(MATMUL, linear_op))
    assert fallbacks(MATMUL) == {Reason.REPLACED: 1}


@pytest.mark.parametrize("inner", [GEMV, KERNEL, LINEAR])
def test_a_function_that_matmul_4bit_would_call_runs(linear_op, product, inner):
    """nf4_patch's matmul calls none of these functions. So the library's matmul runs, which calls them."""
    arguments = arguments_of(MATMUL, linear_op)
    with in_place(inner, another), in_place(MATMUL, lambda original: original), torch.no_grad():
        nf4_patch.enable(matmul="auto")
        counters.reset()
        bnb.matmul_4bit(*arguments)
        assert fallbacks(MATMUL) == {Reason.REPLACED: 1}
    if inner == LINEAR and not torch.cuda.is_available():  # without a GPU, bitsandbytes' op calls it here
        assert fallbacks(LINEAR) == {Reason.REPLACED: 1}


def test_a_wrapper_put_in_place_after_enable_calls_ours(linear_op, product):
    arguments = arguments_of(MATMUL, linear_op)
    nf4_patch.enable(matmul="auto")
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        ours = bnb.matmul_4bit
        patch.setattr(bnb, "matmul_4bit", functools.wraps(ours)(lambda *args, **kwargs: 2 * ours(*args, **kwargs)))
        assert torch.equal(bnb.matmul_4bit(*arguments), 2 * product)


def test_modules_that_hold_the_librarys_own_get_ours(linear_op, product, monkeypatch):
    """Such modules imported the function by name before somebody wrapped it."""
    late = types.ModuleType("imported_by_name")
    nf4_patch.disable()
    late.matmul_4bit = bnb.matmul_4bit
    monkeypatch.setitem(sys.modules, late.__name__, late)
    arguments = arguments_of(MATMUL, linear_op)
    with in_place(MATMUL, tripled), torch.no_grad():
        nf4_patch.enable(matmul="auto")
        assert torch.equal(bnb.matmul_4bit(*arguments), torch.full((3,), 3.0))
        assert torch.equal(late.matmul_4bit(*arguments), product)


@pytest.mark.parametrize("make", [tripled, another, sibling, Object, functools.partial])
def test_what_is_not_the_librarys_own(make):
    nf4_patch.disable()
    assert is_own(F.gemv_4bit, "bitsandbytes.functional", "gemv_4bit")
    assert not is_own(make(F.gemv_4bit), "bitsandbytes.functional", "gemv_4bit")
    assert not is_own(F.quantize_4bit, "bitsandbytes.functional", "gemv_4bit")
    assert not is_own(F.gemv_4bit, "a_module_that_is_not_imported", "gemv_4bit")


def test_every_computed_function_is_the_librarys_own(linear_op):
    nf4_patch.disable()
    found = {name: target for name, target in ROWS.items() if target.module in sys.modules}
    assert {MATMUL, GEMV, KERNEL, LINEAR} <= found.keys()
    for name, target in found.items():
        if target.library == "bitsandbytes":
            assert is_own(current(name), target.module, *target.own), name
        for path in target.computes:
            module, _, attribute = path.partition(":")
            assert is_own(getattr(sys.modules[module], attribute), module, attribute), path
