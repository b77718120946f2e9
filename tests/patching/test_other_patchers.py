"""Other code puts functions in the same places. status() reports this, and disable() removes only nf4_patch's functions."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import pickle
import sys
import types

import bitsandbytes.functional as F
import pytest
import torch
from alternation import crossed, thinned
from oracle import expected, quantized
from target import TARGET, in_package, replaced_by, row

import nf4_patch
from nf4_patch.options import OPTIONS
from nf4_patch.patching import placement
from nf4_patch.patching.counters import counters
from nf4_patch.patching.placement import get_attr, installed, is_ours, put
from nf4_patch.patching.state import State
from nf4_patch.patching.target import ANY, Target
from nf4_patch.patching.targets import TARGETS


class Hidden:
    """A callable in which no search finds the function."""

    def __init__(self, function):
        self.functions = {"it": [function]}

    def __call__(self, *args, **kwargs):
        return self.functions["it"][0](*args, **kwargs)


def by_a_closure(ours):
    return lambda A, *args, **kwargs: ours(A, *args, **kwargs)


def by_a_global(ours):
    """Return a function that calls nf4_patch's through a global, as after ``stock = F.dequantize_4bit`` in a script."""
    names = {"stock": ours}
    exec("def wrapper(A, *args, **kwargs):\n    return stock(A, *args, **kwargs)", names)
    return names["wrapper"]


WRAPPERS = {
    "wraps": lambda ours: functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs)),
    "closure": by_a_closure,
    "global": by_a_global,
    "wrapper in a closure": lambda ours: by_a_closure(by_a_closure(ours)),
}


@pytest.fixture(scope="module")
def everything():
    """Import every module of a row that can be imported here, except Unsloth's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        for target in TARGETS:
            with contextlib.suppress(ImportError):
                if target.library != "unsloth":
                    importlib.import_module(target.module)


def stand_in(target):
    """Return a function with the parameters of a row."""
    stars = {"args": "*args", "kwargs": "**kwargs"}
    names = [stars.get(name, name) for name in (target.parameters or (("self", "args"),))[0]]
    found = {}
    exec(f"def stand_in({', '.join(names)}): return {', '.join(name for name in names if '*' not in name)}", found)
    return found["stand_in"]


def ours_that_run(function, arguments):
    """Return this package's functions that a call runs."""
    seen = []

    def look(frame, event, _):
        if event == "call" and in_package(frame.f_code):
            seen.append(frame.f_code)

    sys.setprofile(look)
    try:
        with contextlib.suppress(Exception):  # whatever is made of such arguments
            function(*arguments)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "target", thinned((row for row in TARGETS if not row.permanent), 4), ids=lambda target: target.name
)
def test_a_replacement_that_somebody_holds_is_ours_only_while_it_is_on(target, everything):
    """Try every row on, wrapped, off by disable() and by its option, on again, and displaced.

    While it is off, only the original runs.
    """
    on = {target.option: OPTIONS[target.option].on} if target.option else {}
    nf4_patch.enable(**on)
    entry = installed.get(target.name)
    if entry is None or entry.replacement is None:  # not in this release
        holder, name, original = types.ModuleType("holder"), "function", stand_in(target)
        ours = target.make(original)
    else:
        holder, name = target.holder(sys.modules[target.module])
        original, ours = entry.original, entry.replacement
    theirs = functools.wraps(ours)(lambda *args: ours(*args))
    # Two options replace a decoder layer's call: the second one's replacement is the original of the first one's.
    replacements = [ours, *([ours.__wrapped__] if is_ours(getattr(ours, "__wrapped__", None)) else [])]
    codes = [each.__code__ for each in replacements]
    arguments = [object() for each in inspect.signature(stand_in(target)).parameters if each not in ("args", "kwargs")]
    for another in (theirs, stand_in(target)):
        put(holder, name, another)
        for turn_off in (nf4_patch.disable, functools.partial(nf4_patch.enable, **dict.fromkeys(on, "off"))):
            nf4_patch.enable(**on)
            assert another is not theirs or entry is None or entry.state() is State.WRAPPED
            while_on = ours_that_run(theirs, arguments)
            turn_off()
            if on or turn_off is nf4_patch.disable:
                counters.reset()
                assert ours_that_run(theirs, arguments) == codes and not counters.fallbacks
                assert while_on != codes
                assert get_attr(holder, name) is another
    nf4_patch.disable()
    if target.parameters is not ANY and entry is not None:
        put(holder, name, lambda of_another_signature: None)
        nf4_patch.enable(**on)
        assert installed.pop(target.name).state() is State.REFUSED
        assert not is_ours(get_attr(holder, name))
        nf4_patch.disable()
    put(holder, name, original)


def test_there_is_one_form_of_replacement():
    """Each replacement has its own code object, because Dynamo caches compilations by code object.

    A replacement of an autograd function's method holds only functions and strings, which Dynamo of PyTorch 2.8 can
    create anew.
    """
    made = {target.name: target.make(stand_in(target)) for target in TARGETS}
    codes = {name: replacement.__code__ for name, replacement in made.items()}
    assert len({(code.co_filename, code.co_firstlineno) for code in codes.values()}) == 1
    assert len({id(code) for code in codes.values()}) == len(TARGETS)
    for target in TARGETS:
        if target.replace == ".libraries.bitsandbytes.adapters:observed":
            held = [cell.cell_contents for cell in made[target.name].__closure__]
            assert {type(each) for each in held} <= {types.FunctionType, str, type(None)}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_over_ours_is_seen_and_stays(wrap, on):
    theirs = wrap(F.dequantize_4bit)
    packed, state = quantized((64, 128), torch.float16, on)
    with replaced_by(theirs, on=True):
        assert row().state == "wrapped"
        want = expected(packed, state)
        hits = counters.hits(TARGET)
        assert hits >= 1
        nf4_patch.disable()
        assert F.dequantize_4bit is theirs
        assert torch.equal(F.dequantize_4bit(packed, state), want)
        assert counters.hits(TARGET) == hits
        nf4_patch.enable()
        assert F.dequantize_4bit is theirs  # ours is beneath it: not put on top a second time
        F.dequantize_4bit(packed, state)
        assert counters.hits(TARGET) == hits + 1


def test_somebody_elses_function_is_left_in_place_and_can_be_patched(on):
    """Another patcher replaces nf4_patch's function without calling it. disable() leaves the new function, and enable()
    patches it.
    """
    calls = []

    def theirs(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        calls.append(A)
        return original(A, quant_state, absmax, out, blocksize, quant_type)

    packed, state = quantized((64, 128), torch.float16, on)
    with replaced_by(theirs, on=True) as original:
        assert row().state == "displaced" and "call enable() again" in row().note
        nf4_patch.disable()
        assert F.dequantize_4bit is theirs
        nf4_patch.enable()
        assert row().state == "patched"
        want = expected(packed, state)
        assert not calls and counters.hits(TARGET) == 1
        state.blocksize = 96  # what is unsupported goes to theirs
        with pytest.raises(ValueError, match="blocksize"):
            F.dequantize_4bit(packed, state)
        assert len(calls) == 1
        state.blocksize = 64
        nf4_patch.disable()
        assert F.dequantize_4bit is theirs
        assert torch.equal(expected(packed, state), want)


def test_a_wrapper_full_of_closures_is_searched_quickly(on):
    """Thirty functions close over each other. A depth-first search without a limit would never end."""

    def make(others):
        a, b, c, d, e, f, g, h = others
        return lambda *args: (a, b, c, d, e, f, g, h)

    functions = [lambda *args: None for _ in range(8)]
    for _ in range(30):
        functions = [make(functions) for _ in range(8)]
    with replaced_by(functions[0], on=True):
        assert row().state == "displaced"


def test_copies_of_the_original(on, monkeypatch):
    """A global with the function's name is replaced, unless somebody replaced it meanwhile.

    A global with another name stays the original.
    """
    nf4_patch.disable()
    original = F.dequantize_4bit
    script, other = (types.ModuleType(name) for name in ("a_script", "another"))
    for module in (script, other):
        module.stock = module._original = module.dequantize_4bit = original
        monkeypatch.setitem(sys.modules, module.__name__, module)
    nf4_patch.enable()
    assert script.stock is script._original is original
    assert script.dequantize_4bit is other.dequantize_4bit is F.dequantize_4bit is not original
    theirs = other.dequantize_4bit = lambda *args, **kwargs: "theirs"
    nf4_patch.disable()
    assert other.dequantize_4bit is theirs and script.dequantize_4bit is original
    nf4_patch.enable()
    assert other.dequantize_4bit is theirs and script.dequantize_4bit is F.dequantize_4bit
    F.dequantize_4bit = theirs
    nf4_patch.disable()
    assert F.dequantize_4bit is theirs and script.dequantize_4bit is original
    F.dequantize_4bit = original


@pytest.fixture
def script(on, monkeypatch):
    """Return a module that imported the function before the patch was on, and a module that imports it while the patch is on."""
    nf4_patch.disable()
    script = types.ModuleType("a_script")
    script.original = script.dequantize_4bit = F.dequantize_4bit
    monkeypatch.setitem(sys.modules, script.__name__, script)
    nf4_patch.enable()
    late = types.ModuleType("another_script")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    script.ours = late.dequantize_4bit = F.dequantize_4bit
    script.late = late
    assert script.ours is script.dequantize_4bit is not script.original
    yield script
    nf4_patch.disable()
    F.dequantize_4bit = script.original
    installed.pop(TARGET)


def copies(script):
    return script.dequantize_4bit, script.late.dequantize_4bit


@pytest.mark.every(2)
@pytest.mark.parametrize(("while_on", "wrapper"), crossed((True, False), [*WRAPPERS, "ours, put back by hand"]))
def test_copies_follow_the_patch_whatever_stands_at_the_name(script, wrapper, while_on):
    """Somebody wraps nf4_patch's function, or restores the original. enable() still patches the copies in other
    modules, and disable() restores them.
    """
    if not while_on:
        nf4_patch.disable()
    F.dequantize_4bit = theirs = WRAPPERS.get(wrapper, lambda ours: ours)(script.ours)
    for _ in range(2):
        nf4_patch.disable()
        assert copies(script) == (script.original, script.original)
        assert F.dequantize_4bit in (theirs, script.original)
        nf4_patch.enable()
        assert copies(script) == (script.ours, script.ours)
        assert F.dequantize_4bit is theirs
        assert row().state == ("patched" if theirs is script.ours else "wrapped")


def test_what_was_copied_before_another_library_wrapped_it_is_patched(script):
    """The patch is turned on for the first time only after this."""
    nf4_patch.disable()
    installed.pop(TARGET)
    F.dequantize_4bit = theirs = functools.wraps(script.original)(
        lambda *args, **kwargs: script.original(*args, **kwargs)
    )
    for _ in range(2):
        nf4_patch.enable()
        assert [function.__wrapped__ for function in (F.dequantize_4bit, *copies(script))] == [
            theirs,
            *[script.original] * 2,
        ]
        assert script.dequantize_4bit is script.late.dequantize_4bit and is_ours(script.dequantize_4bit)
        nf4_patch.disable()
        assert (F.dequantize_4bit, *copies(script)) == (theirs, *[script.original] * 2)


def unrelated(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
    return "theirs"


@pytest.mark.parametrize("theirs", [Hidden, lambda ours: unrelated], ids=["refused", "adapted"])
def test_copies_are_restored_after_the_name_went_to_somebody_else(script, theirs):
    """The copies are restored whether or not enable() can replace the function at the name, which status() says in advance."""
    F.dequantize_4bit = theirs = theirs(script.ours)
    adapted = theirs is unrelated
    assert row().state == "displaced" and ("call enable() again" in row().note) == adapted
    assert adapted or "which cannot be replaced" in row().note
    for _ in range(2):
        nf4_patch.enable()
        assert row().state == ("patched" if adapted else "refused")
        assert (F.dequantize_4bit is theirs) != adapted
        assert copies(script) == (script.ours, script.ours)
        nf4_patch.disable()
        assert F.dequantize_4bit is theirs
        assert copies(script) == (script.original, script.original)
    F.dequantize_4bit = script.original
    nf4_patch.enable()
    assert row().state == "patched" and copies(script) == (script.ours, script.ours)
    nf4_patch.disable()
    assert copies(script) == (script.original, script.original) and F.dequantize_4bit is script.original


@pytest.mark.full
def test_replacements_of_which_nothing_is_left_are_forgotten(script):
    for _ in range(20):
        F.dequantize_4bit = functools.partial(unrelated)
        nf4_patch.enable()
        assert row().state == "patched"
        nf4_patch.disable()
    assert len(installed[TARGET].pairs) == 2  # of the copies, and the last


def test_what_is_refused_is_said_once(script, caplog):
    """It is not repeated at every enable(), nor in every block."""
    F.dequantize_4bit = lambda of_another_signature_that_no_test_has: None
    caplog.clear()
    with caplog.at_level(logging.WARNING, "nf4_patch"):
        for _ in range(20):
            with nf4_patch.enabled():
                assert row().state == "refused"
            nf4_patch.enable()
    assert [TARGET in record.getMessage() for record in caplog.records] == [True]


def test_an_error_at_a_name_is_said_once_and_copies_are_restored(script, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("an error that no other test has")

    F.dequantize_4bit = unrelated
    monkeypatch.setattr(Target, "make", broken)
    caplog.clear()
    for _ in range(20):
        with nf4_patch.enabled():
            assert row().state == "refused" and "see the log" in row().note
    said = [
        record.exc_info for record in caplog.records if TARGET in record.getMessage()
    ]  # other rows are new here too
    assert len(said) == 1 and said[0]
    nf4_patch.disable()
    assert copies(script) == (script.original, script.original)


def test_what_stands_under_the_name_can_be_pickled(on):
    """While the patch is on, a copy of the original cannot be pickled, because pickle looks functions up by name."""
    nf4_patch.disable()
    kept = [F.dequantize_4bit]
    for switch in (nf4_patch.enable, nf4_patch.disable):
        switch()
        assert pickle.loads(pickle.dumps(F.dequantize_4bit)) is F.dequantize_4bit
        with pytest.raises(pickle.PicklingError) if nf4_patch.is_enabled() else contextlib.nullcontext():
            assert pickle.loads(pickle.dumps(kept)) == kept


def fails(self, *_):
    raise RuntimeError("not asked")


ODD = {
    "a __dict__": type("Odd", (types.ModuleType,), {"__dict__": property(fails)}),
    "attributes": type("Odd", (types.ModuleType,), {"__getattribute__": fails}),
    "missing attributes": type("Odd", (types.ModuleType,), {"__getattr__": fails}),
    "a class": type("Odd", (), {"__class__": property(fails), "__init__": lambda self, name: None}),
    "no module": str,
}


@pytest.mark.parametrize("kind", ODD)
def test_a_module_whose_attributes_raise_is_passed_over(kind, on, monkeypatch):
    nf4_patch.disable()
    monkeypatch.setitem(sys.modules, "odd", ODD[kind]("odd"))
    original = F.dequantize_4bit
    nf4_patch.enable()
    assert row().state == "patched" and F.dequantize_4bit is not original
    nf4_patch.disable()
    assert row().state == "off" and F.dequantize_4bit is original


def test_a_lazy_module_is_not_loaded(on, monkeypatch, tmp_path):
    (tmp_path / "lazy.py").write_text("raise KeyError('loaded')")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    monkeypatch.setitem(sys.modules, "lazy", module := importlib.util.module_from_spec(spec))
    nf4_patch.disable()
    spec.loader.exec_module(module)
    nf4_patch.enable()
    assert row().state == "patched"
    with pytest.raises(KeyError, match="loaded"):
        module.dequantize_4bit  # noqa: B018


def test_a_function_of_another_release_is_left_alone(monkeypatch):
    """It may have the same name and parameters."""
    nf4_patch.disable()
    original = F.dequantize_4bit
    monkeypatch.setattr(placement, "release_of", lambda library: "0.1")
    with replaced_by(original):
        assert F.dequantize_4bit is original and row().state is State.ABSENT
