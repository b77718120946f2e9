"""After Ctrl-C at any line of enable() and disable(), the next call puts every function in its place."""

from __future__ import annotations

import functools
import inspect
import sys
import types

import bitsandbytes.functional as F
import pytest
import torch
from interrupts import interrupted_at_every_line
from oracle import quantized
from target import read_by_bitsandbytes, row

import nf4_patch
from nf4_patch.activations.layers import Activations, activations
from nf4_patch.cache.store import Cache, cache
from nf4_patch.memory.spare import spare
from nf4_patch.offload import prefetch
from nf4_patch.patching import hooks, placement
from nf4_patch.patching.locks import Block
from nf4_patch.patching.switch import switch

SIDE = 64


@pytest.fixture
def script(monkeypatch):
    """Return a module that imported the function by its name."""
    script = types.ModuleType("a_script")
    script.dequantize_4bit = F.dequantize_4bit
    monkeypatch.setitem(sys.modules, script.__name__, script)
    yield script
    nf4_patch.disable()


def line_of_finally(function):
    return next(i for i, text in enumerate(inspect.getsourcelines(function)[0]) if "finally:" in text)


def test_spare_memory_ignores_no_forward_after_an_interrupted_recording():
    def record():
        with spare.ignoring.entered():
            assert spare.ignoring.on

    places = []
    for place in interrupted_at_every_line(record, Block.entered.__wrapped__):
        places.append(place)
        assert not spare.ignoring.on, place
    assert len(places) > 3


@pytest.mark.full
def test_the_cache_is_what_the_next_call_says(linear_op):
    """Interrupt the cache while it is switched on, off, or to another size or mode."""
    packed, state = quantized((SIDE, SIDE), torch.bfloat16, linear_op)
    packed = torch.nn.Parameter(packed, requires_grad=False)
    for before, after in (("off", 2**20), (2**20, "off"), (2**20, 2**21), ("auto", 2**20), (2**20, "auto")):
        switch_it = lambda after=after: nf4_patch.enable(cache=after)  # noqa: E731
        functions = Cache.configure, hooks.put_in_force, type(switch).set
        back = lambda before=before: nf4_patch.enable(cache=before)  # noqa: E731
        for line in interrupted_at_every_line(switch_it, *functions, before=back):
            nf4_patch.enable(cache=after)
            assert (cache.on, cache.mode) == (after != "off", after), line
            assert (cache.auto is not None) == (after == "auto"), line
            kept = [read_by_bitsandbytes(packed, state).data_ptr() for _ in range(2)]
            assert (kept[0] == kept[1]) == (after in (2**20, 2**21)) or not cache.weights, line
            nf4_patch.enable(cache=before)
            assert cache.mode == before and (cache.auto is not None) == (before == "auto"), line


@pytest.mark.parametrize(("before", "after"), [("off", "auto"), ("auto", "off"), ("auto", 2**20)])
def test_spare_memory_is_shared_as_the_next_call_says(before, after):
    for option, user, function in (
        ("activations", activations.user, Activations.configure),
        ("offload", prefetch.user, prefetch.follow),
    ):
        call, back = (functools.partial(nf4_patch.enable, **{option: value}) for value in (after, before))
        for line in interrupted_at_every_line(call, function, before=back):
            call()
            assert (user in spare.users) == (after == "auto"), line
        nf4_patch.disable()
        assert user not in spare.users


@pytest.mark.full
def test_a_block_that_is_interrupted_leaves_the_patch_as_it_was(script):
    original, where = F.dequantize_4bit, []
    body = inspect.unwrap(hooks.block)

    def block():
        with nf4_patch.enabled():
            pass

    end = body.__code__.co_firstlineno + line_of_finally(body)
    for line in interrupted_at_every_line(block, body, hooks.enable, hooks.put_in_force):
        where.append(line)
        name, number = line.split(":")
        if name == "block" and int(number) < end:
            assert not nf4_patch.is_enabled() and not hooks._blocks, line
        nf4_patch.disable()
        assert F.dequantize_4bit is script.dequantize_4bit is original, line
        with nf4_patch.enabled():
            assert nf4_patch.is_enabled() and row().state == "patched", line
            assert F.dequantize_4bit is script.dequantize_4bit is not original, line
        assert not nf4_patch.is_enabled() and F.dequantize_4bit is script.dequantize_4bit is original, line
        hooks._blocks.clear()
    assert len(where) > 20


@pytest.mark.full
def test_functions_are_put_back_after_an_interrupted_enable(script):
    original, where = F.dequantize_4bit, []
    names = ("install", "copies", "put"), ("use", "swap")
    functions = [getattr(placement, name) for name in names[0]] + [
        getattr(placement.Installed, name) for name in names[1]
    ]
    for start, then in ((nf4_patch.disable, nf4_patch.enable), (nf4_patch.enable, nf4_patch.disable)):
        for line in interrupted_at_every_line(then, *functions, before=start):
            where.append(line)
            nf4_patch.disable()
            assert F.dequantize_4bit is script.dequantize_4bit is original, line
            nf4_patch.enable()
            assert F.dequantize_4bit is script.dequantize_4bit is not original, line
            assert F.dequantize_4bit.__wrapped__ is original, line
    assert len(where) > 20
