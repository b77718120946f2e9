"""Who else puts functions at the same names: status() tells, disable() never removes what is not ours."""

from __future__ import annotations

import functools
import importlib.util
import types

import bitsandbytes.functional as F
import pytest
import torch
from oracle import expected, quantized
from subprocess_python import program
from target import TARGET, linear, replaced_by, row, same, step

import nf4_patch
from nf4_patch.patching.counters import counters

WRAPPERS = {
    "wraps": lambda ours: functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs)),
    "closure": lambda ours: lambda A, *args, **kwargs: ours(A, *args, **kwargs),
    "partial": functools.partial,
    "method": lambda ours: types.MethodType(lambda self, *args, **kwargs: ours(*args, **kwargs), object()),
}


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


def test_the_original_restored_behind_our_back(on):
    original = F.dequantize_4bit.__wrapped__
    packed, state = quantized((64, 128), torch.float16, on)
    with replaced_by(original, on=True):
        assert row().state == "displaced" and "enable() again" in row().note
        F.dequantize_4bit(packed, state)
        assert counters.hits(TARGET) == 0
        nf4_patch.enable()
        assert row().state == "patched"
        F.dequantize_4bit(packed, state)
        assert counters.hits(TARGET) == 1
        nf4_patch.disable()
        assert F.dequantize_4bit is original


def test_somebody_elses_function_is_left_in_place_and_can_be_patched(on):
    """Another patcher puts its own function over ours, without ours beneath: disable() leaves it, enable() adapts it."""
    calls = []

    def theirs(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type="fp4"):
        calls.append(A)
        return original(A, quant_state, absmax, out, blocksize, quant_type)

    packed, state = quantized((64, 128), torch.float16, on)
    with replaced_by(theirs, on=True) as original:
        assert row().state == "displaced"
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
    """Thirty functions that all close over each other: a search by depth alone would never return."""

    def make(others):
        a, b, c, d, e, f, g, h = others
        return lambda *args: (a, b, c, d, e, f, g, h)

    functions = [lambda *args: None for _ in range(8)]
    for _ in range(30):
        functions = [make(functions) for _ in range(8)]
    with replaced_by(functions[0], on=True):
        assert row().state == "displaced"


UNSLOTH = pytest.mark.skipif(
    importlib.util.find_spec("unsloth") is None or torch.cuda.is_available(),
    reason="the real Unsloth on a CPU machine; the GPU has gpu/test_steps.py",
)


@UNSLOTH
@pytest.mark.parametrize("first", ["before", pytest.param("after", marks=pytest.mark.full)])
def test_unsloth_zoos_wrapper_of_bitsandbytes(first, tmp_path):
    """unsloth_zoo wraps dequantize_4bit in a closure: over ours or beneath it, hits, off and on."""
    program("unsloth_zoo_wrapper", first, interpreted=True, cwd=tmp_path, UNSLOTH_ALLOW_CPU="1")


@pytest.mark.parametrize("first", ["nf4_patch", pytest.param("liger", marks=pytest.mark.full)])
def test_liger(first, tmp_path):
    """Liger replaces classes of transformers and nothing of ours: hits inside its modules, off and on again."""
    pytest.importorskip("liger_kernel")
    program("liger", first, interpreted=True, cwd=tmp_path)


def test_accelerate_hooks(on):
    """accelerate's hooks wrap a module's forward, not our target: offloading hooks around a Linear4bit change nothing."""
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    layer = linear(on)
    nf4_patch.disable()
    want = step(layer, on)
    nf4_patch.enable()
    accelerate_hooks.add_hook_to_module(layer, accelerate_hooks.AlignDevicesHook(execution_device=on))
    assert same(step(layer, on), want)
    accelerate_hooks.remove_hook_from_module(layer)
    assert same(step(layer, on), want)
    assert counters.hits(TARGET) == 2
