"""The graphs of the process, stored by layer and by the key of the call.

A key contains the layout of the arguments, and the settings of autocast and of PyTorch's modes. Its last item is a weak
reference to the StaticCache if the model generates, and None in training.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..nf4.identity import OwnRef
from ..patching.locks import Block
from ..patching.reasons import Reason
from ..patching.targets import MODULES
from .capture import GraphedLayer, trained_places
from .fingerprint import Fingerprint
from .kept import Generation, Keeper, KeptLayer
from .option import GraphsStatus
from .recorder import Recorder, give_back
from .refusal import Refused

RECORDED_AT = 3  # A layer is recorded at its third call with a shape.
# A layer has recordings for SHAPES shapes of training. As many static caches have recordings. At most SEEN other shapes are counted.
SHAPES, SEEN = 16, 1024
# Recording a layer takes about half as much time as PRICE replays save. The first CREDIT shapes of a layer in training are recorded
# at once, each further one after PRICE more replays of the layer, or at PRICE eager calls with this shape. So at most half of
# the saved time is spent again, and frequent shapes get graphs although rare ones came first.
CREDIT, PRICE = 8, 12

ByLayer = weakref.WeakKeyDictionary


def is_due(calls: int) -> bool:
    """Return whether a layer should be recorded at this eager call with a shape.

    The first attempt is at the third call. If the layer could not be recorded, or has changed since then, the next attempts
    are at the 6th, 12th, 24th ... eager call.

    Args:
        calls: the number of the layer's eager calls with the shape, including this one.
    """
    times, rest = divmod(calls, RECORDED_AT)
    return rest == 0 and times.bit_count() == 1


class Graphs:
    """All recordings of the process.

    ``drop`` and ``forget`` may be called at any time. If the graphs are dropped between a forward and its backward, the
    backward recomputes the layer eagerly.
    """

    def __init__(self) -> None:
        # recordings, reasons why layers cannot be recorded, and counts of eager calls, by key and layer
        self.recordings: dict[Any, ByLayer[nn.Module, Any]] = {}
        self.kept: dict[Any, ByLayer[nn.Module, Any]] = {}  # recordings that keep activations
        self.refusals: dict[Any, ByLayer[nn.Module, Refused]] = {}
        self.calls: OrderedDict[Any, ByLayer[nn.Module, int]] = OrderedDict()
        # The recorder of each device. The references are weak, because the graphs keep their recorder alive.
        self.recorders: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()
        self.keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()
        # keepers of dropped graphs whose activations still wait for their backward; nothing is recorded until they are freed
        self.leaving: weakref.WeakSet[Keeper] = weakref.WeakSet()
        # for each trained parameter: the layers that held it at their latest ``claim``
        self.holders = WeakIdKeyDictionary(ref_type=OwnRef)
        self.claimed = weakref.WeakSet[nn.Module]()  # every layer that made a ``claim``
        self.largest: dict[int, int] = {}  # most elements of a layer's input so far, by device
        self.had_budget = False  # whether ``cache="auto"`` had a budget at the latest call of a layer
        self.lock = threading.RLock()  # held during a capture
        self.replays = 0
        self.stepping = Block()  # in which a thread runs a whole-model decode step

    # --- recordings ---

    def recording(self, key: Any, layer: nn.Module) -> GraphedLayer | None:
        found = self.recordings.get(key)
        return None if found is None else found.get(layer)

    def kept_recording(self, key: Any, layer: nn.Module) -> KeptLayer | None:
        found = self.kept.get(key)
        return None if found is None else found.get(layer)

    def fingerprint_of(self, layer: nn.Module) -> Fingerprint | None:
        """Return the fingerprint of an earlier recording of the layer if the layer is unchanged since then, else None."""
        found = [each.get(layer) for each in (*self.kept.values(), *self.recordings.values())]
        every = dict.fromkeys(graph.fingerprint for graph in found if graph is not None)
        # Recordings of generation, or from before a change, do not match the layer in training.
        return next((each for each in every if each.holds() and each.is_in_place()), None)

    def has_room(self, key: Any, module: nn.Module, calls: int = 0) -> bool:
        """Return whether a layer or model may be recorded for this key. First free the graphs whose model or StaticCache was freed.

        Args:
            calls: the number of the layer's eager calls with this key, in training.
        """
        with self.lock:
            for found in (self.recordings, self.kept):
                for other in [*found]:
                    if not is_alive(other, found[other]):
                        reset(found.pop(other))
        is_recorded = key in self.recordings or key in self.kept  # for another layer, so that layers agree
        if key[-1] is not None:
            return is_recorded or not self.is_full(trains=False)
        uses, replays = self.uses(module)
        more = len(uses) + 1 - CREDIT
        has_paid = is_recorded or more <= 0 or calls >= PRICE or replays >= PRICE * more
        return has_paid and (len(uses) < SHAPES or 2 * min(uses.values()) <= calls)

    def uses(self, layer: nn.Module) -> tuple[dict[Any, int], int]:
        """Return how often a layer ran with each shape of training for which it has graphs, and how many of the runs were replays."""
        replays = Counter[Any]()
        for recordings in (self.recordings, self.kept):
            for key, layers in list(recordings.items()):
                if key[-1] is None and (graph := layers.get(layer)) is not None:
                    replays[key] += graph.replays
        eager = {key: self.calls.get(key, ByLayer()).get(layer, 0) for key in replays}
        return {key: eager[key] + replays[key] for key in replays}, replays.total()

    def is_full(self, trains: bool = True) -> bool:
        """Return whether there are graphs for as many shapes of training, or static caches of generation, as one layer may have."""
        return sum((key[-1] is None) == trains for key in {*self.recordings, *self.kept}) >= SHAPES

    def keep(self, key: Any, layer: nn.Module, graph: GraphedLayer) -> None:
        """Store the graphs of a layer. If it now has graphs for more than SHAPES shapes of training, drop those of the least used."""
        found: dict[Any, Any] = self.kept if isinstance(graph, KeptLayer) else self.recordings
        found.setdefault(key, ByLayer())[layer] = graph
        uses, _ = self.uses(layer)
        if len(uses) > SHAPES:
            least = min(uses, key=uses.__getitem__)
            for recordings in (self.recordings, self.kept):
                recordings.get(least, ByLayer()).pop(layer, None)

    def retire(self, generation: Generation) -> None:
        """Drop the graphs of all layers that belong to ``generation``."""
        for layers in list(self.kept.values()):
            for layer, graph in list(layers.items()):
                if graph.generation is generation:
                    layers.pop(layer, None)

    def drop_changed(self, key: Any, layer: nn.Module) -> None:
        """Drop the recording of a layer that has changed since it was recorded."""
        self.recordings.get(key, ByLayer()).pop(layer, None)  # another thread may drop all graphs

    def drop_outdated(self, model: nn.Module) -> None:
        """Drop those recordings of a model and its layers that keep removed modules or tensors alive.

        For example, ``merge_and_unload`` removes peft's modules.
        """
        is_outdated = functools.cache(Fingerprint.is_outdated)  # the recordings of a layer may share a fingerprint
        with self.lock:
            for module in dict.fromkeys([model, *decoder_layers(model)]):
                for layers in [*self.recordings.values(), *self.kept.values()]:
                    graph = layers.get(module)
                    if graph is None or not is_outdated(graph.fingerprint):
                        continue
                    if isinstance(graph, KeptLayer):
                        self.retire(graph.generation)
                    layers.pop(module, None)

    def drop_oldest_step(self) -> None:
        """Free the oldest graph of a whole-model decode step, to make room for a new one."""
        oldest = next((key for key in self.recordings if key[0] == "step"), None)
        if oldest is not None:
            reset(self.recordings.pop(oldest))

    def knows_step(self, model: nn.Module) -> bool:
        """Return whether a decode step of the model is recorded, and the model has not changed since."""
        found = [layers.get(model) for key, layers in list(self.recordings.items()) if key[0] == "step"]
        latest = next((graph for graph in reversed(found) if graph is not None), None)
        return latest is not None and bool(latest.fingerprint.holds())

    def drop(self) -> None:
        """Free every recording and return its memory to the driver. Layers are recorded again at their next call."""
        with self.lock:
            recordings, self.recordings = self.recordings, {}
            kept, self.kept = self.kept, {}
            recorders: list[Any] = list(self.recorders.values())
            keepers = list(self.keepers.values())
            self.recorders.clear()
            self.keepers.clear()
            for key, layers in [*recordings.items(), *kept.items()]:
                for layer in list(layers):
                    self.calls.setdefault(key, ByLayer())[layer] = RECORDED_AT - 1
                reset(layers)
            for keeper in keepers:
                with keeper.recorder.lock:
                    keeper.close()
                if keeper.top() is not None:
                    self.leaving.add(keeper)
            for recorder in recorders:
                with recorder.lock:
                    recorder.close()
        if recorders or keepers:
            give_back()

    def forget(self) -> None:
        """Drop every recording, every refusal and all counts."""
        self.drop()
        self.refusals.clear()
        self.calls.clear()

    def make_way(self, x: Tensor) -> None:
        """Drop every recording if x is larger than all earlier inputs, because x needs more memory."""
        device, size = x.get_device(), x.numel()
        if size > self.largest.get(device, 0):
            self.largest[device] = size
            if device in self.recorders or device in self.keepers:
                self.drop()

    def note_budget(self, has_budget: bool) -> None:
        """Drop every recording when ``cache="auto"`` gets its budget: the cache may now keep weights that recordings decode."""
        had_budget, self.had_budget = self.had_budget, has_budget
        if has_budget and not had_budget:
            self.drop()

    # --- refusals ---

    def refusal(self, key: Any, layer: nn.Module) -> Refused | None:
        """Return why the layer cannot be recorded for this key, or None.

        If a layer was refused for lack of GPU memory (GRAPH_MEMORY), the refusal applies to all layers until that layer is
        freed.
        """
        found = self.refusals.get(kind_of(key))
        if not found:
            return None
        own = found.get(layer)
        return own or next((each for each in list(found.values()) if each.reason is Reason.GRAPH_MEMORY), None)

    def refuse(self, key: Any, layer: nn.Module, refused: Refused) -> None:
        self.refusals.setdefault(kind_of(key), ByLayer())[layer] = refused

    # --- counts ---

    def put_off(self, key: Any, layer: nn.Module) -> None:
        """Note that a layer could not be recorded now. ``is_due_again`` says when it is tried again."""
        self.calls.setdefault(key, ByLayer()).setdefault(layer, RECORDED_AT)

    def is_due_again(self, key: Any, layer: nn.Module) -> bool:
        """Return whether a layer that ``put_off`` has noted may be recorded in this call, and count the call.

        For any other layer, return True.
        """
        return layer not in self.calls.get(key, ()) or is_due(self.count(key, layer))

    def count(self, key: Any, layer: nn.Module) -> int:
        """Count an eager call of the layer with this key. Return the number of such calls so far."""
        layers = self.calls[key] = self.calls.pop(key, ByLayer())
        if len(self.calls) > SEEN:
            self.calls.popitem(last=False)
        layers[layer] = calls = layers.get(layer, 0) + 1
        return calls

    def restart_count(self, key: Any, layer: nn.Module) -> None:
        self.calls.get(key, ByLayer()).pop(layer, None)

    # --- parameters ---

    def claims(self, key: Any, layer: nn.Module) -> bool:
        """Return whether a layer must ``claim`` its parameters in an eager call with this key, although it is not recorded now.

        If no layer has graphs for this key, all layers of the batch run eagerly, and nobody has to know what they share.
        """
        return key in self.recordings or key in self.kept or layer not in self.claimed

    def claim(self, layer: nn.Module) -> None:
        """Store the layer as a holder of its trained parameters. Drop the graphs of all layers that share one of these parameters."""
        with self.lock:
            for _, _, parameter in trained_places(layer):
                holders = self.holders.setdefault(parameter, weakref.WeakSet())
                if layer in holders:
                    continue
                holders.add(layer)
                for recordings in [*self.recordings.values(), *self.kept.values()] if len(holders) > 1 else ():
                    for other in holders:
                        recordings.pop(other, None)
            self.claimed.add(layer)

    def claim_again(self) -> None:
        """Repeat every ``claim``, because a layer might have got a parameter since then."""
        for layer in list(self.claimed):
            self.claim(layer)

    def is_shared(self, layer: nn.Module) -> bool:
        """Return whether the layer holds a trained parameter twice, or another layer holds it too.

        Eager code accumulates the gradient of each use separately. A replay returns the sum over its own uses, which rounds
        differently.
        """
        parameters = [parameter for _, _, parameter in trained_places(layer)]
        if len({*map(id, parameters)}) < len(parameters):
            return True
        others = {other for p in parameters for other in self.holders.get(p, ()) if other is not layer}
        held = {*map(id, parameters)}
        return any(id(p) in held for other in others for p in other.parameters())

    def uncount(self, key: Any, layer: nn.Module) -> None:
        """Undo the last ``count``."""
        self.calls[key][layer] -= 1

    def snapshot(self, mode: str) -> GraphsStatus:
        every = {
            key: [*self.recordings.get(key, ()), *self.kept.get(key, ())] for key in {*self.recordings, *self.kept}
        }
        return GraphsStatus(
            mode=mode,
            layers=len({id(layer) for modules in every.values() for each in modules for layer in decoder_layers(each)}),
            shapes=sum(map(bool, every.values())),
            replays=self.replays,
        )


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model, or the module itself if it is one."""
    kind = sys.modules[MODULES["decoder layers"]].GradientCheckpointingLayer
    return [each for each in module.modules() if isinstance(each, kind)]


def kind_of(key: Any) -> Any:
    """Return a key without its StaticCache. If a layer cannot be recorded for one StaticCache, it is refused for all of them."""
    return (*key[:-1], key[-1] is None)


def is_alive(key: Any, layers: ByLayer[nn.Module, Any]) -> bool:
    """Return whether the model and the StaticCache of a key still exist."""
    return bool(layers) and (key[-1] is None or key[-1]() is not None)


def reset(layers: ByLayer[nn.Module, Any]) -> None:
    for graph in list(layers.values()):
        with graph.recorder.lock:
            graph.reset()


graphs = Graphs()
