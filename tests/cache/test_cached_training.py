"""The cache in training steps of bitsandbytes' layers: bit-identical results, fewer decodes, and changed weights decoded again."""

from __future__ import annotations

import copy
import functools
import gc
from concurrent.futures import ThreadPoolExecutor

import bitsandbytes as bnb
import bitsandbytes.functional as F
import fuzz
import pytest
import target
import torch
from alternation import crossed
from oracle import quantized
from target import Object, read_by_bitsandbytes, same, step

import nf4_patch
from nf4_patch.cache.allocator import allocated
from nf4_patch.cache.store import StaleWeightError, cache
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer, served
from nf4_patch.patching.reasons import Reason

FORWARD = "bitsandbytes.backends.cuda.ops._dequant_linear_fallback"
SIDE = 64
ONE = allocated(SIDE * SIDE * 2)


def linear(device, seed=0):
    return target.linear(device, SIDE, SIDE, seed=seed, weights=torch.bfloat16)


class Model(torch.nn.Module):
    """Three checkpointed blocks of two layers."""

    def __init__(self, device, reentrant):
        super().__init__()
        layers = [linear(device, seed) for seed in range(6)]
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(first, torch.nn.SiLU(), second, torch.nn.SiLU())
            for first, second in zip(layers[::2], layers[1::2], strict=True)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def peft_model(device, reentrant):
    peft = pytest.importorskip("peft")
    model = Model(device, reentrant)
    names = [name for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)]
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=names, r=4, init_lora_weights="gaussian")
    return peft.get_peft_model(model, config).to(device)


def train(model, device, steps=2):
    """Return the losses, and the adapter after the last step."""
    torch.manual_seed(1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        x = torch.randn(600, SIDE, device=device, dtype=torch.bfloat16, requires_grad=True)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in parameters)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_peft_step_has_the_same_bits_and_fewer_decodes(linear_op, reentrant):
    model = peft_model(linear_op, reentrant)
    adapter = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    want = train(model, linear_op)
    saved = {}
    for mode in (3 * ONE, 6 * ONE):
        with torch.no_grad():
            for parameter, value in zip((p for p in model.parameters() if p.requires_grad), adapter, strict=True):
                parameter.copy_(value)
        nf4_patch.enable(cache=f"{mode}B")
        hits, misses, decoded = cache.hits, cache.misses, counters.hits(FORWARD)
        assert same(train(model, linear_op), want)
        reads = cache.hits - hits + cache.misses - misses
        assert reads == 2 * 3 * 6
        saved[mode] = (cache.hits - hits) / reads
        assert counters.hits(FORWARD) > decoded
        assert cache.taken[linear_op.index or 0 if linear_op.type == "cuda" else -1] <= mode
        nf4_patch.disable()
        assert not nf4_patch.status().cache.taken
    assert saved[6 * ONE] == pytest.approx((6 - 1) / 6)  # every weight is decoded once
    assert saved[3 * ONE] == pytest.approx((6 - 1) / 6 / 2)  # half of the memory


def test_moving_and_merging(linear_op):
    """A merge changes cached weights. Its result is bit-identical to bitsandbytes' own."""
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(linear(linear_op))
    model.is_loaded_in_4bit = True  # what transformers sets: peft then takes its bitsandbytes layer
    config = peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(model, config).to(linear_op)
    stock = copy.deepcopy(model)
    for change, arguments, decodes in (("merge_adapter", (), 1), ("unmerge_adapter", (), 1), ("to", ("cpu",), 0)):
        nf4_patch.enable(cache=2**20)
        step(model, linear_op, SIDE)
        assert cache.weights
        hits = counters.hits(target.TARGET)
        getattr(model, change)(*arguments)
        assert counters.hits(target.TARGET) == hits + decodes
        got = step(model.to(linear_op), linear_op, SIDE)
        nf4_patch.disable()
        getattr(stock, change)(*arguments)
        assert same(got, step(stock.to(linear_op), linear_op, SIDE))
    nf4_patch.enable(cache=2**20)
    layer = copy.deepcopy(model)
    assert same(step(layer, linear_op, SIDE), step(model, linear_op, SIDE))
    del model, layer, stock
    gc.collect()
    assert not cache.snapshot().weights


def test_strict_compares(linear_op, monkeypatch):
    monkeypatch.setenv("NF4_PATCH_STRICT", "1")
    layer = linear(linear_op)
    nf4_patch.enable(cache=2**20)
    first = step(layer, linear_op, SIDE)
    assert same(step(layer, linear_op, SIDE), first)
    layer.weight.data.bitwise_xor_(255)  # no version counter sees it
    with pytest.raises(StaleWeightError, match="call nf4_patch"):
        step(layer, linear_op, SIDE)
    assert not torch.equal(step(layer, linear_op, SIDE)[0], first[0])


def test_callers_that_may_write_get_new_memory(linear_op):
    layer = linear(linear_op)
    nf4_patch.enable(cache=2**20)
    want = step(layer, linear_op, SIDE)
    (entry,) = cache.weights.values()
    packed, state = layer.weight, layer.weight.quant_state
    out = torch.empty(SIDE, SIDE, dtype=state.dtype, device=linear_op)
    for mine in (
        F.dequantize_4bit(packed, state),
        F.dequantize_4bit(packed, state, out=out),
        Dequantizer("a test").of_state(packed, state, out, only_read=True),
        nf4_patch.dequantize_nf4(packed, state),
        nf4_patch.triton_dequantize_nf4(layer),
    ):
        assert mine.data_ptr() != entry.views[0].data_ptr()
        mine.zero_()
    assert same(step(layer, linear_op, SIDE), want)


class Doubling(Object):
    """A wrapper that doubles the weight that it gets, in place."""

    def __call__(self, *args, **kwargs):
        w = super().__call__(*args, **kwargs)
        w.data.mul_(2)
        return w


def around(function):
    doubled = Doubling(function)
    return functools.wraps(function)(lambda *args, **kwargs: doubled(*args, **kwargs))


def backward(ctx, grad_output):
    """Another library's backward, which doubles the weight."""
    w = F.dequantize_4bit(ctx.tensors[1], ctx.state)
    w.data.mul_(2)
    return grad_output @ w, None, None, None, None


WRITERS = {
    "a wrapper": (F, "dequantize_4bit", around),
    "an object": (F, "dequantize_4bit", Doubling),
    "a wrapper in no_grad": (F, "dequantize_4bit", lambda ours: torch.no_grad()(around(ours))),
    "the caller": (bnb.autograd._functions.MatMul4Bit, "backward", lambda ours: staticmethod(backward)),
}


@pytest.mark.parametrize("who", WRITERS)
def test_a_wrapper_that_writes_into_a_weight_gets_new_memory(who, linear_op, monkeypatch):
    """The input's gradient is doubled once at every step, and the cached weight stays right."""
    holder, name, wrap = WRITERS[who]
    layer = linear(linear_op)
    want, dense = step(layer, linear_op, SIDE), nf4_patch.dequantize_nf4(layer.weight, layer.weight.quant_state)
    nf4_patch.enable(cache=2**20)
    monkeypatch.setattr(holder, name, wrap(getattr(holder, name)))
    nf4_patch.enable()
    for _ in range(3):
        y, grad = step(layer, linear_op, SIDE)
        assert torch.equal(y, want[0]) and torch.equal(grad, 2 * want[1])
    (entry,) = cache.weights.values()  # of the forward
    assert torch.equal(entry.views[0], dense)


def test_only_bitsandbytes_reads_from_the_cache(linear_op):
    """bitsandbytes' autograd functions call the public function. Other callers of this function get a new tensor, in any thread."""
    layer = linear(linear_op)
    nf4_patch.enable(cache=2**20)

    def memory(call):
        return call(layer.weight, layer.weight.quant_state).data_ptr()

    found = [memory(read_by_bitsandbytes), memory(F.dequantize_4bit), memory(read_by_bitsandbytes)]
    with ThreadPoolExecutor(1) as thread:
        found += [thread.submit(memory, F.dequantize_4bit).result()]
    (entry,) = cache.weights.values()
    assert [address == entry.views[0].data_ptr() for address in found] == [True, False, True, False]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_caller_is_found_through_any_number_of_functions_of_an_adapter(linear_op, depth):
    layer = linear(linear_op)

    def through(count, call, *arguments):
        return call(*arguments) if not count else through(count - 1, call, *arguments)

    def adapter(serve, packed, state):
        return through(depth, serve, packed, state, None, False, True)

    read = served(readers="a_reader")(adapter)(target.target_like("bitsandbytes"), lambda packed, state: None)
    results = {}
    for name in ("a_reader", "another"):
        found = {"__name__": name, "read": read}
        exec("def call(packed, state): return read(packed, state)", found)
        results[name] = found["call"]
    nf4_patch.enable(cache=2**20)
    addresses = [call(layer.weight, layer.weight.quant_state).data_ptr() for call in results.values()]
    (entry,) = cache.weights.values()
    assert [address == entry.views[0].data_ptr() for address in addresses] == [True, False]


def test_toggling_in_the_middle_of_a_step(linear_op):
    layers = torch.nn.Sequential(linear(linear_op, 1), linear(linear_op, 2))
    want = step(layers, linear_op, SIDE)
    for first, then in (("off", 2**20), (2**20, "off"), (2**20, 2**21), (2**20, None)):
        nf4_patch.enable(cache=first)
        torch.manual_seed(1)
        x = torch.randn(600, SIDE, dtype=torch.bfloat16).to(linear_op).requires_grad_()
        y = layers(x)
        nf4_patch.disable() if then is None else nf4_patch.enable(cache=then)
        y.square().sum().backward()
        assert same((y.detach(), x.grad), want)
        nf4_patch.disable()
        assert not cache.weights


def test_a_transposed_or_flat_or_fp4_weight(linear_op):
    nf4_patch.enable(cache=2**20)
    for options in ({"nested": False}, {"quant_type": "fp4"}, {"storage": torch.bfloat16}):
        packed, state = quantized((SIDE, SIDE), torch.bfloat16, linear_op, **options)
        packed = torch.nn.Parameter(packed, requires_grad=False)
        x = torch.randn(600, SIDE, dtype=torch.bfloat16, device=linear_op, requires_grad=True)
        for _ in range(2):
            for each in (packed, packed.t()):
                y = bnb.matmul_4bit(x, each, state)
                (grad,) = torch.autograd.grad(y.sum(), x)
                weight = F.dequantize_4bit(packed, state)
                assert torch.equal(y, torch.nn.functional.linear(x, weight))
                assert torch.equal(grad, torch.ones_like(y) @ weight)
    assert cache.misses == 3


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("nested", "name"), crossed((True, False), fuzz.FAULTS, only=[*[*fuzz.FAULTS][::3], "absmax None"])
)
def test_a_malformed_state_gets_the_same_answer_as_without_a_cache(name, nested, linear_op):
    """The weight may have been read before its state was damaged."""

    def answers(option):
        nf4_patch.enable(cache=option)
        packed, state = quantized((64, 64), torch.bfloat16, linear_op, nested=nested)
        for known in (False, True):
            parameter = torch.nn.Parameter(packed.clone(), requires_grad=False)
            copied = copy.deepcopy(state)
            dequantizer = Dequantizer("test")
            attempt = functools.partial(dequantizer.fallbacks.attempt, dequantizer.of_state, only_read=True)
            if known:
                attempt(parameter, copied)
            broken = fuzz.broken(fuzz.FAULTS[name], parameter, copied)
            for _ in range(2 if broken else 0):
                yield attempt(*broken)

    for without, got in zip(list(answers("off")), list(answers("1GiB")), strict=True):
        if isinstance(without, Reason):
            assert got is without
        else:
            assert torch.equal(got, without)
    assert not nf4_patch.status().errors


def test_the_status_of_the_cache(linear_op):
    layer = linear(linear_op)
    nf4_patch.enable(cache="1MiB")
    step(layer, linear_op, SIDE)
    status = nf4_patch.status().cache
    assert (status.mode, status.weights, status.hits, status.misses) == (str(2**20), 1, 1, 1)
    assert list(status.taken.values()) == [ONE]
    assert 'cache="1 MiB": 1 weight, ' in str(nf4_patch.status())
    nf4_patch.disable()
    assert not nf4_patch.status().cache.taken
