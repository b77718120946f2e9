"""Recorders for a machine without CUDA. All other code is the code that runs on a GPU.

``Rerun`` runs the recorded function again, and copies its results into the memory of the first results. ``Operations``
repeats the operations that the function ran, in the same memory. As in a CUDA graph, no change of Python's state
reaches these operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from nf4_patch.cache.store import cache
from nf4_patch.graphs import recording
from nf4_patch.graphs.generation import tensors_of
from nf4_patch.graphs.recorder import Recorder, modes_of_recording, restore
from nf4_patch.patching.counters import counters
from nf4_patch.patching.dequantizer import Dequantizer


def copy_into(held: Any, results: Any) -> None:
    for old, new in zip(tree_flatten(held)[0], tree_flatten(results)[0], strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.detach().copy_(new.detach())


@contextlib.contextmanager
def nothing_ran(work: Any) -> Iterator[None]:
    """Give a static cache its old contents back, because a real capture does not run the work."""
    owner = getattr(work, "__self__", None)
    static_cache = getattr(getattr(owner, "task", None), "static_cache", None)
    tensors = [t for layer in static_cache.layers for t in tensors_of(layer)] if static_cache is not None else []
    contents = [tensor.clone() for tensor in tensors]
    try:
        with getattr(owner, "undone", contextlib.nullcontext)():
            yield
    finally:
        for tensor, content in zip(tensors, contents, strict=True):
            tensor.copy_(content)


class Repetition:
    """A recording, which holds the work and the result of its first run."""

    def __init__(
        self, work: Callable[..., Any], generator: Any, before: Repetition | None, given: tuple[Any, ...], keeps: bool
    ):
        self.work, self.generator, self.before, self.keeps = work, generator, before, keeps
        self.differentiable = torch.is_grad_enabled()
        self.result = work(*given)

    def again(self) -> Any:
        if self.before is None:
            self.latest = self.work()
            return self.latest
        if self.before.keeps:
            return self.work(self.before.latest)
        state = self.generator.get_state()
        given = self.before.again()
        self.generator.set_state(state)  # the work before drew its numbers in a replay of its own
        return self.work(given)

    def replay(self) -> None:
        hits = [(counter, counter.hits) for counter in list(counters.hit_counters.values())]
        read = cache.hits
        with modes_of_recording(self.differentiable):
            copy_into(self.result, self.again())
        for counter, number in hits:  # a replay of a graph does not count by itself
            counter.hits = number
        cache.hits = read

    def reset(self) -> None:
        self.work = self.before = self.result = self.latest = None  # type: ignore[assignment]


class Rerun(Recorder):
    stream_id = size = 0  # type: ignore[assignment]

    def prepare(self) -> None:
        self.generator = torch.default_generator

    def close(self) -> None:
        """Do nothing, because no memory is held."""

    def record(self, work: Any, before: Any = None, *given: Any, keeps: bool = False) -> tuple[Any, Any]:
        with nothing_ran(work):
            recording = Repetition(work, self.generator, before, given, keeps)
        return recording, recording.result

    @contextlib.contextmanager
    def recording(self, differentiable: bool) -> Iterator[None]:
        state = self.generator.get_state()
        try:
            with modes_of_recording(differentiable):
                yield
        finally:
            restore(self.generator, state)

    def allocating(self) -> Any:
        return contextlib.nullcontext()

    def outside(self) -> Any:
        return contextlib.nullcontext()

    def make_room(self) -> None:
        """Do nothing, because memory never runs short."""

    def leaving_enough(self, more: int = 0, held: int = 0) -> Any:
        return contextlib.nullcontext()

    @staticmethod
    def require(device: int, taken: int = 0, rest: int | None = None) -> None:
        """Do nothing, because memory never runs short."""

    def synchronizations(self) -> Any:
        return contextlib.nullcontext([])

    def borrowed(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def allocated(self) -> int:
        return 0

    def kept(self, before: int, *results: Tensor) -> int:
        """Return the bytes as if only the results stayed allocated."""
        return 0


class Allocations(TorchDispatchMode):
    """The storages that operations allocated. ``nbytes`` counts those that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        given = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def nbytes(self) -> int:
        return sum(size for storage, size in self.sizes.values() if not storage.expired())


class Counting(Rerun):
    """A recorder that counts the memory that stays allocated after the recorded work."""

    allocations: Allocations | None = None

    def record(self, work: Any, *others: Any, **options: Any) -> tuple[Any, Any]:
        self.allocations = self.allocations or Allocations()
        with self.allocations:
            return super().record(work, *others, **options)

    def allocated(self) -> int:
        return 0 if self.allocations is None else self.allocations.nbytes()

    kept = Recorder.kept


class Log(TorchDispatchMode):
    """Records every operation, with its arguments and results, whose memory stays allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        def held(value: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return tree_map_only(Tensor, lambda tensor: tensor.detach(), value)

        given = held((args, kwargs or {}))
        result = function(*args, **kwargs or {})
        inputs = {t.untyped_storage()._cdata for t in tree_flatten(given)[0] if isinstance(t, Tensor)}
        outputs = [t for t in tree_flatten(held(result))[0] if isinstance(t, Tensor)]
        written = [None if t.untyped_storage()._cdata in inputs else t for t in outputs]
        if function is not torch.ops.aten.detach.default:
            self.calls.append((function, given, written))
        return result

    def repeat(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for function, (args, kwargs), written in self.calls:
                results = [t for t in tree_flatten(function(*args, **kwargs))[0] if isinstance(t, Tensor)]
                for old, new in zip(written, results, strict=True):
                    if old is not None:
                        old.copy_(new)


decode = Dequantizer.run


def read(self: Dequantizer, weight: Any, out: Any = None, into_buffer: bool = False, only_read: bool = False) -> Any:
    """Read the weight cache, which ``Dequantizer.run`` does not do in a dispatch mode such as ``Log``."""
    found = cache.read(weight, self.run) if only_read and cache.on and out is None else None
    return found if isinstance(found, Tensor) else decode(self, weight, out, into_buffer, only_read)


class Operations(Rerun):
    def record(self, work: Any, before: Any = None, *given: Any, keeps: bool = False) -> tuple[Any, Any]:
        log = Log()
        with nothing_ran(work), log, mock.patch.object(Dequantizer, "run", read):
            result = work(*given)
        return OfLog(log), result


class OfLog:
    def __init__(self, log: Log):
        self.log = log

    def replay(self) -> None:
        self.log.repeat()

    def reset(self) -> None:
        self.log.calls.clear()


def install(monkeypatch: Any, recorder: type[Recorder] = Rerun) -> None:
    monkeypatch.setattr(recording, "Recorder", recorder)
