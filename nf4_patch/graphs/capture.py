"""Capture a decoder layer as two CUDA graphs: the forward, and the recompute together with the backward.

The second graph recomputes exactly what a checkpoint would. For this, the forward is captured under a non-reentrant
checkpoint, or without gradients if the model uses a reentrant one. Both graphs read the parameters through detached aliases,
which share the parameters' memory. Without aliases, autograd would synchronize with the training stream, to which the
parameters' autograd nodes belong. A capture forbids such a synchronization.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from operator import setitem
from typing import Any, NamedTuple

import torch
import torch.nn.attention
import torch.utils.checkpoint
from torch import Tensor, nn

from ..cache.store import cache
from ..nf4 import runtime
from ..nf4.runtime import DEVICE
from ..patching.context import plain_methods
from ..patching.counters import HitCounter, counters
from ..patching.reasons import Reason
from .arguments import slots_for
from .fingerprint import Fingerprint
from .recorder import Recorder
from .refusal import Refusal
from .warmup import ancestors, warm_up

ALIGNMENT = 16  # bytes
# Unsloth replaces PyTorch's checkpoint, and keeps the original under this other name.
checkpoint = getattr(torch.utils.checkpoint, "_old_checkpoint", torch.utils.checkpoint.checkpoint)


def precisions() -> tuple[Any, ...]:
    """Return PyTorch's precision settings for matrix products and convolutions in fp32, for example "tf32"."""
    # This getter exists since PyTorch 2.9. From 2.9 upwards, the older functions may raise an error.
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter:
        return getter("cuda", "matmul"), getter("cuda", "conv")
    return torch.get_float32_matmul_precision(), torch._C._get_cudnn_allow_tf32()


@functools.cache
def settle_attention() -> None:
    """Make PyTorch choose an attention backend, so that its first choice does not change the order of the backends later."""
    # On another GPU, the tensor would make a CUDA context.
    for device in runtime.devices_in_use()[:1] if torch.cuda.is_available() else ():
        x = torch.empty(1, 1, 64, 64, dtype=torch.float16, device=device)
        with contextlib.suppress(RuntimeError):  # the script allows only backends that do not support x
            torch._fused_sdp_choice(x, x, x)  # on some GPUs, the first choice puts cuDNN first


def attention_backends() -> tuple[int, ...]:
    """Return the order in which scaled_dot_product_attention tries its backends, or () before PyTorch 2.6."""
    settle_attention()
    getter = getattr(torch._C, "_get_sdp_priority_order", None)
    return tuple(getter()) if getter else ()


def flash_attention() -> Any:
    """Return the name of the implementation that replaces PyTorch's own flash attention, or None."""
    getter = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return getter() if getter else None


# MODES: functions that return a global setting of PyTorch. These settings change which kernels a layer runs.
MODES: list[Callable[[], Any]] = [
    precisions, attention_backends, flash_attention, torch.get_default_dtype
] + [
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
        "_get_math_sdp_allow_fp16_bf16_reduction", "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend", "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
        "_get_cudnn_depthwise_kernel", "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only",
        "_get_fa3_sdp_enabled", "_get_sm_carveout_experimental",
    )
    if hasattr(torch._C, name)
]  # fmt: skip


class Environment(NamedTuple):
    """The settings of autocast and of PyTorch's global modes during a call of a layer.

    A graph may be replayed only for calls with the same settings, so the Environment is part of the graph's key.
    """

    autocast: bool
    dtype: torch.dtype
    caches: bool  # whether autocast casts a weight once, and keeps the cast until the end of the outermost context
    modes: tuple[Any, ...]  # the results of MODES

    @classmethod
    def current(cls) -> Environment:
        modes = tuple([mode() for mode in MODES])
        dtype, caches = torch.get_autocast_dtype(DEVICE), torch.is_autocast_cache_enabled()
        return cls(torch.is_autocast_enabled(DEVICE), dtype, caches, modes)

    def entered(self) -> torch.autocast:
        """Return an autocast context with the settings of this Environment.

        With any other settings, Dynamo would recompile the compiled parts of the layer, or give up on them.
        """
        return torch.autocast(DEVICE, self.dtype, self.autocast, self.caches)


class Task(NamedTuple):
    """A layer to capture, with the arguments and the settings of one of its calls."""

    layer: nn.Module
    # ``function`` calls the layer. Its arguments are a checkpoint function or a StaticCache, then x and the tensors.
    function: Callable[[Any, Tensor, list[Tensor]], Any]
    x: Tensor
    tensors: list[Tensor]  # all other tensor arguments
    environment: Environment
    fingerprint: Fingerprint
    is_reentrant: bool  # whether the checkpoint that the graphs replace is a reentrant one
    static_cache: Any  # the StaticCache that the layer writes if the model generates, else None


# A Place says where a module holds a parameter: (the module's dict of parameters, the key in this dict, the parameter).
Place = tuple[dict[str, Any], str, nn.Parameter]


@contextlib.contextmanager
def swapped(places: Sequence[Place], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Replace the parameters at ``places`` by their aliases inside the ``with`` block, and restore them afterwards.

    A parameter that its module no longer holds is skipped.
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
        deque(starmap(setitem, done), 0)  # no loop, because Ctrl-C in a loop would leave aliases in the model


def trained_places(layer: nn.Module) -> list[Place]:
    """Return where the layer's modules hold each parameter that requires a gradient."""
    modules: list[Any] = list(layer.modules())
    return [
        (m._parameters, name, p)
        for m in modules
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad
    ]


def alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return a new leaf tensor that shares the parameter's memory and version counter, and has its Python attributes."""
    # Dynamo would compile the layer again for a plain tensor. ``.data`` would have a version counter of its own.
    alias = nn.Parameter(parameter.detach())
    vars(alias).update(vars(parameter))
    return alias


def aligned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Insert padding after each tensor, so that each tensor starts at a multiple of 16 bytes in the concatenation.

    On a GPU, ``torch._foreach_norm`` would sum an unaligned gradient in a different order.
    """
    padded: list[Tensor] = []
    for tensor in tensors:
        padded += [tensor, tensor.new_zeros(-tensor.numel() % (ALIGNMENT // tensor.element_size()))]
    return padded


class Work:
    """The forward, recompute and backward of one layer, as its two graphs record them.

    The layer reads static buffers in place of its arguments, and aliases in place of its trained parameters.
    """

    keeps = False  # whether the forward's activations stay allocated for the backward

    def __init__(self, task: Task, x: Tensor, buffers: list[Tensor]):
        self.task, self.x, self.buffers = task, x, buffers
        self.trained = trained_places(task.layer)
        self.aliases = [alias_of(parameter) for *_, parameter in self.trained]
        self.leaf = x.detach().requires_grad_(task.x.requires_grad)  # the layer's input, in the memory of x
        self.leaves = [self.leaf, *self.aliases]
        self.used = list(range(len(self.aliases)))  # positions in ``aliases`` of the parameters that receive a gradient
        self.others: tuple[None, ...] | None = None  # if the layer returns a tuple: its results after the first

    def forward(self, recompute: bool = False) -> Tensor:
        """Run the layer under a checkpoint, and return its first result.

        Under a reentrant checkpoint, the forward runs without gradients and the recompute with gradients, as in eager code.
        """
        task = self.task

        def body(function: Callable[..., Any], *arguments: Any) -> Any:
            with swapped(self.trained, self.aliases):
                return function(*arguments)

        def checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
            if task.is_reentrant:
                with torch.set_grad_enabled(recompute):
                    return body(function, *arguments)
            return checkpoint(body, function, *arguments, use_reentrant=False, preserve_rng_state=False)

        with task.environment.entered():
            result = self.first_of(task.function(checkpointed, self.leaf, self.buffers))
        if not result.requires_grad and (recompute or not task.is_reentrant):
            raise Refusal(Reason.GRAPH_ARGUMENTS, "nothing in it requires a gradient")
        return result

    def first_of(self, result: Any) -> Tensor:
        """Return the first item of a layer's result, and store the other items in ``others``.

        Raises:
            Refusal: another item is not None, or the first item is not a floating-point tensor with the shape of x.
        """
        others = None
        if type(result) is tuple and result and all(other is None for other in result[1:]):
            result, others = result[0], result[1:]
        # The dtype may differ: under autocast, a layer with LayerNorm returns fp32 although its input is bf16.
        if not isinstance(result, Tensor) or result.shape != self.x.shape or not result.is_floating_point():
            raise Refusal(Reason.GRAPH_ARGUMENTS, "it does not return one tensor of its input's shape")
        self.others = others
        return result

    def backward(self, y: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Compute the gradients of x and of the layer's parameters from the gradient of y.

        Returns:
            The gradient of x, or None if x requires no gradient, and a list with one flat tensor per dtype. A flat tensor
                contains the gradients of all parameters in ``used`` that have its dtype.
        """
        inputs = [*([self.leaf] if self.leaf.requires_grad else []), *[self.aliases[index] for index in self.used]]
        # Autocast is also off in the thread in which autograd runs an eager backward.
        with torch.autocast(DEVICE, enabled=False):
            found: list[Any] = list(
                torch.autograd.grad(y, inputs, gradient, allow_unused=True, retain_graph=self.keeps)
            )
        dx = found.pop(0) if self.leaf.requires_grad else None
        self.used = [index for index, each in zip(self.used, found, strict=True) if each is not None]
        gradients = [each for each in found if each is not None]
        flat = [[each.reshape(-1) for each in aligned(same)] for same in by_dtype(gradients, self.parameters)]
        return dx, [torch.cat(same) for same in flat]

    def recompute_and_backward(self, y: Tensor, gradient: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Recompute the layer's forward, and return the result of ``backward``."""
        # A non-reentrant checkpoint recomputes inside the backward.
        return self.backward(self.forward(recompute=True) if self.task.is_reentrant else y, gradient)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that receive a gradient."""
        return [self.trained[index][2] for index in self.used]

    def run(self) -> list[Tensor]:
        """Run the layer's forward and backward once.

        Return the leaf tensors that require a gradient but are neither x nor parameters of the layer.
        """
        y = self.forward()
        if self.task.is_reentrant:
            y = self.forward(recompute=True)
        variables = [node.variable for node in ancestors(y) if hasattr(node, "variable")]
        strange = [leaf for leaf in variables if leaf.numel() and not any(leaf is each for each in self.leaves)]
        self.backward(y, torch.ones_like(y))
        return strange


def by_dtype(tensors: Sequence[Any], parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """Group tensors by the dtype of their parameters. Return one list per dtype.

    Args:
        tensors: one tensor for each of ``parameters``, in the same order.
    """
    return [
        [tensor for tensor, parameter in zip(tensors, parameters, strict=True) if parameter.dtype is dtype]
        for dtype in dtypes_of(parameters)
    ]


def dtypes_of(parameters: Sequence[nn.Parameter]) -> list[torch.dtype]:
    return list(dict.fromkeys(parameter.dtype for parameter in parameters))


class GraphedLayer:
    """The two CUDA graphs of one layer: one for the forward, one for the recompute and the backward.

    The graphs serve all calls of the layer with the same key (see ``LayerCall``).
    """

    alive = False  # whether the graphs can be replayed
    differentiable = True
    keeps = False  # whether the first graph's activations stay allocated for the second graph
    replays = 0  # of the forward
    second: Any = None
    work_of: Any = Work

    def __init__(self, recorder: Recorder, task: Task):
        """Warm up the layer and record its graphs.

        Raises:
            Refusal: the layer cannot be recorded.
            torch.OutOfMemoryError: the GPU has no memory for the graphs.
        """
        self.recorder, self.fingerprint, self.is_reentrant = recorder, task.fingerprint, task.is_reentrant
        self.slots = slots_for(task.tensors, recorder.slots)
        with recorder.recording(self.differentiable), cache.pinned(recorder.stream_id) as self.pins:
            with recorder.allocating():
                x = torch.empty_like(task.x)
                x.copy_(task.x.detach())  # otherwise x would keep the autograd graph of this step alive
            self.record(task, x, [slot.buffer for slot in self.slots])
        self.alive = True

    def record(self, task: Task, x: Tensor, buffers: list[Tensor]) -> None:
        recorder, work = self.recorder, self.work_of(task, x, buffers)
        self.warm_up(work)
        y = self.record_forward(work)
        with recorder.allocating():
            gradient = torch.empty_like(y)
        before, launches = recorder.allocated(), Launches()
        self.second, (dx, flat) = recorder.record(lambda y: work.recompute_and_backward(y, gradient), self.first, y)
        self.hits_of_backward = launches.since()
        if (stays := recorder.kept(before, *flat, *([] if dx is None else [dx]))) > 0:
            raise Refusal(Reason.GRAPH_STATE, f"{stays} bytes stay allocated after its backward")
        self.hold(work, y)
        self.places = [work.trained[index] for index in work.used]
        self.parameters, self.dtypes = work.parameters, dtypes_of(work.parameters)
        self.gradient = recorder.borrowed(gradient)
        self.dx, self.flat = None if dx is None else recorder.borrowed(dx), [recorder.borrowed(part) for part in flat]
        shapes = [
            [torch.empty_like(p, device="meta") for p in same] for same in by_dtype(self.parameters, self.parameters)
        ]
        self.shapes = [aligned(same) for same in shapes]

    def hold(self, work: Work, y: Tensor) -> None:
        """Do nothing, because the second graph recomputes the activations. A subclass with ``keeps`` stores them here."""

    def warm_up(self, work: Any) -> None:
        self.is_random = warm_up(self.recorder, work)
        if cache.missed:
            less = 0 if self.keeps else self.recorder.size  # the budget of activations covers the graphs that keep them
            with self.recorder.outside():
                filled = cache.fill(less)
            if filled:  # other kernels may multiply cached weights
                warm_up(self.recorder, work)
        self.pins.clear()

    def record_forward(self, work: Any) -> Tensor:
        """Record the layer's forward as ``self.first``, and return the forward's result.

        Raises:
            Refusal: after the forward, more memory stays allocated than its result takes.
            torch.OutOfMemoryError: the GPU has no memory for the graph.
        """
        before, launches = self.recorder.allocated(), Launches()
        self.first, y = self.recorder.record(work.forward, keeps=self.keeps)
        self.nbytes = self.recorder.kept(before, y)
        self.hits, self.reads = launches.since(), len(self.pins)
        if self.nbytes and not self.keeps:
            raise Refusal(Reason.GRAPH_STATE, f"{self.nbytes} bytes stay allocated after its forward")
        self.x, self.y, self.others = self.recorder.borrowed(work.x), self.recorder.borrowed(y.detach()), work.others
        return y

    # --- replays ---

    def load(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.load(tensor)

    def forward(self, x: Tensor, tensors: list[Tensor]) -> Tensor:
        """Replay the forward graph and return a copy of the layer's first result.

        The caller must hold the recorder's lock.
        """
        self.x.copy_(x)
        self.load(tensors)
        self.first.replay()
        count(self.hits)
        cache.hits += self.reads
        return self.y.clone()

    def backward(self, x: Tensor, tensors: list[Tensor], random_state: Tensor | None, gradient: Tensor) -> list[Any]:
        """Replay the second graph, and return the gradients of x and of ``parameters``.

        The second graph recomputes the layer before the backward, unless ``keeps`` is set.
        The caller must hold the recorder's lock.

        Args:
            random_state: the state of the GPU's random generator before the forward, or None if the layer draws no
                random numbers.
            gradient: the gradient of the layer's first result.
        """
        generator = self.recorder.generator
        if self.keeps:
            self.gradient.copy_(gradient)
        else:
            torch._foreach_copy_([self.x, self.gradient], [x, gradient])
        self.load(tensors)
        if random_state is None or self.keeps:
            self.second.replay()
        else:
            after = generator.get_state()
            try:
                generator.set_state(random_state)
                self.second.replay()
            finally:
                generator.set_state(after)
        count(self.hits_of_backward)
        cache.hits += len(self.pins) - self.reads
        found: list[Any] = [None] * len(self.parameters)
        # Autograd is bypassed, because it would mark the gradients as views, for which ``detach_()`` raises an error.
        with torch._C._AutoDispatchBelowAutograd():
            for dtype, flat, shapes in zip(self.dtypes, self.flat, self.shapes, strict=True):
                parts = iter(torch._C._nn.unflatten_dense_tensors(flat.clone(), shapes)[::2])  # without the padding
                found = [next(parts) if p.dtype is dtype else g for p, g in zip(self.parameters, found, strict=True)]
        return [None if self.dx is None else self.dx.clone(), *found]

    def is_in_place(self) -> bool:
        """Return whether a replay would still read the right memory.

        The layer's tensors must be at the addresses that they had at the capture. The cached weights that the graphs
        read must still be valid.
        """
        return self.alive and self.fingerprint.is_in_place() and self.reads_valid_pins()

    def reads_valid_pins(self) -> bool:
        if not self.pins:
            return True
        with plain_methods():
            return all(entry.of(weight) is not None for entry, weight in self.pins)

    def reset(self) -> None:
        self.alive = False
        self.first.reset()
        if self.second is not None:
            self.second.reset()


class Launches:
    """A snapshot of all hit counters. A hit counter counts the launches of a kernel.

    ``since`` returns each counter that changed after the snapshot, with its number of new launches.
    """

    def __init__(self) -> None:
        self.before = [(counter, counter.hits) for counter in list(counters.hit_counters.values())]

    def since(self) -> list[tuple[HitCounter, int]]:
        return [(counter, counter.hits - hits) for counter, hits in self.before if counter.hits != hits]


def count(hits: list[tuple[HitCounter, int]]) -> None:
    """Add the kernel launches of one replay to the hit counters, because a replay does not run the code that counts."""
    for counter, number in hits:
        counter.hits += number
