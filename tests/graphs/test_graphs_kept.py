"""Graphs that keep activations have the bits of layers that recompute, in every order of forwards and backwards."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import recorders
import test_graphed_layers as graphed
import torch
from alternation import crossed, thinned
from interrupts import interrupted_at_every_line
from test_graphed_layers import LAYERS, at_the_third_call, clean, model_of, optimizer_of, tokens  # noqa: F401

import nf4_patch
from benchmarks.models import config_of
from nf4_patch.activations.layers import Record, activations
from nf4_patch.graphs import kept, recorder, recording, shapes
from nf4_patch.graphs.kept import Generation, Keeper, KeptLayer, Token
from nf4_patch.graphs.layers import graphs
from nf4_patch.graphs.recorder import Recorder
from nf4_patch.graphs.refusal import Refusal, Refused
from nf4_patch.memory.spare import MemoryInfo
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

STEPS, RELEASED = (9, 6) if graphed.GPU else (7, 4)
SIZE = "64GiB"  # of activations, so that all layers keep theirs


def loss_of(model, seed, length=16):
    ids = tokens(seed)[:, :length]
    with torch.autocast(graphed.DEVICE, torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


def plain(model, optimizer, step):
    loss = loss_of(model, step)
    loss.backward()
    return [loss]


def accumulated(model, optimizer, step):
    losses = [loss_of(model, 10 * step + k) for k in range(2)]
    for loss in losses:
        loss.backward()
    return losses


def reversed_backwards(model, optimizer, step):
    losses = [loss_of(model, 10 * step + k) for k in range(2)]
    for loss in reversed(losses):
        loss.backward()
    return losses


def summed(model, optimizer, step):
    losses = [loss_of(model, 10 * step + k) for k in range(2)]
    sum(losses).backward()
    return losses


def thrown_away(model, optimizer, step):
    loss_of(model, 100 + step)
    return plain(model, optimizer, step)


def interrupted(model, optimizer, step):
    class Interrupt(Exception):
        pass

    def stop(*_):
        raise Interrupt

    if step % 3 == 2:
        handle = model.get_output_embeddings().register_forward_pre_hook(stop)
        with pytest.raises(Interrupt):
            loss_of(model, 100 + step)
        handle.remove()
    return plain(model, optimizer, step)


def retained(model, optimizer, step):
    loss = loss_of(model, step)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def part(model, optimizer, step):
    loss, last = loss_of(model, step), [p for p in model.parameters() if p.requires_grad][-3:]
    found = torch.autograd.grad(loss, last, retain_graph=True)
    other = loss_of(model, 50 + step)
    other.backward()
    loss.backward()
    return [loss, other, *[each.float().sum() for each in found]]


def evaluated(model, optimizer, step):
    loss = loss_of(model, step)
    model.eval()
    with torch.no_grad():
        other = loss_of(model, 70 + step)
    model.train()
    loss.backward()
    return [loss, other]


def lengths(model, optimizer, step):
    loss = loss_of(model, step, (16, 8, 12)[step % 3])
    other = loss_of(model, step, 8) if step % 2 else None
    loss.backward()
    if other is not None:
        other.backward()
    return [loss]


def released(model, optimizer, step):
    loss = loss_of(model, step)
    if step == RELEASED:
        nf4_patch.release()
    loss.backward()
    return [loss]


def second_derivative(model, optimizer, step):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return penalized(model, step)


def penalized(model, step):
    loss = loss_of(model, step)
    inputs = [p for p in model.parameters() if p.requires_grad][:4]
    found = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty = sum(each.float().square().sum() for each in found)
    (loss + penalty).backward()
    return [loss, penalty]


WAYS = [
    plain,
    accumulated,
    reversed_backwards,
    summed,
    thrown_away,
    interrupted,
    retained,
    part,
    evaluated,
    lengths,
    released,
]


def train(model, way, **options):
    torch.manual_seed(0)
    optimizer, found, before = optimizer_of(model, lr=1e-3), [], graphs.replays
    counters.reset()
    with nf4_patch.enabled(**options):
        for step in range(STEPS):
            optimizer.zero_grad()
            found += [each.detach().clone() for each in way(model, optimizer, step)]
            optimizer.step()
        kept = counters.uses_of("activations").hits
    adapters = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return found + adapters, graphs.replays - before, kept


def same(way, make=model_of, **options):
    """Compare with eager layers that recompute. Return the numbers of replays, and of calls that kept activations."""
    torch.manual_seed(0)
    want, _, _ = train(make(), way, **options)
    torch.manual_seed(0)
    got, replays, kept = train(make(), way, **options, graphs="auto", activations=SIZE)
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    return replays, kept


@pytest.mark.every(2)
@pytest.mark.parametrize(("dropout", "way"), crossed((0.0, 0.05), WAYS, every=3))
def test_ways(way, dropout):
    replays, kept = same(way, lambda: model_of(lora_dropout=dropout))
    assert replays and kept


@pytest.mark.full
@pytest.mark.parametrize("way", thinned((plain, reversed_backwards, evaluated, lengths, released), 3))
def test_ways_under_a_reentrant_checkpoint(way):
    replays, kept = same(way, lambda: model_of(True, lora_dropout=0.05))
    assert replays and kept


@pytest.mark.full
@pytest.mark.parametrize("way", thinned((plain, summed, part, lengths, released), 2))
def test_without_checkpoints(way):
    def make():
        model = model_of(lora_dropout=0.05)
        model.gradient_checkpointing_disable()
        return model

    replays, _ = same(way, make)
    assert replays


def test_a_layer_takes_no_shape_from_another_layer(monkeypatch):
    """Layers with a reentrant checkpoint and layers without a checkpoint have different keys for the same batch."""

    def make():
        model = model_of(True)
        graphed.layers_of(model)[0].gradient_checkpointing = False
        return model

    monkeypatch.setattr(shapes, "SHAPES", 1)
    replays, _ = same(plain, make)
    assert replays == LAYERS * (STEPS - graphed.EAGER)


@pytest.mark.full
@pytest.mark.usefixtures("at_the_third_call")
def test_every_call_of_an_ordinary_training_keeps_its_activations():
    replays, kept = same(plain, lora="fused")
    assert replays == graphed.LAYERS * (STEPS - 2) == kept - graphed.LAYERS  # the second step keeps them without graphs


@pytest.mark.every(2)
@pytest.mark.usefixtures("at_the_third_call")
@pytest.mark.parametrize("both", [True, False])
def test_a_recording_that_was_refused_for_a_passing_reason(both, monkeypatch):
    """At the third call, another thread prevents both recordings of a layer, or only the one that keeps activations.

    The sixth call tries again.
    """
    asked = []

    def others():
        asked.append(step)
        return "a function" if step == 2 and (both or len(asked) % 2) else ""

    monkeypatch.setattr(recording, "others_may_use_gpu", others)
    torch.manual_seed(0)
    model, kept, recomputing = model_of(), [], []
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        for step in range(7):
            plain(model, None, step)
            kept.append(sum(map(len, graphs.kept.values())))
            recomputing.append(sum(map(len, graphs.recordings.values())))
    found = kept, recomputing, asked
    steps = [2] * 2 * LAYERS + [5] * LAYERS
    assert found == ([0] * 5 + [LAYERS] * 2, [0] * 7 if both else [0] * 2 + [LAYERS] * 5, steps), dict(
        counters.fallbacks
    )


@pytest.mark.usefixtures("at_the_third_call")
def test_layers_without_checkpoints_are_recorded_as_soon_as_there_is_a_budget(monkeypatch):
    model, recorded = model_of(), []
    model.gradient_checkpointing_disable()
    counters.reset()
    with nf4_patch.enabled(graphs="auto", activations=SIZE), monkeypatch.context() as patched:
        patched.setattr(activations, "mode", "auto")
        for step in range(6):
            patched.setattr(kept.spare, "waits", step < 4)
            plain(model, None, step)
            recorded.append(sum(map(len, graphs.kept.values())))
    assert recorded == [0, 0, 0, 0, LAYERS, LAYERS]
    found = {reason: n for (target, reason), n in counters.fallbacks.items() if target == graphed.TARGET}
    assert found == {Reason.GRAPH_NEW_SHAPE: 2 * LAYERS, Reason.ACTIVATIONS_WAITING: 2 * LAYERS}


@pytest.mark.usefixtures("at_the_third_call")
def test_a_layer_that_is_refused_again_leaves_the_graphs_of_the_others_alone(monkeypatch):
    """The second of three layers is refused for a passing Reason. The others are recorded once."""
    tried, made = [], recording.made

    def refusing(call, *others):
        tried.append((step, layers.index(call.layer)))
        return Refused(Reason.GRAPH_ARGUMENTS, "") if call.layer is layers[1] else made(call, *others)

    monkeypatch.setattr(recording, "made", refusing)
    model = model_of(config=config_of(graphed.SHAPE._replace(num_hidden_layers=3), torch.bfloat16))
    model.gradient_checkpointing_disable()
    layers = list(graphed.layers_of(model))
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        for step in range(13):
            plain(model, None, step)
    assert tried == [(2, 0), (2, 1), (2, 2)]


def test_whose_activations_may_be_written():
    """While activations of earlier layers wait, only later layers may run. Each recording needs memory after the latest one."""
    keeper = Keeper(SimpleNamespace(device=-1))
    generation = keeper.begin()
    layers = []
    for number, of in enumerate((generation, generation, Generation())):
        layer, of.size = KeptLayer.__new__(KeptLayer), 2
        layer.keeper, layer.generation, layer.index, layer.key = keeper, of, number % 2, "key"
        layers.append(layer)

    def found():
        return [layer.may_forward() for layer in layers], keeper.is_open(), keeper.continues("key")

    assert found() == ([True] * 3, True, False)
    tokens = [Token(), Token()]
    layers[0].began(tokens[0])
    assert found() == ([False, True, False], False, False)
    with pytest.raises(Refusal):
        keeper.begin()
    layers[1].began(tokens[1])
    assert found() == ([False, False, False], True, True) and keeper.begin() is generation
    keeper.generation = layers[2].generation
    assert found() == ([False, False, False], False, False)
    del tokens[1]
    assert keeper.top() is layers[0]
    del tokens[0]
    assert found() == ([True] * 3, True, False) and keeper.begin() is keeper.generation is not generation


def test_a_recording_in_memory_that_graphs_hold_already(monkeypatch):
    """Such a recording fits, although rounding made the graphs take more than the budget."""
    monkeypatch.setattr(activations, "budget", 90)
    monkeypatch.setattr(activations, "taken", {})
    keeper = Keeper(SimpleNamespace(device=-1))
    keeper.count(100)
    assert [keeper.has_room(held) for held in (50, 51)] == [True, False]


class Sized(recorders.Operations):
    """A recorder whose every recording takes memory."""

    def leaving_enough(self, more=0, held=0):
        self.taken += 1000
        return contextlib.nullcontext()


@pytest.mark.skipif(graphed.GPU, reason="simulates a GPU's memory")
@pytest.mark.parametrize(("gib", "replays"), [(10 + LAYERS, 2 * LAYERS), (10 + LAYERS - 1, LAYERS - 1)])
def test_batches_of_another_length_have_memory_beside_the_graphs(gib, replays, monkeypatch):
    """A step without checkpoints takes 10 GiB. The graphs of a layer take one more, and the next length runs eagerly first."""

    class Simulated(recorders.Rerun):
        size, leaving_enough, require = Recorder.size, Recorder.leaving_enough, staticmethod(Recorder.require)
        forwards = False

        def kept(self, before, *results):
            self.forwards = not self.forwards
            memory["reserved_bytes"] += self.forwards * 2**30
            return self.forwards * 2**30

    memory = {"reserved_bytes": 10 * 2**30, "allocated_bytes": 10 * 2**30}
    monkeypatch.setattr(recorder, "memory", lambda device, kind, value=None: memory[kind])
    monkeypatch.setattr(MemoryInfo, "of", lambda device: MemoryInfo(gib * 2**30, 0, 0, 0))
    recorders.install(monkeypatch, Simulated)
    model = model_of()
    model.gradient_checkpointing_disable()
    counters.reset()
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        before = graphs.replays
        for step in range(3):
            plain(model, None, step)
        assert graphs.replays - before == replays and bool(graphs.kept) == (replays > LAYERS)
    found = {reason: n for (target, reason), n in counters.fallbacks.items() if target == graphed.TARGET}
    short = {} if replays > LAYERS else {Reason.GRAPH_MEMORY: 1 + LAYERS}  # also every call after the refusal
    assert found == {Reason.GRAPH_NEW_SHAPE: LAYERS, **short}


def recorded_model(monkeypatch):
    """Return a model whose layers have graphs that take memory, on a CPU too."""
    if not graphed.GPU:
        recorders.install(monkeypatch, Sized)
    model = model_of()
    for step in range(4):
        plain(model, None, step)
    assert sum(activations.taken.values()) == sum(activations.in_graphs.values()) > 0
    return model


def test_the_graphs_of_a_deleted_model_are_not_counted(monkeypatch):
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        model = recorded_model(monkeypatch)
        del model
        gc.collect()
        assert not any(activations.taken.values()) and not any(activations.in_graphs.values())


def test_activations_of_dropped_graphs_are_counted_until_their_backward(monkeypatch):
    """Otherwise other layers would keep activations in the same memory. Nothing is recorded in it either."""
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        model = recorded_model(monkeypatch)
        held, loss = dict(activations.in_graphs), loss_of(model, 0)
        graphs.drop()
        assert activations.in_graphs == held
        loss_of(model, 1).backward()
        assert activations.in_graphs == held and not graphs.kept and not graphs.recordings
        loss.backward()
        del loss
        assert not any(activations.taken.values()) and not any(activations.in_graphs.values())
        for step in range(3):
            plain(model, None, step)
        assert sum(map(len, graphs.kept.values())) == LAYERS


class Short(Sized):
    """A recorder whose second recording leaves too little memory."""

    @contextlib.contextmanager
    def leaving_enough(self, more=0, held=0):
        yield
        self.taken += 1000
        if self.taken == 2000:
            raise torch.OutOfMemoryError("too little memory")


@pytest.mark.skipif(graphed.GPU, reason="simulates the memory")
@pytest.mark.usefixtures("at_the_third_call")
def test_the_memory_of_a_failed_recording_is_counted_while_the_pool_is_in_use(monkeypatch):
    recorders.install(monkeypatch, Short)
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        model = model_of()
        for step in range(2):
            plain(model, None, step)
        loss = loss_of(model, 2)
        assert sum(activations.in_graphs.values()) == 2000 and not graphs.kept
        loss.backward()
        del loss
        assert not any(activations.taken.values()) and not any(activations.in_graphs.values())


def test_a_keeper_whose_making_is_interrupted_is_freed_without_an_error(monkeypatch):
    errors = []
    monkeypatch.setattr("sys.unraisablehook", errors.append)
    recorder = SimpleNamespace(device=-1)
    assert [*interrupted_at_every_line(lambda: Keeper(recorder), Keeper.__init__)]
    assert not errors


def test_a_length_that_gets_no_graphs_keeps_its_activations_at_once(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", 1)
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        model = recorded_model(monkeypatch)
        assert graphs.is_full()
        counters.reset()
        loss_of(model, 0, 8).backward()
        assert counters.uses_of("activations").hits == LAYERS


def test_another_size_frees_the_graphs(monkeypatch):
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        model = recorded_model(monkeypatch)
        nf4_patch.enable(activations="1GiB")
        assert model is not None and not graphs.kept and not any(activations.taken.values())


def test_no_room(monkeypatch):
    """Without room, no layer keeps its activations, and the Reason says so."""
    monkeypatch.setattr(Record, "estimate", lambda record, size: 2**21)
    torch.manual_seed(0)
    model = model_of()
    with nf4_patch.enabled(graphs="auto", activations="1MB"):
        for step in range(4):
            plain(model, None, step)
        assert not graphs.kept and graphs.recordings
        assert counters.fallbacks["activations", Reason.ACTIVATIONS_BUDGET]


@pytest.mark.full
def test_second_derivatives():
    torch.manual_seed(0)
    want, _, _ = train(model_of(), second_derivative)
    torch.manual_seed(0)
    got, replays, _ = train(model_of(), second_derivative, graphs="auto", activations=SIZE)
    count = 2 * STEPS
    # sums in another order
    assert replays and [e.item() for e in got[:count]] == pytest.approx([e.item() for e in want[:count]], rel=2**-7)


@pytest.mark.full
def test_parameters_that_change_before_the_backward():
    def way(model, optimizer, step):
        loss = loss_of(model, step)
        if step == RELEASED:
            optimizer.step()
        loss.backward()
        return [loss]

    same(way)


def test_parameters_that_change_before_the_backward_without_checkpoints():
    model = model_of()
    model.gradient_checkpointing_disable()
    optimizer = optimizer_of(model, lr=1e-3)
    with nf4_patch.enabled(graphs="auto", activations=SIZE):
        for step in range(5):
            loss = plain(model, optimizer, step)[0]
            optimizer.step()
        loss = loss_of(model, 9)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("at_the_third_call")
@pytest.mark.parametrize("mode", ["off", "8GiB"])
def test_a_reentrant_checkpoint_whose_result_other_code_reads(mode):
    """Gradients inside a layer are added up before the gradient of the other reader, with graphs and without."""

    def step_of(model, optimizer, step):
        inner, ids, states = model.base_model.model.model, tokens(step), []
        with torch.autocast(ids.device.type, torch.bfloat16):
            x = inner.embed_tokens(ids)
            places = torch.arange(ids.shape[1], device=ids.device)[None]
            arguments = {"position_ids": places, "position_embeddings": inner.rotary_emb(x, places)}
            for layer in inner.layers:
                states.append(x := layer(x, attention_mask=None, **arguments))
            loss = sum(state.float().pow(2).mean() for state in states)
        loss.backward()
        return [loss.item()]

    assert graphed.compared(lambda: model_of(True), step_of, activations=mode)["replays"]


def test_a_loss_that_is_thrown_away_while_layers_are_recorded_keeps_no_model(monkeypatch):
    if not graphed.GPU:  # ``Rerun`` keeps the layer, a CUDA graph does not
        recorders.install(monkeypatch, recorders.Operations)
    nf4_patch.enable(graphs="auto", activations=SIZE)
    model = model_of()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for step in range(2):
        loss_of(model, step).backward()
    loss_of(model, 2)
    assert sum(map(len, graphs.kept.values())) == LAYERS
    layers = [weakref.ref(layer) for layer in graphed.layers_of(model)]
    del model
    gc.collect()
    assert [layer() for layer in layers] == [None] * LAYERS


def test_a_margin_of_an_earlier_budget_decides_nothing(monkeypatch):
    """Once there is a budget, a layer is recorded only after its size was measured."""
    monkeypatch.setattr(kept, "estimate_of", lambda call: None)
    call = SimpleNamespace(layer=SimpleNamespace(gradient_checkpointing=True))
    monkeypatch.setattr(kept.spare, "why", kept.Waits.MARGIN)
    for waits in (True, False):
        monkeypatch.setattr(kept.spare, "waits", waits)
        assert kept.is_measured(call) is waits
