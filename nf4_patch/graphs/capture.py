"""One decoder layer as two CUDA graphs: its forward, and its recompute with the backward.

The forward is captured under a non-reentrant checkpoint, so the recompute inside the second graph ends where a checkpoint's
recompute ends. Both graphs read detached aliases of the parameters: the parameters' own autograd nodes belong to the stream on
which the training runs, and autograd would synchronize with that stream in the middle of the capture.
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

SYNCHRONIZES = "called a synchronizing CUDA operation"  # PyTorch's warning in sync debug mode


MODES: list[Callable[[], Any]] = [torch.get_float32_matmul_precision, torch.are_deterministic_algorithms_enabled] + [
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
    )
    if hasattr(torch._C, name)
]  # fmt: skip


class Refusal(Exception):
    """The layer cannot be captured: the Reason, and what was found."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class PoolMemory:
    """Memory of the pool at a fixed address, which a tensor may use without owning it."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": (tensor.untyped_storage().nbytes(),), "typestr": "|u1", "version": 3, "strides": None,
            "data": (tensor.untyped_storage().data_ptr(), False),
        }  # fmt: skip


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that does not keep it allocated: graphs that run at other times share it."""
    storage = torch.as_tensor(PoolMemory(tensor), device=tensor.device).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of every capture on a GPU: cuBLAS keeps a workspace for each stream (32 MiB on Hopper)."""
    return torch.cuda.Stream(device)


class Pool:
    """The memory of all graphs of a GPU, the stream that they are captured on, and the stream that they are replayed on."""

    def __init__(self, device: int):
        self.device = device
        self.lock = threading.RLock()  # from the copy of the inputs to the copy of the results
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()  # of the graphs that are alive
        self.replay_stream = torch.cuda.current_stream(device).cuda_stream
        self.broken = False  # a capture failed
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = capture_stream(device)
        self.generator = torch.cuda.default_generators[device]
        self.keeper = torch.cuda.CUDAGraph()  # holds the pool while no layer is captured
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            # so that capture_begin finds memory for the generator's state: without, PyTorch 2.11 ends the process
            something = torch.empty(2**10, device=device)
            with self.capturing(self.keeper):
                something.zero_()

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture into the graph what runs inside, on the current stream."""
        graph.capture_begin(self.handle, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is invalid: what was raised inside says why
                graph.capture_end()
            raise
        graph.capture_end()

    def repair(self) -> None:
        """Mend PyTorch after a capture that failed. PyTorch still routes allocations into the pool, and its generator still waits for the end of
        the capture. Graphs that were captured before read the old generator's numbers, so all of them have to go."""
        self.broken = True
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
        self.generator.graphsafe_set_state(self.generator.clone_state())

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate from the pool what this thread allocates inside."""
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
    """Modes that a layer runs in; a part of the key of a graph."""

    autocast: bool
    dtype: torch.dtype
    modes: tuple[Any, ...]  # the results of MODES

    @classmethod
    def current(cls) -> Environment:
        modes = tuple([mode() for mode in MODES])
        return cls(torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE), modes)

    def entered(self) -> torch.autocast:
        """Autocast as it was. Its cache is off: a graph would read a cast weight that is freed when autocast ends."""
        return torch.autocast(DEVICE, self.dtype, self.autocast, cache_enabled=False)


class Task(NamedTuple):
    """What is captured: a layer with the arguments of one call."""

    layer: nn.Module
    function: Callable[
        [Callable[..., Any], Tensor, list[Tensor]], Any
    ]  # the layer's result for a checkpoint, x and the others
    x: Tensor
    tensors: list[Tensor]  # all other tensor arguments
    environment: Environment
    fingerprint: Fingerprint
    is_compiled: bool  # Unsloth's layer, which is one compiled function


Place = tuple[dict[str, Any], str, nn.Parameter]  # a module's parameters, and a name and a parameter among them


@contextlib.contextmanager
def swapped(places: Sequence[Place], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Put each alias into the place of its parameter, if the parameter is still there."""
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
    """Where a layer has the parameters that require a gradient."""
    modules: list[Any] = list(layer.modules())
    return [
        (m._parameters, name, p)
        for m in modules
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad
    ]


def alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """A leaf of its own on the parameter's memory. Not a plain tensor, for which Dynamo would compile again; nor ``.data``, which has
    a version counter of its own."""
    return nn.Parameter(parameter.detach())


@contextlib.contextmanager
def quiet_garbage() -> Iterator[None]:
    """Collect no garbage inside: it could destroy another graph in the middle of a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def synchronizations() -> Iterator[list[str]]:
    """Collect where the code inside synchronizes with the GPU, which no capture allows."""
    before, found = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # not "error": another thread may synchronize meanwhile
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [f"{w.filename}:{w.lineno}" for w in caught if SYNCHRONIZES in str(w.message)]


@contextlib.contextmanager
def host_generators() -> Iterator[Callable[[], bool]]:
    """Restore the host's random generators afterwards. Inside, the yielded function says whether one was used."""
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
    """Yield the tensors that gradients of ``result`` are accumulated into."""
    seen, nodes = set(), [result.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


class GraphedLayer:
    """Two graphs of one layer, for calls of one key."""

    alive = False  # whether the graphs can be replayed

    def __init__(self, pool: Pool, task: Task):
        """Warm up and capture.

        Raises:
            Refusal: the layer cannot be captured.
            torch.cuda.OutOfMemoryError: there is no memory for it.
        """
        self.pool, self.fingerprint = pool, task.fingerprint
        self.slots = slots_for(task.tensors, pool.slots)
        self.trained = trained_places(task.layer)
        self.aliases = [alias_of(parameter) for *_, parameter in self.trained]
        self.used: list[int] = []  # indices of aliases
        self.parameters: Any = None  # the trained parameters that have a gradient; found in the warm-up
        self.others: tuple[None, ...] | None = None  # what the layer returns after its first result, if that is a tuple
        random_state, replay_stream = pool.generator.get_state(), torch.cuda.current_stream(pool.device)
        try:
            with (
                torch.cuda.device(pool.device), torch.cuda.stream(pool.stream), quiet_garbage(), torch.enable_grad(),
                torch.autograd.set_multithreading_enabled(False),  # the pool and the capture mode are this thread's
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
        try:
            with pool.capturing(self.first):
                alias, y = self.forward_of(task, x)
            grown = requested(pool.device) - before
            self.hits, launches, self.reads = launches.since(), Launches(), len(self.pins)
            with pool.capturing(self.second):
                result = y
                if task.is_compiled:
                    alias, result = self.forward_of(task, x, recompute=True)
                dx, flat = self.backward_of(alias, result, gradient)
            self.hits_of_backward = launches.since()
        except RuntimeError as error:
            pool.repair()
            if is_out_of_memory(error):
                raise torch.cuda.OutOfMemoryError(str(error)) from error
            raise Refusal(Reason.GRAPH_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]) from None
        except BaseException:
            pool.repair()
            raise
        if grown != y.untyped_storage().nbytes():
            raise Refusal(Reason.GRAPH_STATE, f"{grown - y.nbytes} bytes live from the forward to the backward")
        self.x, self.gradient, self.y = unowned(x), unowned(gradient), unowned(y.detach())
        self.dx = None if dx is None else unowned(dx)
        self.flat = [unowned(part) for part in flat]
        self.shapes = [[torch.empty_like(p, device="meta") for p in same] for same in self.by_dtype(self.parameters)]
        self.alive = True

    def by_dtype(self, tensors: Sequence[Any]) -> list[list[Tensor]]:
        """Split what belongs to the parameters, in their order, by the dtype of the parameter."""
        return [
            [tensor for tensor, parameter in zip(tensors, self.parameters, strict=True) if parameter.dtype is dtype]
            for dtype in self.dtypes
        ]

    def forward_of(self, task: Task, x: Tensor, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """Return the input, a leaf, and the first result of the layer.

        A compiled layer runs without gradients in the forward and with gradients in the recompute, as under a reentrant
        checkpoint: its two compilations may round differently.
        """
        alias = x.detach().requires_grad_(task.x.requires_grad)
        buffers = [slot.buffer for slot in self.slots]

        def body(function: Callable[..., Any], *arguments: Any) -> Any:
            with swapped(self.trained, self.aliases):
                return function(*arguments)

        def checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
            if task.is_compiled:
                with torch.set_grad_enabled(recompute):
                    return body(function, *arguments)
            return checkpoint(body, function, *arguments, use_reentrant=False, preserve_rng_state=False)

        with task.environment.entered():
            result = task.function(checkpointed, alias, buffers)
        others = None
        if type(result) is tuple and result and all(other is None for other in result[1:]):
            result, others = result[0], result[1:]
        if not isinstance(result, Tensor) or (result.shape, result.dtype) != (task.x.shape, task.x.dtype):
            raise Refusal(Reason.GRAPH_ARGUMENTS, "the layer does not return one tensor like its input")
        if not result.requires_grad and (recompute or not task.is_compiled):
            raise Refusal(Reason.GRAPH_ARGUMENTS, "nothing in the layer has a gradient")
        self.others = others
        return alias, result

    def backward_of(self, x: Tensor, y: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradient of x (None if it needs none), and those of all parameters that have one, in one flat tensor for each
        dtype."""
        used = list(range(len(self.aliases))) if self.parameters is None else self.used
        inputs = [*([x] if x.requires_grad else []), *[self.aliases[index] for index in used]]
        found = list(torch.autograd.grad(y, inputs, gradient, allow_unused=True))
        dx = found.pop(0) if x.requires_grad else None
        if self.parameters is None:
            self.used = [index for index in used if found[index] is not None]
            self.places = [self.trained[index] for index in self.used]
            self.parameters = [parameter for *_, parameter in self.places]
            self.dtypes = list(dict.fromkeys(parameter.dtype for parameter in self.parameters))
        gradients = [each for each in found if each is not None]
        return dx, [torch.cat([each.reshape(-1) for each in same]) for same in self.by_dtype(gradients)]

    def warm_up(self, pool: Pool, task: Task, x: Tensor, gradient: Tensor, host_random: Callable[[], bool]) -> None:
        """Run once on the capture stream: what is allocated or compiled at a first use must not be in the graph.

        Raises:
            Refusal: the run did what a replay cannot repeat.
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
                alias, y = self.forward_of(task, x)
                if task.is_compiled:
                    alias, y = self.forward_of(task, x, recompute=True)
                strange = [leaf for leaf in leaves(y) if leaf.numel() and not any(leaf is a for a in (alias, *self.aliases))]
                self.backward_of(alias, y, gradient)
                del alias, y
            if not synchronized or last:
                break
        if synchronized:
            raise Refusal(Reason.GRAPH_SYNCHRONIZES, f"it synchronizes with the GPU at {synchronized[0]}")
        if host_random():
            raise Refusal(Reason.GRAPH_RANDOM, "it draws random numbers on the host")
        if strange:
            raise Refusal(Reason.GRAPH_STATE, f"a tensor {tuple(strange[0].shape)} outside of the layer has a gradient")
        try:
            changed = attributes != [vars(module) for module in modules] or not task.fingerprint.holds()
        except RuntimeError:  # two different tensors were compared
            changed = True
        if changed or versions() != before:
            for module, found in zip(modules, attributes, strict=True):
                vars(module).clear()
                vars(module).update(found)
            task.fingerprint.restore()
            for buffer, content in zip(own, contents, strict=True):
                buffer.copy_(content)
            raise Refusal(Reason.GRAPH_STATE, "a call changes an attribute or a buffer of the layer")
        self.is_random = pool.generator.get_offset() != offset

    # --- replays ---

    def load(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.load(tensor)

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        """Return the layer's first result. The caller holds the pool's lock."""
        self.x.copy_(x)
        self.load(tensors)
        self.first.replay()
        count(self.hits)
        cache.hits += self.reads
        return self.y.clone()

    def backward(self, x: Tensor, tensors: list[Tensor], random_state: Tensor | None, gradient: Tensor) -> list[Any]:
        """Return the gradients of x and of ``parameters``. The caller holds the pool's lock.

        Args:
            random_state: the generator's state before the forward, if the layer draws random numbers.
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
        with (
            torch._C._AutoDispatchBelowAutograd()
        ):  # so that a gradient is no view, which some code cannot detach in place
            for dtype, flat, shapes in zip(self.dtypes, self.flat, self.shapes, strict=True):
                parts = iter(torch._C._nn.unflatten_dense_tensors(flat.clone(), shapes))
                found = [next(parts) if p.dtype is dtype else g for p, g in zip(self.parameters, found, strict=True)]
        return [None if self.dx is None else self.dx.clone(), *found]

    def is_in_place(self) -> bool:
        """Whether every tensor that the graphs read is where it was."""
        return (
            self.alive
            and self.fingerprint.is_in_place()
            and all(entry.of(weight) is not None for entry, weight in self.pins)
        )

    def reset(self) -> None:
        self.alive = False
        self.first.reset()
        self.second.reset()


class Launches:
    """The hit counters of now."""

    def __init__(self) -> None:
        self.before = [(counter, counter.hits) for counter in list(counters.hit_counters.values())]

    def since(self) -> list[tuple[HitCounter, int]]:
        return [(counter, counter.hits - hits) for counter, hits in self.before if counter.hits != hits]


def count(hits: list[tuple[HitCounter, int]]) -> None:
    """Count the launches that a replay repeats."""
    for counter, number in hits:
        counter.hits += number
