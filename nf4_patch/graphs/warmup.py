"""Run a layer before it is recorded, and find effects that a replay could not repeat."""

from __future__ import annotations

import gc
import random
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..patching.reasons import Reason
from .fingerprint import Fingerprint
from .recorder import Recorder, own_casts
from .refusal import Refusal

RUNS = 3  # Some code waits for the GPU only at its first use, and another thread may draw random numbers on the host.


class HostGenerators:
    """The states of the host's random generators: Python's, NumPy's, and PyTorch's for the CPU."""

    def __init__(self) -> None:
        self.numpy: Any = sys.modules.get("numpy.random")
        self.python, self.torch = random.getstate(), torch.get_rng_state()
        self.of_numpy: Any = self.numpy and self.numpy.get_state()

    def moved(self, apart_from: Any = None) -> bool:
        """Return whether a generator other than ``apart_from`` was used since this object was made."""
        if self.numpy:
            name, keys, *rest = self.of_numpy
            now, keys_now, *rest_now = self.numpy.get_state()
            if name != now or rest != rest_now or (keys != keys_now).any():
                return True
        if random.getstate() != self.python:
            return True
        return apart_from is not torch.default_generator and not torch.equal(torch.get_rng_state(), self.torch)

    def restore(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.numpy:
            self.numpy.set_state(self.of_numpy)


def others_draw(seconds: float) -> bool:
    """Return whether another thread draws random numbers on the host while this one sleeps."""
    before = HostGenerators()
    time.sleep(seconds)
    return before.moved()


class Marker:
    """An entry in the metadata of an autograd node. It is alive as long as the autograd graph."""


class Leftovers:
    """Finds tensors of a run that stay alive after it, such as an auxiliary loss that a router appends to a list.

    A replay would not append the loss, and no user can call ``backward()`` through the loss of a warm-up. ``inputs``
    are the leaf tensors that the run begins with.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        self.nodes: Any = [get_gradient_edge(leaf).node for leaf in inputs if leaf.requires_grad]
        markers = [Marker() for _ in self.nodes]
        for node, marker in zip(self.nodes, markers, strict=True):
            node.metadata[Leftovers] = marker
        self.markers = [weakref.ref(marker) for marker in markers]

    def found(self) -> bool:
        self.nodes.clear()
        if not any(marker() for marker in self.markers):
            return False
        gc.collect()
        return any(marker() for marker in self.markers)

    def remove(self) -> None:
        """Remove the run's tensors that are still alive from the lists that hold them."""
        markers = {id(marker()) for marker in self.markers}
        tensors = [each for each in gc.get_objects() if type(each) is Tensor and each.requires_grad]
        for tensor in tensors:
            if any(id(node.metadata.get(Leftovers)) in markers for node in ancestors(tensor)):
                for holder in gc.get_referrers(tensor):
                    if type(holder) is list and holder is not tensors:
                        holder[:] = [each for each in holder if each is not tensor]


def ancestors(result: Tensor) -> Iterator[Any]:
    """Yield the autograd nodes from which ``result`` was computed."""
    seen, nodes = set(), [result.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]


class LayerState:
    """A snapshot of a layer's attributes and buffers, and of the versions of the ``static`` buffers, before a run."""

    def __init__(self, layer: nn.Module, fingerprint: Fingerprint, static: Sequence[Tensor]):
        self.fingerprint, self.modules = fingerprint, list(layer.modules())
        self.buffers = [buffer for module in self.modules for buffer in module._buffers.values() if buffer is not None]
        self.attributes = [{**vars(module)} for module in self.modules]
        self.contents = [buffer.clone() for buffer in self.buffers]
        self.watched = [*static, *self.buffers]
        self.versions = self.found_versions()

    def found_versions(self) -> list[int]:
        return [buffer._version for buffer in self.watched]

    def changed(self) -> bool:
        try:
            if self.attributes != [vars(module) for module in self.modules] or not self.fingerprint.holds():
                return True
        except RuntimeError:  # == raises this error if an attribute now holds a different tensor
            return True
        return self.found_versions() != self.versions

    def restore(self) -> None:
        for module, attributes in zip(self.modules, self.attributes, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        self.fingerprint.restore()
        for buffer, content in zip(self.buffers, self.contents, strict=True):
            buffer.copy_(content)


def warm_up(recorder: Recorder, work: Any) -> bool:
    """Run the work before it is recorded, so that its first allocations and compilations stay out of the graphs.

    Return whether the layer draws random numbers on the GPU.

    Raises:
        Refusal: the layer does something that a replay cannot repeat.
    """
    before = LayerState(work.task.layer, work.task.fingerprint, [work.x, *work.buffers])
    first, begin, draws = HostGenerators(), time.monotonic(), True
    try:
        for _ in range(RUNS):
            before.versions, host, state = before.found_versions(), HostGenerators(), recorder.generator.get_state()
            leftovers = Leftovers(work.leaves)
            with recorder.allocating(), own_casts(), recorder.synchronizations() as synchronized:
                strange = work.run()
            is_random, draws = not torch.equal(recorder.generator.get_state(), state), host.moved(recorder.generator)
            stays = leftovers.found()
            if stays or not (synchronized or draws):
                break
    finally:
        busy = draws and first.moved() and others_draw(time.monotonic() - begin)
        if draws and not busy:
            first.restore()
    if stays:
        leftovers.remove()
    if before.changed():
        before.restore()
        raise Refusal(Reason.GRAPH_STATE, "a call changes one of its attributes or buffers")
    if stays:
        raise Refusal(Reason.GRAPH_STATE, "a tensor with a gradient is kept outside the layer, for example in a list")
    if synchronized:
        raise Refusal(Reason.GRAPH_FAILED, f"it synchronizes with the GPU at {synchronized[0]}")
    if busy:
        raise Refusal(Reason.GRAPH_THREADS, "another thread draws random numbers on the host")
    if draws:
        raise Refusal(Reason.GRAPH_FAILED, "it draws random numbers on the host")
    if strange:
        raise Refusal(Reason.GRAPH_STATE, f"a tensor {tuple(strange[0].shape)} outside the layer has a gradient")
    return is_random
