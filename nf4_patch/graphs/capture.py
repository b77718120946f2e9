"""Capture a decoder layer as two CUDA graphs: its forward, and its recompute with the backward.

The second graph recomputes exactly what a checkpoint would. For this, the forward is captured under a non-reentrant
checkpoint, or without gradients if the model uses a reentrant one. Both graphs read detached aliases of the parameters.
If they read the parameters themselves, autograd would synchronize with the training stream during the capture, because
the autograd nodes of the parameters belong to that stream.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..cache.store import cache
from ..nf4.runtime import DEVICE, is_out_of_memory
from ..patching.counters import HitCounter, counters
from ..patching.reasons import Reason
from .arguments import Slot, slots_for
from .fingerprint import Fingerprint

SYNCHRONIZES = "called a synchronizing CUDA operation"  # part of PyTorch's warning in sync debug mode


def matmul_precision() -> str:
    """Return the precision of fp32 matrix products, such as "tf32"."""
    # exists since PyTorch 2.9, where get_float32_matmul_precision may raise an error
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    return str(getter("cuda", "matmul") if getter else torch.get_float32_matmul_precision())


# MODES: getters of PyTorch's global modes that change which kernels a layer runs
MODES: list[Callable[[], Any]] = [matmul_precision, torch.are_deterministic_algorithms_enabled] + [
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
        "_get_math_sdp_allow_fp16_bf16_reduction",
    )
    if hasattr(torch._C, name)
]  # fmt: skip


class Refusal(Exception):
    """The layer cannot be captured. ``reason`` says why, ``detail`` says what was found."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class PoolMemory:
    """Describe the memory of a tensor in ``__cuda_array_interface__``. PyTorch makes tensors from it that do not own the memory."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": (tensor.untyped_storage().nbytes(),), "typestr": "|u1", "version": 3, "strides": None,
            "data": (tensor.untyped_storage().data_ptr(), False),
        }  # fmt: skip


def unowned(tensor: Tensor) -> Tensor:
    """Return an alias of ``tensor`` that does not keep its memory allocated, so that graphs of other layers can reuse the memory."""
    storage = torch.as_tensor(PoolMemory(tensor), device=tensor.device).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a GPU.

    The captures share one stream, because cuBLAS allocates a workspace for each stream (32 MiB on Hopper).
    """
    return torch.cuda.Stream(device)


class Pool:
    """Memory, capture stream and replay stream that all graphs of a GPU share."""

    def __init__(self, device: int):
        self.device = device
        self.lock = threading.RLock()  # held from the copy of the inputs to the copy of the results
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()  # the static buffers of all live graphs
        self.replay_stream = torch.cuda.current_stream(device).cuda_stream
        self.broken = False  # True after a capture failed
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = capture_stream(device)
        self.generator = torch.cuda.default_generators[device]
        self.keeper = torch.cuda.CUDAGraph()  # an empty graph that keeps the pool alive while no layer is captured
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            # capture_begin allocates the generator's state. If this allocation fails, PyTorch 2.11 aborts the process.
            # So a tensor is allocated first: if there is no memory, it raises an OutOfMemoryError.
            something = torch.empty(2**10, device=device)
            with self.capturing(self.keeper):
                something.zero_()

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the work that the ``with`` block launches on the current stream."""
        graph.capture_begin(self.handle, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            # the error of capture_end only says that the capture is invalid; the error that made it invalid is raised
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()

    def repair(self) -> None:
        """Repair PyTorch's state after a failed capture, and mark the pool as broken.

        After the failure, PyTorch still allocates from the pool, and PyTorch's generator is still in capture mode. The
        repair replaces the generator's state. Earlier graphs read the old state, so the caller has to drop all graphs.
        """
        self.broken = True
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
        self.generator.graphsafe_set_state(self.generator.clone_state())

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Serve this thread's allocations from the pool inside the ``with`` block."""
        begin = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)  # PyTorch >= 2.8
        if begin is None:
            yield
            return
        begin(self.device, self.handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
            torch._C._cuda_releasePool(self.device, self.handle)


class Environment(NamedTuple):
    """Autocast and PyTorch's global modes during a call. An Environment is part of the key of a graph."""

    autocast: bool
    dtype: torch.dtype
    modes: tuple[Any, ...]  # the results of MODES

    @classmethod
    def current(cls) -> Environment:
        modes = tuple([mode() for mode in MODES])
        return cls(torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE), modes)

    def entered(self) -> torch.autocast:
        """Return autocast with the recorded settings.

        The weight cache of autocast is off, because autocast frees the cached weights at its end, but a graph would
        still read them.
        """
        return torch.autocast(DEVICE, self.dtype, self.autocast, cache_enabled=False)


class Task(NamedTuple):
    """What to capture: a layer, with the arguments of one call."""

    layer: nn.Module
    # a function that calls the layer. Its arguments are the checkpoint function or the StaticCache to use, x, and the other tensors
    function: Callable[[Any, Tensor, list[Tensor]], Any]
    x: Tensor
    tensors: list[Tensor]  # all other tensor arguments
    environment: Environment
    fingerprint: Fingerprint
    is_reentrant: bool  # whether the checkpoint that the graphs replace is a reentrant one
    static_cache: Any  # the layer's StaticCache if it generates, else None


# A Place says where a module holds a parameter: the module's dict of parameters, the name in this dict, and the parameter.
Place = tuple[dict[str, Any], str, nn.Parameter]


@contextlib.contextmanager
def swapped(places: Sequence[Place], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Inside the ``with`` block, let the modules hold the aliases instead of the parameters.

    Skip a parameter that its module no longer holds.
    """
    done: list[Place] = []
    try:
        for place, alias in zip(places, aliases, strict=True):
            dictionary, name, parameter = place
            if dictionary.get(name) is parameter:
                done.append(place)
                dictionary[name] = alias
        yield
    finally:
        for dictionary, name, parameter in done:
            dictionary[name] = parameter


def trained_places(layer: nn.Module) -> list[Place]:
    """Return the Place of each of the layer's parameters that require a gradient."""
    modules: list[Any] = list(layer.modules())
    return [
        (m._parameters, name, p)
        for m in modules
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad
    ]


def alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return a new leaf that shares the parameter's memory and version counter.

    The leaf is an ``nn.Parameter``, because Dynamo would recompile for a plain tensor. It comes from ``detach()``, because
    ``.data`` would have a separate version counter.
    """
    return nn.Parameter(parameter.detach())


@contextlib.contextmanager
def quiet_garbage() -> Iterator[None]:
    """Disable garbage collection inside the ``with`` block. A collection could destroy another graph in the middle of a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def synchronizations() -> Iterator[list[str]]:
    """Collect the source lines that synchronize with the GPU inside the ``with`` block. A capture does not allow them.

    The list is filled when the block ends.
    """
    before, found = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # not "error", because another thread may synchronize at the same time
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [f"{w.filename}:{w.lineno}" for w in caught if SYNCHRONIZES in str(w.message)]


@contextlib.contextmanager
def host_generators() -> Iterator[Callable[[], bool]]:
    """Restore the random generators of Python, PyTorch's CPU and NumPy after the ``with`` block.

    Yield a function that returns whether one of these generators was used inside the block.
    """
    numpy: Any = sys.modules.get("numpy.random")

    def states() -> list[Any]:
        return [random.getstate(), bytes(torch.get_rng_state().tolist()), numpy and repr(numpy.get_state(legacy=False))]

    before = states()
    of_python, of_torch, of_numpy = random.getstate(), torch.get_rng_state(), numpy and numpy.get_state()
    try:
        yield lambda: states() != before
    finally:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if numpy:
            numpy.set_state(of_numpy)


def requested(device: int) -> int:
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def leaves(result: Tensor) -> Iterator[Any]:
    """Yield the leaf tensors of the autograd graph of ``result``."""
    seen, nodes = set(), [result.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


@contextlib.contextmanager
def repaired(pool: Pool) -> Iterator[None]:
    """Repair the pool after an error inside the ``with`` block, and say what the error means for the layer."""
    try:
        yield
    except RuntimeError as error:
        pool.repair()
        if is_out_of_memory(error):
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        raise Refusal(Reason.GRAPH_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]) from None
    except BaseException:
        pool.repair()
        raise


class GraphedLayer:
    """The forward graph and the backward graph of one layer, for all calls with the same key (argument layouts and modes)."""

    alive = False  # whether the graphs can be replayed
    differentiable = True

    def __init__(self, pool: Pool, task: Task):
        """Warm up the layer and capture its two graphs: the forward, and the recompute with the backward.

        Raises:
            Refusal: the layer cannot be captured.
            torch.cuda.OutOfMemoryError: the GPU has no memory for the graphs.
        """
        self.pool, self.fingerprint = pool, task.fingerprint
        self.slots = slots_for(task.tensors, pool.slots)
        self.trained = trained_places(task.layer)
        self.aliases = [alias_of(parameter) for *_, parameter in self.trained]
        self.used: list[int] = []  # indices in ``aliases`` of the parameters that receive a gradient
        self.parameters: Any = None  # the parameters that receive a gradient; set by the warm-up
        self.others: tuple[None, ...] | None = None  # the results after the first, if the layer returns a tuple
        random_state, replay_stream = pool.generator.get_state(), torch.cuda.current_stream(pool.device)
        try:
            with (
                torch.cuda.device(pool.device), torch.cuda.stream(pool.stream), quiet_garbage(),
                torch.set_grad_enabled(self.differentiable),
                torch.autograd.set_multithreading_enabled(False),  # the pool and the capture mode apply to one thread only
                saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
            ):  # fmt: skip
                pool.stream.wait_stream(replay_stream)
                with cache.pinned(pool.stream.cuda_stream) as self.pins:
                    self.capture(pool, task)
        finally:
            replay_stream.wait_stream(pool.stream)
            pool.generator.set_state(random_state)
            del self.aliases

    def capture(self, pool: Pool, task: Task) -> None:
        with pool.allocating():
            x, gradient = torch.empty_like(task.x), torch.ones_like(task.x)
            x.copy_(task.x)
        with host_generators() as used:
            self.warm_up(pool, task, x, gradient, used)
        self.first, self.second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.pins.clear()
        before, launches = requested(pool.device), Launches()
        with repaired(pool):
            with pool.capturing(self.first):
                alias, y = self.forward_of(task, x)
            grown = requested(pool.device) - before
            self.hits, launches, self.reads = launches.since(), Launches(), len(self.pins)
            with pool.capturing(self.second):
                result = y
                if task.is_reentrant:
                    alias, result = self.forward_of(task, x, recompute=True)
                dx, flat = self.backward_of(alias, result, gradient)
            self.hits_of_backward = launches.since()
        if grown != y.untyped_storage().nbytes():
            raise Refusal(Reason.GRAPH_STATE, f"{grown - y.nbytes} bytes stay allocated until the backward")
        self.x, self.gradient, self.y = unowned(x), unowned(gradient), unowned(y.detach())
        self.dx = None if dx is None else unowned(dx)
        self.flat = [unowned(part) for part in flat]
        self.shapes = [[torch.empty_like(p, device="meta") for p in same] for same in self.by_dtype(self.parameters)]
        self.alive = True

    def by_dtype(self, tensors: Sequence[Any]) -> list[list[Tensor]]:
        """Group tensors by the dtype of their parameter.

        Args:
            tensors: one tensor per parameter, in the order of ``parameters``.
        """
        return [
            [tensor for tensor, parameter in zip(tensors, self.parameters, strict=True) if parameter.dtype is dtype]
            for dtype in self.dtypes
        ]

    def forward_of(self, task: Task, x: Tensor, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """Run the layer under a checkpoint on an alias of x. Return the alias, which is a leaf, and the layer's first result.

        As under the checkpoint that the graphs replace, a reentrant forward runs without gradients, and its recompute with
        gradients. The two may round differently, because bitsandbytes, attention and compiled layers choose other kernels.
        """
        alias = x.detach().requires_grad_(task.x.requires_grad)
        buffers = [slot.buffer for slot in self.slots]

        def body(function: Callable[..., Any], *arguments: Any) -> Any:
            with swapped(self.trained, self.aliases):
                return function(*arguments)

        def checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
            if task.is_reentrant:
                with torch.set_grad_enabled(recompute):
                    return body(function, *arguments)
            return checkpoint(body, function, *arguments, use_reentrant=False, preserve_rng_state=False)

        with task.environment.entered():
            result = self.first_of(task.function(checkpointed, alias, buffers), task)
        if not result.requires_grad and (recompute or not task.is_reentrant):
            raise Refusal(Reason.GRAPH_ARGUMENTS, "nothing in it requires a gradient")
        return alias, result

    def first_of(self, result: Any, task: Task) -> Tensor:
        """Return the first result of the layer, and remember the others."""
        others = None
        if type(result) is tuple and result and all(other is None for other in result[1:]):
            result, others = result[0], result[1:]
        if not isinstance(result, Tensor) or (result.shape, result.dtype) != (task.x.shape, task.x.dtype):
            raise Refusal(Reason.GRAPH_ARGUMENTS, "it does not return one tensor of its input's shape and dtype")
        self.others = others
        return result

    def backward_of(self, x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradient of x, and the gradients of the parameters as one flat tensor per dtype.

        The gradient of x is None if x requires no gradient. The first call sets ``parameters`` to the parameters that receive a
        gradient. Autocast is off, as it is in the thread in which autograd runs an eager backward.
        """
        used = list(range(len(self.aliases))) if self.parameters is None else self.used
        inputs = [*([x] if x.requires_grad else []), *[self.aliases[index] for index in used]]
        with torch.autocast(DEVICE, enabled=False):
            found = list(torch.autograd.grad(y, inputs, gradient, allow_unused=True))
        dx = found.pop(0) if x.requires_grad else None
        if self.parameters is None:
            self.used = [index for index in used if found[index] is not None]
            self.places = [self.trained[index] for index in self.used]
            self.parameters = [parameter for *_, parameter in self.places]
            self.dtypes = list(dict.fromkeys(parameter.dtype for parameter in self.parameters))
        gradients = [each for each in found if each is not None]
        return dx, [torch.cat([each.reshape(-1) for each in same]) for same in self.by_dtype(gradients)]

    def run(self, task: Task, x: Tensor, gradient: Tensor) -> list[Tensor]:
        """Run forward and backward once. Return the leaves outside the layer that receive a gradient."""
        alias, y = self.forward_of(task, x)
        if task.is_reentrant:
            alias, y = self.forward_of(task, x, recompute=True)
        known = alias, *self.aliases
        strange = [leaf for leaf in leaves(y) if leaf.numel() and not any(leaf is each for each in known)]
        self.backward_of(alias, y, gradient)
        return strange

    def warm_up(self, pool: Pool, task: Task, x: Tensor, gradient: Tensor, host_random: Callable[[], bool]) -> None:
        """Run the layer on the capture stream, so that first-use allocations and compilations stay out of the graphs.

        If the first run synchronizes with the GPU, the layer runs a second time, because some code
        synchronizes only at its first use.

        Raises:
            Refusal: the run did something that a replay cannot repeat.
        """
        modules = list(task.layer.modules())
        own = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        buffers = [x, *[slot.buffer for slot in self.slots], *own]
        attributes, contents = [{**vars(module)} for module in modules], [buffer.clone() for buffer in own]

        def versions() -> list[int]:
            return [buffer._version for buffer in buffers]

        for last in (False, True):
            before = versions()
            offset = pool.generator.get_offset()
            with pool.allocating(), synchronizations() as synchronized:
                strange = self.run(task, x, gradient)
            if not synchronized or last:
                break
        if synchronized:
            raise Refusal(Reason.GRAPH_SYNCHRONIZES, f"it synchronizes with the GPU at {synchronized[0]}")
        if host_random():
            raise Refusal(Reason.GRAPH_RANDOM, "it draws random numbers on the host")
        if strange:
            raise Refusal(Reason.GRAPH_STATE, f"a tensor {tuple(strange[0].shape)} outside the layer has a gradient")
        try:
            changed = attributes != [vars(module) for module in modules] or not task.fingerprint.holds()
        except RuntimeError:  # raised where two different tensors were compared
            changed = True
        if changed or versions() != before:
            for module, found in zip(modules, attributes, strict=True):
                vars(module).clear()
                vars(module).update(found)
            task.fingerprint.restore()
            for buffer, content in zip(own, contents, strict=True):
                buffer.copy_(content)
            raise Refusal(Reason.GRAPH_STATE, "a call changes one of its attributes or buffers")
        self.is_random = pool.generator.get_offset() != offset

    # --- replays ---

    def load(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.load(tensor)

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        """Replay the forward and return a copy of the layer's first result. The caller has to hold the pool's lock."""
        self.x.copy_(x)
        self.load(tensors)
        self.first.replay()
        count(self.hits)
        cache.hits += self.reads
        return self.y.clone()

    def backward(self, x: Tensor, tensors: list[Tensor], random_state: Tensor | None, gradient: Tensor) -> list[Any]:
        """Replay recompute and backward, and return the gradients of x and of ``parameters``.

        The caller has to hold the pool's lock.

        Args:
            random_state: the generator's state before the forward, or None if the layer draws no random numbers.
        """
        generator = self.pool.generator
        torch._foreach_copy_([self.x, self.gradient], [x, gradient])
        self.load(tensors)
        if random_state is None:
            self.second.replay()
        else:
            after = generator.get_state()
            generator.set_state(random_state)
            self.second.replay()
            generator.set_state(after)
        count(self.hits_of_backward)
        cache.hits += len(self.pins) - self.reads
        found: list[Any] = [None] * len(self.parameters)
        # autograd is bypassed, because it would mark the gradients as views. ``detach_()`` raises an error for a view.
        with torch._C._AutoDispatchBelowAutograd():
            for dtype, flat, shapes in zip(self.dtypes, self.flat, self.shapes, strict=True):
                parts = iter(torch._C._nn.unflatten_dense_tensors(flat.clone(), shapes))
                found = [next(parts) if p.dtype is dtype else g for p, g in zip(self.parameters, found, strict=True)]
        return [None if self.dx is None else self.dx.clone(), *found]

    def is_in_place(self) -> bool:
        """Return whether every tensor that the graphs read still has the address that it had at the capture."""
        return (
            self.alive
            and self.fingerprint.is_in_place()
            and all(entry.of(weight) is not None for entry, weight in self.pins)
        )

    def reset(self) -> None:
        self.alive = False
        self.first.reset()
        self.second.reset()


def tensors_of(static_layer: Any) -> list[Tensor]:
    """Return the tensors of a layer of a StaticCache: keys and values, and in newer releases the number of tokens."""
    return [value for value in vars(static_layer).values() if isinstance(value, Tensor)]


class GraphedForward(GraphedLayer):
    """The graph of a layer that generates: a forward without gradients, which writes one layer of a StaticCache.

    The StaticCache is part of the key. So another one, as transformers makes for each ``generate``, has graphs of its own.
    """

    differentiable = False

    def capture(self, pool: Pool, task: Task) -> None:
        with pool.allocating():
            x = torch.empty_like(task.x)
            x.copy_(task.x)
        self.static_cache, self.written = weakref.ref(task.static_cache), set[int]()
        with host_generators() as used:
            self.warm_up(pool, task, x, x, used)
        if len(self.written) != 1:
            raise Refusal(Reason.GRAPH_STATE, f"it writes {len(self.written)} layers of the static cache")
        (self.index,) = self.written
        self.addresses = self.found_addresses()
        self.first = torch.cuda.CUDAGraph()
        self.pins.clear()
        before, launches = requested(pool.device), Launches()
        with repaired(pool), pool.capturing(self.first):
            y = self.result_of(task, x)
        grown = requested(pool.device) - before
        self.hits, self.reads = launches.since(), len(self.pins)
        if grown != y.untyped_storage().nbytes():
            raise Refusal(Reason.GRAPH_STATE, f"{grown - y.nbytes} bytes stay allocated")
        self.x, self.y = unowned(x), unowned(y)
        self.alive = True

    def result_of(self, task: Task, x: Tensor) -> Tensor:
        with task.environment.entered():
            return self.first_of(task.function(task.static_cache, x, [slot.buffer for slot in self.slots]), task)

    def run(self, task: Task, x: Tensor, gradient: Tensor) -> list[Tensor]:
        """Run the forward once. Note which layers of the static cache it wrote, and take back the number of tokens.

        The keys and values stay, because the first replay writes the same ones to the same place.
        """
        attributes = [{**vars(layer)} for layer in task.static_cache.layers]
        layers = [tensors_of(layer) for layer in task.static_cache.layers]
        before = [[tensor._version for tensor in tensors] for tensors in layers]
        counts = [(tensor, tensor.clone()) for tensors in layers for tensor in tensors if tensor.dim() == 0]
        try:
            self.result_of(task, x)
        finally:
            after = [[tensor._version for tensor in tensors] for tensors in layers]
            self.written |= {index for index, versions in enumerate(after) if versions != before[index]}
            for tensor, count in counts:
                tensor.copy_(count)
            changed = False
            for layer, found in zip(task.static_cache.layers, attributes, strict=True):
                changed |= not all(map(is_, vars(layer).values(), found.values()))
                vars(layer).update(found)
        if changed:
            raise Refusal(Reason.GRAPH_STATE, "a call changes an attribute of the static cache")
        return []

    def found_addresses(self) -> list[int]:
        static_cache: Any = self.static_cache()
        return [tensor.data_ptr() for tensor in tensors_of(static_cache.layers[self.index])]

    def is_in_place(self) -> bool:
        return super().is_in_place() and self.found_addresses() == self.addresses

    def reset(self) -> None:
        self.alive = False
        self.first.reset()


class Launches:
    """A snapshot of all hit counters, which count kernel launches.

    ``since`` returns each counter with the number of launches since the snapshot.
    """

    def __init__(self) -> None:
        self.before = [(counter, counter.hits) for counter in list(counters.hit_counters.values())]

    def since(self) -> list[tuple[HitCounter, int]]:
        return [(counter, counter.hits - hits) for counter, hits in self.before if counter.hits != hits]


def count(hits: list[tuple[HitCounter, int]]) -> None:
    """Add the launches of one replay to the hit counters."""
    for counter, number in hits:
        counter.hits += number
