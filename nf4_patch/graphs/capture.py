"""Capture a decoder layer as two CUDA graphs: its forward, and its recompute with the backward.

The forward is captured under a non-reentrant checkpoint, so that the second graph recomputes exactly what a checkpoint
would. Both graphs read detached aliases of the parameters. If they read the parameters themselves, autograd would
synchronize with the training stream during the capture, because the autograd nodes of the parameters belong to that
stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..cache.store import cache
from ..nf4.runtime import DEVICE
from ..patching.counters import HitCounter, counters
from ..patching.reasons import Reason
from .arguments import slots_for
from .fingerprint import Fingerprint
from .pool import Pool, Refusal, host_generators, quiet_garbage, repaired, requested, synchronizations, unowned


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
    is_compiled: bool  # Unsloth's layer, which is one compiled function
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
                if task.is_compiled:
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

        A compiled layer runs without gradients in the forward and with gradients in the recompute, as under a reentrant
        checkpoint, because its two compilations may round differently.
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
            result = self.first_of(task.function(checkpointed, alias, buffers), task)
        if not result.requires_grad and (recompute or not task.is_compiled):
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
        if task.is_compiled:
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
