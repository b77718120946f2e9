"""Which code reads from the cache when torch.compile compiles a module: the forward, inside bitsandbytes' op.

The traced backward dequantizes.
"""

from __future__ import annotations

import functools

import bitsandbytes as bnb
import bitsandbytes.functional as F
import pytest
import torch
from target import linear, same, step
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import nf4_patch
from nf4_patch.cache.store import cache
from nf4_patch.patching.counters import counters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDE = 64


def off_and_on():
    nf4_patch.disable()
    nf4_patch.enable(cache=2**30)


SWITCHED = nf4_patch.disable, off_and_on, lambda: cache.set_budget(0)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def compiled(linear_op, fresh_dynamo):
    layer = linear(DEVICE, SIDE, SIDE, weights=torch.bfloat16)
    return layer, torch.compile(layer, backend="aot_eager", fullgraph=True)


forward_and_backward = functools.partial(step, device=DEVICE, inputs=SIDE)


@pytest.mark.full
def test_a_compiled_layer_in_a_checkpoint_while_the_cache_changes(compiled):
    layer, module = compiled
    want = forward_and_backward(layer)
    for between in SWITCHED:
        nf4_patch.enable(cache=2**30)

        def checkpointed(x, between=between):
            y = checkpoint(module, x, use_reentrant=False)
            between()
            return y

        assert same(forward_and_backward(checkpointed), want)


@pytest.mark.full
def test_five_lengths_make_as_many_graphs_as_without_a_cache(compiled):
    """The compiled forward reads from the cache, and its traced backward dequantizes. Both eager passes read from the cache."""
    layer, module = compiled
    made = []
    for options in ({}, {"cache": 2**30}):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        nf4_patch.enable(**options)
        for rows in (600, 601, 602, 603, 604):
            assert same(forward_and_backward(module, rows=rows), forward_and_backward(layer, rows=rows))
        made.append(graphs())
    assert made[0] == made[1]
    assert (cache.misses, cache.hits) == (1, 5 * 3 - 1)


@pytest.mark.full
def test_no_rows_and_another_librarys_wrapper_break_no_graph(compiled, monkeypatch):
    _, module = compiled
    nf4_patch.enable(cache=2**30)
    y, grad = forward_and_backward(module, rows=0)
    assert y.shape == (0, SIDE) and grad.shape == (0, SIDE)
    ours, want = F.dequantize_4bit, forward_and_backward(module)
    for theirs in (ours, ours.__wrapped__):  # over ours, and in its place
        torch._dynamo.reset()
        monkeypatch.setattr(F, "dequantize_4bit", lambda *args, theirs=theirs, **kwargs: theirs(*args, **kwargs) * 1)
        assert same(forward_and_backward(module), want)


@pytest.mark.full
def test_a_module_that_was_called_before_it_was_quantized(fresh_dynamo, linear_op):
    layer = bnb.nn.Linear4bit(SIDE, SIDE, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).bfloat16()
    module = torch.compile(layer, backend="aot_eager")
    nf4_patch.enable(cache=2**30)
    with pytest.raises(AssertionError):  # bitsandbytes' own
        forward_and_backward(module)
    layer.to(DEVICE)
    for _ in range(2):
        assert same(forward_and_backward(module), forward_and_backward(layer))
    assert (cache.misses, cache.hits) == (1, 5)  # the compiled forward, and both passes of the other


def test_a_hook_that_writes_into_the_weight(compiled):
    layer, _ = compiled
    nf4_patch.enable(cache=2**30)

    def flip(*_):
        with torch.no_grad():
            layer.weight.bitwise_xor_(255)

    forward_and_backward(layer)
    flip()
    want = forward_and_backward(layer)
    flip()
    layer.register_forward_pre_hook(flip)
    torch._dynamo.reset()
    assert same(forward_and_backward(torch.compile(layer, backend="aot_eager")), want)


def test_a_compiled_module_under_a_dispatch_mode_is_counted(compiled):
    layer, _ = compiled
    module = torch.compile(layer, backend="aot_eager")
    nf4_patch.enable()
    want = forward_and_backward(module)
    counters.reset()
    with FlopCounterMode(display=False):
        got = forward_and_backward(module)
    assert same(got, want)
    assert counters.hits("bitsandbytes.backends.cuda.ops._dequant_linear_fallback") == 1 and not counters.fallbacks
