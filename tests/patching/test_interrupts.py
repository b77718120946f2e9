"""Ctrl-C at any line: nothing stays switched, charged or handed out that was not before. The next call is right."""

from __future__ import annotations

import inspect
import sys
import types

import bitsandbytes.functional as F
import pytest
import torch
from interrupts import interrupted_at_every_line
from oracle import expected, layout_of, quantized
from target import linear, read_by_bitsandbytes, row, same, step

import nf4_patch
from nf4_patch.cache.store import Cache, cache
from nf4_patch.nf4.dequantize import launch
from nf4_patch.patching import hooks, placement
from nf4_patch.patching.dequantizer import Dequantizer
from nf4_patch.patching.switch import switch
from nf4_patch.tools.patch import patch

SIDE = 64


@pytest.fixture
def script(monkeypatch):
    """A module that took the function by its name."""
    script = types.ModuleType("a_script")
    script.dequantize_4bit = F.dequantize_4bit
    monkeypatch.setitem(sys.modules, script.__name__, script)
    yield script
    nf4_patch.disable()


def line_of_finally(function):
    return next(i for i, text in enumerate(inspect.getsourcelines(function)[0]) if "finally:" in text)


def charged():
    return sum(kept.size for kept in {*cache.weights.values(), *cache.dropped})


def test_a_read_hands_out_nothing_afterwards(linear_op):
    """The public function gives memory of its own, and every byte of the cache is charged once."""
    layer = linear(linear_op, SIDE, SIDE, weights=torch.bfloat16)
    packed, state = layer.weight, layer.weight.quant_state
    want = step(layer, linear_op, SIDE)
    nf4_patch.enable(cache=2**20)
    adapter = next(target for target in hooks.TARGETS if target.name.endswith(".dequantize_4bit"))
    functions = (
        placement.installed[adapter.name].replacement, Dequantizer.of_state, Dequantizer.run, Cache.read, Cache.find, Cache.insert,
        Cache.keep, Cache._add, Cache._drop, Cache._drop_where, Cache.settle, Cache.release,
    )  # fmt: skip

    def reads():
        cache.release()
        first = read_by_bitsandbytes(packed, state)
        packed.add_(0)
        return first, read_by_bitsandbytes(packed, state)

    where = []
    for line in interrupted_at_every_line(reads, *functions):
        where.append(line)
        mine = F.dequantize_4bit(packed, state)
        assert all(mine.data_ptr() != kept.views[0].data_ptr() for kept in cache.weights.values() if kept.views), line
        mine.zero_()
        assert same(step(layer, linear_op, SIDE), want), line
        cache.settle()
        assert cache.taken.total() == charged(), line
        cache.release()
        assert not cache.taken.total() and not cache.is_unsettled, line
        assert not cache.lock._is_owned(), line
    assert len(where) > 60


def test_the_cache_is_what_the_next_call_says(linear_op):
    """An interrupt while it is switched on, off, or to another size or mode."""
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


def test_a_buffer_whose_growth_is_interrupted_holds_what_it_held(device):
    small, large = (quantized((SIDE, width), torch.float16, device) for width in (64, 4096))
    want = [expected(*weight) for weight in (small, large)]
    nf4_patch.enable()
    dequantizer = Dequantizer("a test")

    def small_again():
        launch._buffers.clear()
        for weight in (small, large):
            if (found := layout_of(*weight).memo().launch) is not None:
                found.view = None
        dequantizer.of_state(*small, into_buffer=True)

    def grown():
        return dequantizer.of_state(*large, into_buffer=True)

    where = []
    for line in interrupted_at_every_line(grown, launch.buffer_of, before=small_again):
        where.append(line)
        for weight, right in ((small, want[0]), (large, want[1]), (small, want[0])):
            assert torch.equal(dequantizer.of_state(*weight, into_buffer=True), right), line
    assert len(where) > 5


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_tool_that_is_interrupted_leaves_the_patch_as_it_was(on, before):
    (nf4_patch.enable if before else nf4_patch.disable)()
    body = inspect.unwrap(patch)
    end = body.__code__.co_firstlineno + line_of_finally(body)

    def use():
        with patch(on):
            pass

    for line in interrupted_at_every_line(use, body):
        assert nf4_patch.is_enabled() is before or int(line.split(":")[1]) > end, line
        (nf4_patch.enable if before else nf4_patch.disable)()
    nf4_patch.disable()
