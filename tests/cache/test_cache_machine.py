"""Hypothesis reads, changes, copies and frees weights in any order, under budgets that change.

A read weight has the bits of its packed bytes, cached weights stay within the budget, and nothing is left of freed
weights.
"""

from __future__ import annotations

import copy
import sys

import changes
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracle import layout_of
from torch.multiprocessing.reductions import StorageWeakRef

import nf4_patch
from nf4_patch.cache.allocator import allocated
from nf4_patch.cache.store import cache
from nf4_patch.nf4 import runtime
from nf4_patch.nf4.dequantize import reference
from nf4_patch.patching.dequantizer import Dequantizer

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
SIZE = allocated(32 * 64 * 2)  # in bf16
read = Dequantizer("a test").of_state
ONE = st.integers(0, 5)  # of the weights


class Machine(RuleBasedStateMachine):
    hits = 0

    def __init__(self):
        super().__init__()
        self.places, self.held, self.made = [], [], 0  # held: results that somebody still uses
        self.dense = {}  # size and stream of all that was cached, by its memory
        self.stream, self.streams = 0, [torch.cuda.default_stream(), torch.cuda.Stream()] if GPU else [0, 7]

    @initialize()
    def begin(self):
        self.budget_changes("1MiB")
        self.weight_comes(True, 32)

    def teardown(self):
        Machine.hits += cache.hits
        cache.hits = 0
        self.stream_changes(0)
        self.held.clear()
        nf4_patch.disable()
        assert not cache.snapshot().taken and not self.alive()

    def alive(self):
        return {memory: size for memory, (size, _) in self.dense.items() if not memory.expired()}

    @invariant()
    def the_budget_holds(self):
        """Every dense copy in use is counted. Weights that changed or were freed are not cached."""
        alive, kept = self.alive(), [kept for kept in cache.weights.values() if kept.views is not None]
        held = {result.untyped_storage()._cdata for result in self.held}
        used = [size for memory, size in alive.items() if memory.cdata in held]
        assert sum(cache.snapshot().taken.values()) == sum(alive.values()) <= max(cache.budget, sum(used))
        assert len(alive) - len(used) <= len(kept)
        assert {id(each.identity.tensors[0]()) for each in kept} <= {id(place.packed) for place in self.places}

    def comes(self, packed, state):
        place = changes.Place(changes.layer_with(packed, state))
        place.table = changes.CHANGES if state.nested else changes.FLAT
        place.kept = None  # address and stream of its dense copy, if a valid one is cached
        self.places.append(place)

    # --- what happens ---

    @rule(nested=st.booleans(), rows=st.sampled_from((32, 48)))
    def weight_comes(self, nested, rows):
        self.made += 1
        at = changes.weight((rows, 64), nested, DEVICE, seed=self.made)
        self.comes(at.packed, at.state)

    @rule(i=ONE)
    def weight_is_copied(self, i):
        place = self.places[i % len(self.places)]
        self.comes(*copy.deepcopy((place.packed, place.state)))

    @rule(i=ONE)
    def weight_goes(self, i):
        if len(self.places) > 1:
            del self.places[i % len(self.places)]

    @rule(i=ONE, data=st.data(), read=st.booleans())
    def weight_changes(self, i, data, read):
        place = self.places[i % len(self.places)]
        if read:
            self.weight_is_read(i, False, "dropped")
        name = data.draw(st.sampled_from([*place.table]))
        can = {"blocksize": place.state.blocksize < 2048, "bytes refilled": place.packed.untyped_storage().resizable()}
        if can.get(name, True):
            self.change(place, name)
        if read:
            self.weight_is_read(i, False, "dropped")

    def change(self, place, name):
        place.table[name](place)
        place.kept = None

    @rule(i=ONE, turned=st.booleans(), then=st.sampled_from(("dropped", "held", "written")))
    def weight_is_read(self, i, turned, then):
        place = self.places[i % len(self.places)]
        packed = place.packed.t() if turned else place.packed
        result = read(packed, place.state, only_read=True)
        self.is_right(place, result.t() if turned else result)
        if then == "held":
            self.held.append(result)
        elif then == "written":
            result.zero_()
            place.kept = None

    @rule()
    def a_step_reads_all(self):
        for turned in (False, True):
            for i in range(len(self.places)):
                self.weight_is_read(i, turned, "dropped")

    def is_right(self, place, result):
        assert torch.equal(result, reference.dequantize(layout_of(place.packed, place.state)))
        before, place.kept = place.kept, None
        for kept in cache.weights.values():
            if kept.views is not None and kept.views[0].data_ptr() == result.data_ptr():
                memory = StorageWeakRef(result.untyped_storage())
                _, stream = self.dense.setdefault(memory, (kept.size, self.stream))
                assert stream == self.stream  # it was decoded on this one
                place.kept = result.data_ptr(), stream
        assert before is None or before[1] != self.stream or place.kept == before  # what is kept stays

    @rule()
    def results_go(self):
        self.held.clear()

    @rule(budget=st.sampled_from(("off", f"{SIZE}B", f"{2 * SIZE}B", f"{2 * SIZE + 1}B", "1MiB", None)))
    def budget_changes(self, budget):
        """Set the budget. With None, drop the cached weights, and leave the budget unchanged."""
        nf4_patch.release() if budget is None else nf4_patch.enable(cache=budget)
        for place in self.places:
            place.kept = None

    @rule(number=st.sampled_from((0, 0, 0, 1)))
    def stream_changes(self, number):
        self.stream = number
        if GPU:
            torch.cuda.synchronize()
            torch.cuda.set_stream(self.streams[number])
        else:
            runtime.current_stream = lambda device: self.streams[number]


@pytest.fixture
def started(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)  # see is_captured
    monkeypatch.setattr(runtime, "current_stream", runtime.current_stream)  # and back


@pytest.mark.every(2)
@pytest.mark.parametrize(("nested", "name"), changes.EVERY)
def test_a_change_is_noticed_by_the_next_read(nested, name, started):
    machine = Machine()
    machine.budget_changes("1MiB")
    machine.weight_comes(nested, 32)
    (place,) = machine.places
    before = reference.dequantize(layout_of(place.packed, place.state))
    for _ in range(2):
        machine.a_step_reads_all()
    assert cache.hits and place.kept
    machine.change(place, name)
    machine.a_step_reads_all()
    after = reference.dequantize(layout_of(place.packed, place.state))
    assert after.shape != before.shape or not torch.equal(after, before)
    machine.the_budget_holds()
    machine.teardown()


@pytest.mark.parametrize("examples", [15, pytest.param(1000, marks=pytest.mark.full)])
def test_whatever_happens(examples, started):
    Machine.hits = 0
    options = dict(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=50, **options))
    assert Machine.hits > 5 * examples  # a cache that serves nothing proves nothing
