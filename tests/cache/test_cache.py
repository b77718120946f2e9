"""The cache alone: how an entry is identified, which weights are refused, and interrupts during a change."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import changes
import pytest
import torch
from interrupts import at_line, interrupted_at_every_line, lines_of
from oracle import expected, layout_of, quantized
from target import target_like
from threads import together

from nf4_patch.cache import replacements, store
from nf4_patch.cache.allocator import allocated
from nf4_patch.cache.entry import CacheEntry
from nf4_patch.cache.option import Uncached
from nf4_patch.cache.store import Cache
from nf4_patch.nf4.identity import Identity
from nf4_patch.patching.reasons import Reason

GPU = torch.cuda.is_available()
DEVICE, INDEX = (torch.device("cuda", 0), 0) if GPU else (torch.device("cpu"), -1)  # the index is a key of ``held``
SHAPE = (64, 256)
SIZE = allocated(64 * 256 * 2)  # in bf16


def weight(seed=0, nested=True, shape=SHAPE):
    packed, state = quantized(shape, torch.bfloat16, DEVICE, nested=nested, seed=seed)
    return torch.nn.Parameter(packed, requires_grad=False), state


def read(cache, packed, state, decode=expected):
    """Read a weight as the replacements do. ``decode`` defaults to bitsandbytes."""
    found = cache.read(layout_of(packed, state), lambda weight: decode(packed, state))
    return decode(packed, state) if found is None else found


@pytest.fixture
def cache(monkeypatch):
    cache = Cache()
    cache.configure(2**20)
    monkeypatch.setattr(replacements, "cache", cache)
    row = target_like("torch", option="always")
    monkeypatch.setattr(torch.UntypedStorage, "resize_", replacements.resize(row, torch.UntypedStorage.resize_))
    yield cache
    cache.configure("off")


@pytest.mark.parametrize("which", ["packed", "absmax", "second absmax"])
def test_other_strides_are_another_weight(cache, which):
    """Address, shape and version are the same."""
    packed, state = weight(nested="second" in which, shape=(256, 256))
    holder, name = {"packed": (packed, "data"), "absmax": (state, "absmax")}.get(which, (state.state2, "absmax"))
    values = getattr(holder, name).view(-1)
    wide = torch.stack([values, values + 1], 1).view(-1)
    shape = getattr(holder, name).shape
    setattr(holder, name, wide[: len(values)].view(shape))
    first, known = read(cache, packed, state), getattr(holder, name)  # which lives on
    assert read(cache, packed, state) is first
    setattr(holder, name, wide[::2].view(shape))
    assert getattr(holder, name).data_ptr() == known.data_ptr()
    assert not read(cache, packed, state, decode=lambda *_: torch.zeros_like(first)).any()


SCALES = ["flat", *changes.SCALES]


def scales_of(state, name):
    holder, name = changes.SCALES["absmax" if name == "flat" else name](state)
    return getattr(holder, name)


@pytest.mark.parametrize("place", ["memory of its own", "one storage"])
@pytest.mark.parametrize("name", ["packed", *SCALES])
def test_a_write_into_the_tensor_that_data_pointed_to_before(cache, name, place):
    """``weight.data = b``, ``a.copy_(...)``, ``weight.data = a``: no version counter of the weight rises."""
    packed, state = weight(nested=name != "flat")
    half = weight(nested=name != "flat", shape=(32, 256))[1] if name == "packed" else None

    def is_right():
        assert torch.equal(read(cache, packed, state), expected(packed, state))
        if half is not None:
            part = read(cache, packed.view(-1)[:4096].view(-1, 1), half)
            assert torch.equal(part, expected(packed.data[:4096], half))

    tensor = packed if name == "packed" else scales_of(state, name)
    a, b = torch.stack([tensor.detach(), changes.other(tensor)]).unbind()
    if place == "memory of its own":
        a, b = a.clone(), b.clone()
    for data in (a, b):
        tensor.data = data
        is_right()
    a.add_(1)
    tensor.data = a
    is_right()
    assert cache.hits == 0 and len(cache.weights) == 1 + (half is not None)


@pytest.mark.parametrize("name", SCALES)
def test_the_address_of_the_scales_is_not_reused(cache, name):
    """``absmax.data = other`` frees the old scales. New ones at their address would have the same tensor, address and version."""
    packed, state = weight(nested=name != "flat")
    scales = scales_of(state, name)
    scales.data = scales.detach().clone()  # in memory that nobody else looks at
    read(cache, packed, state)
    address = scales.data_ptr()
    scales.data = scales.detach().clone().add_(1)
    strangers = [torch.empty_like(scales) for _ in range(64)]
    assert address not in {each.data_ptr() for each in strangers}
    assert torch.equal(read(cache, packed, state), expected(packed, state)) and cache.hits == 0


@pytest.mark.timeout(60)
def test_a_signal_handler_may_ask_for_the_status(cache):
    """The handler's own thread may be changing the cache, or another thread may hold the lock."""
    asked = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: asked.append(cache.snapshot().weights))
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 1e-3)
    try:
        while len(asked) < 100:
            read(cache, *weight(), decode=lambda *_: torch.zeros(SHAPE, dtype=torch.bfloat16, device=DEVICE))
            cache.release()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert not cache.weights and not cache.taken[INDEX]
    dense = read(cache, *weight())
    cache.release()  # ``dense`` is still in use
    with ThreadPoolExecutor(1) as other:
        other.submit(cache.lock.acquire).result()
        assert cache.snapshot().weights == 0 and dense is not None
        other.submit(cache.lock.release).result()


def test_an_interrupt_of_settle_subtracts_no_weight_twice(cache):
    def freed():
        read(cache, *weight())
        assert cache.taken[INDEX] == SIZE

    for line in interrupted_at_every_line(cache.settle, Cache.settle, before=freed):
        cache.settle()
        assert cache.taken[INDEX] == 0, line


def test_an_interrupt_that_comes_with_the_lock_leaves_it_free():
    """An interrupt between ``acquire`` and ``try`` would leave the lock held. A ``with`` statement has no such gap."""
    source = inspect.getsource(store)
    assert source.count("self.lock") == 1 + source.count("with self.lock:") > 5


def test_a_drop_at_any_line_of_a_read_raises_nothing(cache):
    """Another thread may drop an entry during a read. The read returns the right weight."""
    reached, (packed, state) = [], weight()
    right = expected(packed, state)
    for code, line in [(f.__code__, line) for f in (CacheEntry.of, Identity.holds) for line in lines_of(f.__code__)]:
        read(cache, packed, state)
        with at_line(code, line, cache.release, reached):
            assert torch.equal(read(cache, packed, state), right), line
    assert len(reached) > 10


def test_what_happens_while_a_weight_is_decoded(cache):
    """Another thread caches the same weight, the budget goes, or the cache is switched off."""
    packed, state = weight()
    for meanwhile, kept in ((lambda: read(cache, packed, state), 1), (lambda: cache.set_budget(0), 0),
                            (lambda: cache.configure("off"), 0)):  # fmt: skip
        cache.set_budget(2**20)
        read(cache, packed, state, decode=lambda *weight, meanwhile=meanwhile: (meanwhile(), expected(*weight))[1])
        assert len(cache.weights) == kept and cache.taken == {INDEX: kept * SIZE}
        cache.release()


def test_a_freed_weight_makes_room(cache):
    """Either the parameter is freed, or only its memory because ``parameter.data`` was replaced."""
    cache.configure(SIZE)
    packed, state = weight()
    read(cache, packed, state)
    view = packed.view(-1)
    del packed
    assert cache.snapshot().weights == 1  # the memory lives on
    del view
    packed, state = weight()
    assert read(cache, packed, state) is read(cache, packed, state)
    packed.data = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    other, other_state = weight(1)
    assert read(cache, other, other_state) is read(cache, other, other_state)
    del other, other_state
    assert read(cache, *weight(2, shape=(32, 64))) is not None
    assert cache.taken == {INDEX: allocated(32 * 64 * 2)} and not cache.uncached


@pytest.mark.parametrize("why", [Uncached.ZERO3, Uncached.INFERENCE_TENSOR])
def test_a_weight_without_a_version_counter_is_refused_by_name(cache, why):
    with torch.inference_mode(why is Uncached.INFERENCE_TENSOR):
        packed, state = weight()
        if why is Uncached.ZERO3:
            packed.ds_id = 0
        for each in (packed, packed.view(-1, 1), packed.t()):
            assert torch.equal(read(cache, each, state), expected(each, state))
    assert cache.uncached == {why: 3}


def test_training_reads_what_inference_mode_decoded(cache):
    packed, state = weight()
    with torch.inference_mode():
        read(cache, packed, state)
    x = torch.randn(2, SHAPE[0], dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    (x @ read(cache, packed, state)).sum().backward()
    assert cache.hits == 1


def test_another_weight_at_the_same_address_is_another_weight(cache):
    for seed in range(100):  # the allocator gives the same address again
        packed, state = weight(seed)
        assert torch.equal(read(cache, packed, state), expected(packed, state))
    assert cache.hits == 0 and len(cache.storages) < 70  # records of freed storages are removed too


def test_the_weights_that_are_read_first_stay(cache):
    """Later reads do not displace these weights. When one of them is freed, another weight takes its room."""
    small = allocated(32 * 96 * 2)
    cache.configure(2 * SIZE + small)
    first, later = [weight(0), weight(1)], weight(2)
    kept = [read(cache, *each) for each in first]
    for _ in range(3):
        read(cache, *later)
    assert all(read(cache, *each) is dense for each, dense in zip(first, kept, strict=True))
    assert cache.uncached == {Uncached.BUDGET_SPENT: 3} and cache.hits == 2
    other = weight(9, shape=(32, 96))
    assert read(cache, *other) is read(cache, *other)
    first.pop(), kept.pop()
    assert read(cache, *later) is read(cache, *later)
    assert cache.taken == {INDEX: 2 * SIZE + small} and cache.uncached == {Uncached.BUDGET_SPENT: 3}


@pytest.mark.parametrize("part", [1, 2])
def test_memory_of_two_parameters_is_refused_by_name(cache, part):
    """A write through one parameter does not raise the other's version counter, so neither is cached once both were read."""
    packed, state = weight()
    other, other_state = copy.copy(packed), state
    if part == 2:
        other, other_state = torch.nn.Parameter(packed.data[:4096], requires_grad=False), weight(shape=(32, 256))[1]
    assert read(cache, packed, state) is read(cache, packed, state)
    assert torch.equal(read(cache, other, other_state), expected(other, other_state))
    assert not cache.weights
    other.bitwise_xor_(255)
    assert torch.equal(read(cache, packed, state), expected(packed, state))
    assert cache.uncached == {Uncached.ALIASED: 2}


def test_a_tensor_that_is_not_a_parameter_is_refused_by_name(cache):
    packed, state = weight()
    for each in (packed.data, packed.detach(), packed.clone(), packed.data.view(-1, 1)):
        assert torch.equal(read(cache, each, state), expected(packed, state))
    assert cache.uncached == {Uncached.NOT_A_PARAMETER: 4}
    part, part_state = packed.view(-1)[:64].view(-1, 1), weight(shape=(2, 64))[1]  # a view of a parameter is cached
    first = read(cache, part, part_state)
    assert read(cache, part, part_state) is first


def test_a_weight_that_is_freed_while_the_lock_is_held_is_removed_afterwards(cache):
    """The garbage collector may run in the middle of a change, in the same thread."""
    packed, state = weight()
    read(cache, packed, state)
    with cache.lock:
        del packed
        gc.collect()
        assert len(cache.weights) == 1
    cache.settle()
    assert not cache.weights and not cache.taken[INDEX]


@pytest.mark.parametrize("storm", [pytest.param(1, id="short"), pytest.param(60, id="minute", marks=pytest.mark.full)])
def test_storm(cache, storm):
    """Eight threads read, refill, drop and free weights, and switch every microsecond. Reads are right, and so is the accounting."""
    cache.configure(6 * SIZE)
    weights = [weight(seed) for seed in range(12)]
    right = [expected(*each) for each in weights]
    end = time.monotonic() + storm

    def work(number):
        i = number
        while time.monotonic() < end:
            i += 1
            j = i * (number + 1) % len(weights)
            packed, state = weights[j]
            each = packed if i % 3 else packed.t()
            want = right[j] if i % 3 else right[j].t()
            assert torch.equal(read(cache, each, state, decode=lambda *_, want=want: want.clone()), want)
            if number == 0:
                mine, own_state = weight(1000 + i)  # freed after this iteration
                read(cache, mine, own_state, decode=lambda *_: torch.zeros(SHAPE, dtype=torch.bfloat16, device=DEVICE))
            elif number == 1 and i % 7 == 0:
                cache.release()
            elif number == 2:
                now = cache.snapshot()
                assert sum(now.taken.values()) <= 6 * SIZE and now.weights <= 6
            elif number == 3 and i % 5 == 0:
                packed.untyped_storage().resize_(packed.untyped_storage().nbytes())  # as FSDP does: of the same size

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(*(functools.partial(work, number) for number in range(8)))
    finally:
        sys.setswitchinterval(interval)
    gc.collect()
    cache.settle()
    counted = [allocated(entry.views[0].nbytes) for entry in cache.weights.values()]
    assert sum(counted) == cache.taken[INDEX] <= 6 * SIZE
    cache.release()
    assert not cache.weights and not cache.taken[INDEX]


MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "settings", "want"),
    [
        (1, {}, 512),
        (MIB, {}, MIB),
        (MIB + 1, {}, MIB + 512 + MIB),
        (5 * MIB, {"max_split_size": 100 * MIB}, 6 * MIB),
        (128 * MIB, {"max_split_size": 100 * MIB}, 148 * MIB),
        (1200, {"roundup_power2_divisions": {1: 4}}, 1536),  # too small to be rounded by division
        (5 * MIB, {"roundup_power2_divisions": {1: 4, 2: 4, 4: 4}}, 6 * MIB),
        (5 * MIB + 1, {"roundup_power2_divisions": {1: 4, 2: 4, 4: 4}}, 7 * MIB),
        (5 * MIB + 1, {"roundup_power2_divisions": {1: 4, 2: 4, 4: 1, 8: 4}}, 5 * MIB + 512 + MIB),
        (70 * MIB, {"roundup_power2_divisions": {"1": 0, "64": 2}}, 97 * MIB),
    ],
)
def test_what_the_allocator_takes(nbytes, settings, want):
    assert allocated(nbytes, settings) == want


def test_no_reason_of_the_cache_has_the_name_of_a_fallback():
    assert not Uncached.__members__.keys() & Reason.__members__.keys()


def test_a_storage_of_which_nothing_is_cached_is_dropped_without_an_effect(cache):
    packed, state = weight()
    first = read(cache, packed, state)
    cache.drop_storage(-1)
    assert read(cache, packed, state) is first


def test_which_memory_would_belong_to_a_cuda_graph(monkeypatch):
    """torch.compile warms a graph up on a side stream, so every side stream counts once the module for CUDA graphs is imported."""
    trees = "torch._inductor.cudagraph_trees"
    found = []
    for stream, capturing, imported in [(0, True, True), (7, True, False), (7, False, True), (7, False, False)]:
        monkeypatch.setattr(store.runtime, "current_stream", lambda device, stream=stream: stream)
        monkeypatch.setattr(store.runtime, "is_capturing", lambda capturing=capturing: capturing)
        if imported:
            monkeypatch.setitem(sys.modules, trees, sys)
        else:
            monkeypatch.delitem(sys.modules, trees, raising=False)
        found.append(store.is_captured(INDEX))
    assert found == [False, True, True, False]


def test_nothing_is_cached_in_the_memory_of_a_cuda_graph(cache, monkeypatch):
    packed, state = weight()
    monkeypatch.setattr(store, "is_captured", lambda device: True)
    assert torch.equal(read(cache, packed, state), expected(packed, state))
    assert not cache.weights and cache.uncached == {Uncached.CUDA_GRAPH: 1}


@pytest.mark.parametrize("capturing", [False, True])
def test_a_weight_that_is_read_before_a_capture_fills_the_cache(capturing, cache, monkeypatch):
    """torch.compile's module for CUDA graphs is imported, so every side stream counts as captured."""
    cache.configure("auto")
    cache.set_budget(2**20)
    packed, state = weight()
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", sys)
    with cache.pinned(7):
        with monkeypatch.context() as patched:
            patched.setattr(store.runtime, "current_stream", lambda device: 7)
            patched.setattr(store.runtime, "is_capturing", lambda: capturing)
            read(cache, packed, state)
        assert cache.fill(0) is not capturing
    assert len(cache.weights) == 1 - capturing and cache.uncached[Uncached.CUDA_GRAPH] == capturing


def test_a_weight_that_only_another_stream_reads_gives_its_place_up(cache, monkeypatch):
    """Its next read caches it for that stream."""
    packed, state = weight()
    first = read(cache, packed, state)
    stream = store.runtime.current_stream(INDEX)
    monkeypatch.setattr(store.runtime, "current_stream", lambda device: stream + 7)
    monkeypatch.setattr(store, "is_captured", lambda device: False)
    for _ in range(store.OTHER_STREAM_READS):
        assert cache.weights and read(cache, packed, state) is not first
    assert not cache.weights and cache.uncached == {Uncached.OTHER_STREAM: store.OTHER_STREAM_READS}
    assert read(cache, packed, state) is read(cache, packed, state)


def test_a_weight_that_is_read_on_its_own_stream_in_between_stays(cache, monkeypatch):
    packed, state = weight()
    first, stream = read(cache, packed, state), store.runtime.current_stream(INDEX)
    monkeypatch.setattr(store, "is_captured", lambda device: False)
    for _ in range(2 * store.OTHER_STREAM_READS):
        for current in (stream + 7, stream):
            monkeypatch.setattr(store.runtime, "current_stream", lambda device, current=current: current)
            assert (read(cache, packed, state) is first) == (current == stream)


def test_the_budget_gets_back_what_a_weight_took_whose_scales_were_freed(cache):
    """The packed weight lives on, but nobody reads it again."""
    packed, state = weight()
    read(cache, packed, state)
    assert cache.taken[INDEX] == SIZE
    state.absmax = changes.other(state.absmax)
    gc.collect()
    cache.settle()
    assert packed is not None and not cache.weights and cache.taken[INDEX] == 0


def test_a_budget_of_zero_drops_every_weight(cache):
    first = read(cache, *weight())
    cache.set_budget(0)
    assert not cache.weights and first is not None
