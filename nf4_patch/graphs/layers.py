"""Run decoder layers as CUDA graphs.

This module decides which calls of a layer replay a graph. In training, it connects the replays to autograd.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..cache.store import cache
from ..nf4 import runtime
from ..patching import context
from ..patching.counters import warn_once
from ..patching.module_hooks import HOOKS_ON_ALL
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks, Function, replacement_of
from ..patching.switch import switch
from ..patching.target import Target
from .arguments import DROPPED, Unsupported, flattened, replaced, signature
from .capture import Environment, GraphedLayer, Task, alias_of, not_pending, swapped, trained_places
from .fingerprint import Fingerprint
from .generation import GraphedForward
from .input_offload import MINIMUM_NBYTES, UNSLOTH, OffloadedInput, offloads
from .option import WAIT_FOR_PYTHON, GraphsStatus
from .own_code import cells_of, functions_in, hooks_on_activations, is_library
from .pool import Pool, Refusal

SIGHTINGS = 2  # eager calls before the first capture
# At most SHAPES input shapes have graphs. For at most SEEN other input shapes, the calls are counted.
SHAPES, SEEN = 16, 1024
REPLACING = 64  # number of eager calls of a shape before its graphs replace those of another shape
# FOR_GOOD: a layer that was refused for one of these Reasons is never captured for the same shape again.
# A layer that was refused for another Reason is tried again later.
FOR_GOOD = {
    Reason.GRAPH_SYNCHRONIZES,
    Reason.GRAPH_RANDOM,
    Reason.GRAPH_STATE,
    Reason.GRAPH_FAILED,
    Reason.GRAPH_MEMORY,
}
# HARMLESS_HOOKS: Python modules whose hooks a replay may skip.
# transformers' hooks only collect outputs. A call whose outputs are collected runs eagerly anyway.
# bitsandbytes' hooks only open and close the cache of torch.nn.utils.parametrize.
HARMLESS_HOOKS = {"transformers.utils.output_capturing", "bitsandbytes.nn.parametrize"}
# CACHE_ARGUMENTS: names of a layer's argument for its keys and values: up to transformers 5.17, in newer releases, and in a few
# older architectures
CACHE_ARGUMENTS = "past_key_values", "cache", "layer_past"
# CHECKPOINTS: Python modules and names of the checkpoint functions that a replay can replace
UNSLOTHS = UNSLOTH, "unsloth_checkpoint"
CHECKPOINTS = ("torch.utils.checkpoint", "checkpoint"), UNSLOTHS
WRONG_TOKENS = (
    "nf4_patch: generate() in training mode with gradient checkpointing gives wrong tokens, because transformers then ignores "
    "the cache of keys and values: call model.eval() before generate()"
)
WRONG_GRADIENTS = (
    "nf4_patch: a reentrant checkpoint over layers that share keys and values gives wrong gradients: set "
    'gradient_checkpointing_kwargs={"use_reentrant": False}'
)
WARNED = {Reason.GRAPH_SYNCHRONIZES, Reason.GRAPH_FAILED, Reason.GRAPH_MEMORY}


@dataclass
class Shape:
    """The CUDA graphs of all layers for one key.

    A key describes a kind of call: the layout of the arguments, the settings of autocast and of PyTorch's modes, and
    the StaticCache if the model generates.
    """

    graphs: weakref.WeakKeyDictionary[nn.Module, GraphedLayer | Refusal] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    calls: weakref.WeakKeyDictionary[nn.Module, int] = field(default_factory=weakref.WeakKeyDictionary)  # eager calls
    # for each layer: how many eager calls the latest ``postpone`` demanded
    waits: weakref.WeakKeyDictionary[nn.Module, int] = field(default_factory=weakref.WeakKeyDictionary)
    # Empty, or the layer whose capture ran out of memory, with its Refusal. Until this layer is freed, no layer is
    # captured for this shape.
    out_of_memory: weakref.WeakKeyDictionary[nn.Module, Refusal] = field(default_factory=weakref.WeakKeyDictionary)
    used: int = 0  # value of ``Graphs.clock`` at the last call with this shape
    began: int = 0  # value of ``Graphs.clock`` when the counting of ``calls`` began

    def of(self, layer: nn.Module) -> GraphedLayer | Refusal | None:
        refusals = list(self.out_of_memory.values())
        return refusals[0] if refusals else self.graphs.get(layer)

    def captured(self) -> list[GraphedLayer]:
        return [each for each in list(self.graphs.values()) if isinstance(each, GraphedLayer)]

    def reset(self) -> None:
        for graph in self.captured():
            with graph.pool.lock:
                graph.reset()
        self.graphs.clear()
        self.calls.clear()


def is_alive(key: Any, shape: Shape) -> bool:
    """Return whether the model and the StaticCache of a shape still exist.

    The last part of a key is a weak reference to the StaticCache, or None in training.
    """
    return bool(shape.graphs) and (key[-1] is None or key[-1]() is not None)


class Graphs:
    """All CUDA graphs of the process.

    ``drop`` and ``forget`` may be called at any time. If the graphs are dropped between a forward and its backward, the
    backward recomputes the layer eagerly.
    """

    def __init__(self) -> None:
        self.seen: OrderedDict[Any, Shape] = OrderedDict()  # shapes without graphs, by key
        self.shapes: OrderedDict[Any, Shape] = OrderedDict()  # shapes with graphs, by key, the latest used last
        # The pool of each device. The references are weak, because the graphs keep their pool alive.
        self.pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
        self.lock = threading.RLock()  # held during a capture
        # for each trained parameter: the layers that hold it
        self.holders: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.clock = 0  # number of calls so far
        self.replays = 0

    def drop(self) -> None:
        """Reset every graph and return the graphs' memory to the driver."""
        with self.lock:
            shapes, self.shapes = self.shapes, OrderedDict()
            pools = list(self.pools.values())
            self.pools.clear()
            for shape in shapes.values():
                shape.reset()
            for pool in pools:
                with pool.lock:
                    pool.keeper.reset()
        if pools and not runtime.is_capturing():
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Drop every graph, and forget how often shapes without graphs were called."""
        self.drop()
        self.seen.clear()

    def shape_of(self, key: Any) -> Shape:
        self.clock += 1
        shape = self.shapes.get(key)
        if shape is not None:
            self.shapes.move_to_end(key)
            shape.used = self.clock
            return shape
        shape = self.seen[key] = self.seen.pop(key, Shape())
        if len(self.seen) > SEEN:
            self.seen.popitem(last=False)
        return shape

    def calls_before_capture(self, shape: Shape) -> int:
        """Return how many calls of a layer with this shape run eagerly before the layer is captured.

        A capture costs as much as a few eager calls. So the number grows with the number of other shapes that have
        graphs. The number is largest (REPLACING) if the capture would replace the graphs of another shape.
        """
        others = sum(1 for key, other in list(self.shapes.items()) if is_alive(key, other) and other is not shape)
        return SIGHTINGS + others if others < SHAPES else REPLACING

    def is_due(self, shape: Shape, layer: nn.Module) -> bool:
        """Count an eager call of the layer. Return whether the layer has to be captured now.

        If the capture would replace the graphs of another shape, the count starts again whenever the other shape is
        used. Otherwise, if sequences have many lengths, layers would be captured every few steps. Each graph would then
        be replayed too rarely to make up for its capture.
        """
        limit = self.calls_before_capture(shape)
        oldest = next(iter(list(self.shapes.values())), None)  # another thread may drop all of them
        if limit == REPLACING and oldest is not None and oldest.used > shape.began:
            shape.calls.clear()
            shape.began = self.clock
        calls = shape.calls[layer] = shape.calls.get(layer, 0) + 1
        return calls > limit

    def postpone(self, shape: Shape, layer: nn.Module) -> None:
        """Drop the layer's graphs of this shape, and run the layer eagerly for a number of calls.

        This method is called if the layer has changed since its capture, or cannot be captured at present. The number
        of eager calls doubles each time, because the layer may go on changing at every step.
        """
        wait = shape.waits[layer] = 2 * shape.waits.get(layer, 1)
        shape.calls[layer] = self.calls_before_capture(shape) - wait
        shape.graphs.pop(layer, None)  # another thread may drop all graphs

    def claim(self, layer: nn.Module) -> None:
        """Note that the layer holds its trained parameters. Drop the graphs of other layers that hold one of them."""
        with self.lock:
            for _, _, parameter in trained_places(layer):
                holders = self.holders.setdefault(parameter, weakref.WeakSet())
                if layer in holders:
                    continue
                holders.add(layer)
                for shape in list(self.shapes.values()) if len(holders) > 1 else ():
                    for other in holders:
                        shape.graphs.pop(other, None)

    def is_shared(self, layer: nn.Module) -> bool:
        """Return whether the layer holds a trained parameter twice, or another layer holds it too.

        Eager code adds each use to the running sum of the gradients. A replay returns the sum of its own uses, which rounds
        differently.
        """
        parameters = [parameter for _, _, parameter in trained_places(layer)]
        if len({*map(id, parameters)}) < len(parameters):
            return True
        others = {other for p in parameters for other in self.holders.get(p, ()) if other is not layer}
        held = {*map(id, parameters)}
        return any(id(p) in held for other in others for p in other.parameters())

    def make_room(self, key: Any) -> None:
        """Prepare the first capture for a key: move its Shape from ``seen`` to ``shapes``.

        If too many shapes have graphs, reset the shape that has not been used for the longest time.
        """
        if key in self.shapes:
            return
        shape = self.seen.pop(key, Shape())  # a new Shape if another thread has just called ``forget``
        for other in [other for other, shape in self.shapes.items() if not is_alive(other, shape)]:
            self.shapes.pop(other).reset()
        while len(self.shapes) >= SHAPES:
            self.shapes.popitem(last=False)[1].reset()
        self.shapes[key] = shape
        if key[-1] is None:
            # PyTorch keeps the memory that eager calls used. The graphs can use this memory only after it was freed.
            torch.cuda.empty_cache()

    def snapshot(self, mode: str) -> GraphsStatus:
        shapes = [shape.captured() for shape in list(self.shapes.values())]
        return GraphsStatus(
            mode=mode,
            layers=len({id(graph.fingerprint.layer()) for shape in shapes for graph in shape}),
            shapes=sum(map(bool, shapes)),
            replays=self.replays,
        )


graphs = Graphs()


def follow(config: Any) -> None:
    if switch.value("graphs") == "off":
        graphs.forget()


switch.follow(follow)


class Call:
    """One call of a layer that has graphs. It holds the data that the forward passes on to the backward."""

    def __init__(
        self, graph: GraphedLayer, environment: Environment, tensors: list[Tensor], again: Callable[[Tensor], Any],
        offloads: bool, fallbacks: Fallbacks,
    ):  # fmt: skip
        self.graph, self.environment, self.tensors, self.again = graph, environment, tensors, again
        self.offloads = offloads  # whether the layer's input waits for the backward in host memory
        self.fallbacks = fallbacks
        graph.pending = weakref.ref(self)
        self.random_state = graph.pool.generator.get_state() if graph.is_random else None

    def gradients(self, x: Tensor, gradient: Tensor) -> list[Any]:
        """Return the gradients of x and of the graph's parameters, given the gradient of the layer's result.

        Replay the second graph (recompute and backward) if possible. Otherwise recompute the layer eagerly.
        """
        graph, pool = self.graph, self.graph.pool
        graph.pending = not_pending
        now = Environment.current()
        # The backward was captured without autocast.
        may_replay = not (torch.is_grad_enabled() or now.autocast) and now.modes == self.environment.modes
        if may_replay and stream_of(pool.device) == pool.replay_stream and not is_intercepted(gradient):
            with pool.lock:
                # A reentrant checkpoint recomputes the layer as it is now, any other one only the tensors of the forward.
                unchanged = not graph.is_reentrant or graph.fingerprint.holds()
                if unchanged and graph.is_in_place():
                    return graph.backward(x, self.tensors, self.random_state, gradient)
        self.fallbacks.count(Reason.GRAPH_BACKWARD)
        return self.recomputed(x, gradient)

    def recomputed(self, x: Tensor, gradient: Tensor) -> list[Any]:
        """Recompute the layer eagerly. Return the gradients of x and of the graph's parameters.

        Under ``create_graph`` these gradients are differentiable.
        """
        differentiable, generator = torch.is_grad_enabled(), self.graph.pool.generator
        # The layer reads aliases. If it read the parameters, hooks on the parameters' gradients would run twice.
        aliases = [p.view_as(p) if differentiable else alias_of(p) for p in self.graph.parameters]
        input = x if differentiable else x.detach().requires_grad_(x.requires_grad)
        after = generator.get_state()
        try:
            if self.random_state is not None:
                generator.set_state(self.random_state)
            with torch.enable_grad(), self.environment.entered(), swapped(self.graph.places, aliases):
                y = self.again(input)
        finally:
            if self.random_state is not None:
                generator.set_state(after)
        y = y[0] if isinstance(y, tuple) else y
        inputs = [*([input] if x.requires_grad else []), *aliases]
        found = torch.autograd.grad(y, inputs, gradient, allow_unused=True, create_graph=differentiable)
        return [*found] if x.requires_grad else [None, *found]


class Replay(context.PlainFunction):
    """The autograd function that replays a layer's graphs, in its forward and in its backward.

    The parameters are inputs of the function, so that autograd accumulates their gradients.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, graph = call, call.graph
        ctx.offloaded = OffloadedInput(x) if call.offloads and x.nbytes > MINIMUM_NBYTES else None
        if ctx.offloaded is None:
            ctx.save_for_backward(x)  # hooks on saved tensors, such as activation offloading, then apply to x
        with graph.pool.lock:
            y = graph.forward(x, call.tensors)
        if ctx.offloaded is not None:
            ctx.offloaded.wait()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        call = ctx.call
        previous, _ = ctx.next_functions[0]  # the autograd node that computed x: usually the previous layer's Replay
        is_first = type(previous) is not type(ctx)
        if ctx.offloaded is None:
            (x,) = ctx.saved_tensors
            found = call.gradients(x, gradient)
        else:
            x = ctx.offloaded.load().requires_grad_()
            if not is_first and previous.offloaded is not None:
                previous.offloaded.prefetch()
            with torch.no_grad():  # Like Unsloth's checkpoint, this backward has no second derivatives.
                found = call.gradients(x, gradient)
        # The step ends here. Before the next one, masks may be written without PyTorch's knowledge, for example by a broadcast.
        if is_first:
            for slot in call.graph.slots:
                slot.forget()
        return (None, *found)


def is_intercepted(gradient: Tensor) -> bool:
    """Return whether a mode or a transform sees every operation of a backward, for example under ``is_grads_batched``."""
    return context.watched(gradient) is not None


def is_in_checkpoint() -> bool:
    """Return whether the forward runs inside a non-reentrant checkpoint."""
    hooks = context.saved_tensors_hooks(False)
    return type(hooks) is tuple and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def stream_of(device: int) -> int:
    return int(runtime.current_stream(device))


def replay(graph: GraphedLayer, call: Call, x: Tensor) -> Any:
    with graph.pool.lock:
        y = Replay.apply(call, x, *graph.parameters) if graph.alive else None
    if y is None:  # another thread has just dropped all graphs
        return call.again(x)
    graphs.replays += 1
    return y if graph.others is None else (y, *graph.others)


def self_saves_on_host(layer: Any) -> bool:
    return bool(checkpoint_options(layer._gradient_checkpointing_func)["saves_on_host"])


def replay_on_host(graph: GraphedLayer, call: Call, x: Tensor) -> Any:
    """Replay a layer whose input transformers' option ``offload`` keeps in host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return replay(graph, call, x)


def step(graph: GraphedForward, x: Tensor, tensors: list[Tensor], again: Callable[[], Any]) -> Any:
    """Replay a layer that generates."""
    with graph.pool.lock:
        y = graph.forward(x, tensors) if graph.alive else None
    if y is None:  # another thread has just dropped all graphs
        return again()
    graphs.replays += 1
    return y if graph.others is None else (y, *graph.others)


def is_reentrant(layer: Any, static_cache: Any) -> bool:
    """Return whether the layer trains under a reentrant checkpoint."""
    return static_cache is None and bool(checkpoint_options(layer._gradient_checkpointing_func)["use_reentrant"])


def checkpoint_options(function: Any) -> dict[str, Any]:
    """Return the keyword arguments that the layer passes to its checkpoint function.

    Return an empty dict if a replay cannot replace the layer's checkpoint function.
    """
    function = function if type(function) is partial else partial(function)
    name = getattr(function.func, "__module__", ""), getattr(function.func, "__name__", "")
    # A wrapper made by functools.wraps has the name of the function that it wraps. PyTorch's and Unsloth's are such wrappers too.
    module = getattr(function.func, "__globals__", {}).get("__name__")
    options = {"use_reentrant": None, "preserve_rng_state": True, "saves_on_host": False, **function.keywords}
    # These two change no result. A check of the recompute can only raise an error, and its end only saves time.
    for option, values in UNIMPORTANT.items():
        if options.pop(option, values[0]) not in values:
            return {}
    if len(options) != 3 or function.args:
        return {}
    if is_offloading(function.func):
        inner = checkpoint_options(partial(function.func.__globals__["checkpoint"], **function.keywords))
        return {**inner, "saves_on_host": True} if inner and not inner["saves_on_host"] else {}
    if is_setting(function.func):
        inner, value = cells_of(function.func)
        return checkpoint_options(partial(inner, **{**function.keywords, "use_reentrant": value}))
    # PyTorch takes None as True. Unsloth's checkpoint is always reentrant.
    options["use_reentrant"] = options["use_reentrant"] is not False or name == UNSLOTHS
    return options if name in CHECKPOINTS and module in ("torch._compile", name[0]) else {}


# UNIMPORTANT: options of PyTorch's checkpoint and the values that a replay can replace, the default first
UNIMPORTANT = {"determinism_check": ("default", "none"), "early_stop": (True, False)}


def is_offloading(function: Any) -> bool:
    """Return whether this is the checkpoint function of transformers' option ``offload``, a local function since 5.17."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    enable = getattr(getattr(models, "PreTrainedModel", None), "gradient_checkpointing_enable", None)
    code = getattr(function, "__code__", None)
    return code is not None and any(code in e.__code__.co_consts for e in functions_in(enable) if is_library(e))


def setting(checkpoint: Function, value: Any) -> Function:
    def wrapper(*args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
        return checkpoint(*args, use_reentrant=value, **kwargs)

    return wrapper


def is_setting(function: Any) -> bool:
    """Return whether a wrapper only sets ``use_reentrant``: its code is that of ``setting``. ms-swift has such a wrapper."""
    code, ours = getattr(function, "__code__", None), setting(print, None).__code__
    if code is None or attributes_of_code(code) != attributes_of_code(ours):
        return False
    inner, value = cells_of(function)
    return callable(inner) and (value is None or type(value) is bool)


attributes_of_code = attrgetter("co_code", "co_consts", "co_argcount", "co_kwonlyargcount", "co_flags", "co_names")


def static_cache_of(layer: Any, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Return the StaticCache that this call of a layer writes, and the name of the argument that holds it.

    Return ("", None) if the call trains or has another cache.
    """
    nothing = "", None
    name = next((name for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)
    if name is None or torch.is_grad_enabled() or (layer.gradient_checkpointing and layer.training):
        return nothing
    caches: Any = sys.modules["transformers.cache_utils"]
    static_cache = arguments[name]
    if type(static_cache) is not caches.StaticCache or getattr(static_cache, "offloading", False):
        return nothing
    # StaticLayer exists since transformers 4.54. Its subclasses are not supported, because they keep state on the host.
    kind = getattr(caches, "StaticLayer", None)
    layers = getattr(static_cache, "layers", (None,))
    return (name, static_cache) if all(type(each) is kind for each in layers) else nothing


def why_not(layer: Any, args: tuple[Any, ...], generates: bool) -> Reason | None:
    """Return the Reason why this call of a decoder layer has to run eagerly, or None if a graph may replace it.

    Args:
        generates: whether the call writes a StaticCache.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if not generates:
        if not (layer.training and torch.is_grad_enabled()):
            return Reason.GRAPH_NOT_TRAINING
        if not layer.gradient_checkpointing:
            return Reason.GRAPH_NOT_CHECKPOINTED
        if not (options := checkpoint_options(layer._gradient_checkpointing_func)):
            return Reason.GRAPH_CHECKPOINT
    if not args or not isinstance(args[0], Tensor):
        return Reason.GRAPH_ARGUMENTS
    if not runtime.runs_on(args[0]):
        return Reason.NOT_CUDA
    # A reentrant checkpoint gives no gradients if its input requires none.
    if not args[0].requires_grad and options["use_reentrant"]:
        return Reason.GRAPH_ARGUMENTS
    if args[0].dtype is torch.float32 and offloads(options["use_reentrant"]):  # Unsloth rounds it to bf16
        return Reason.GRAPH_CHECKPOINT
    if (watcher := context.watched()) is not None:
        return watcher
    collector: Any = sys.modules.get("transformers.utils.output_capturing")
    if any(HOOKS_ON_ALL) or (collector is not None and collector._active_collector.get()):
        return Reason.GRAPH_HOOKED
    if (
        context.backward_in_progress() != -1 or torch.is_anomaly_enabled() or runtime.is_capturing()
        or is_in_checkpoint() or switch.gates["offload"].on
    ):  # fmt: skip
        return Reason.GRAPH_MODE
    return None


def is_slow(device: int) -> bool:
    """Return whether the profile "fast" leaves this GPU without graphs, because it does not wait for Python."""
    config: Any = switch.config
    return device >= 0 and runtime.capability_of(device) < WAIT_FOR_PYTHON and "graphs" not in config.typed


def warn_of_wrong_results(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn once of two settings with which transformers itself computes wrong results. Called before layers run eagerly."""
    if not (layer.gradient_checkpointing and layer.training):
        return
    if not torch.is_grad_enabled():
        drops_cache = not getattr(layer, "_can_checkpoint_with_cache", False)
        cached = any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS)
        if drops_cache and cached and args and isinstance(args[0], Tensor) and args[0].shape[1:2] == (1,):
            warn_once(WRONG_TOKENS)
        return
    shares = getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False) and kwargs.get("shared_kv_states")
    if shares and checkpoint_options(layer._gradient_checkpointing_func).get("use_reentrant"):
        warn_once(WRONG_GRADIENTS)


def is_hooked(layer: nn.Module, fingerprint: Fingerprint) -> bool:
    """Return whether calls of the layer run code that a replay would skip: hooks, wrappers or compiled modules."""
    found = [hook for hooks in fingerprint.hooks for hook in hooks.values()]
    if any(getattr(hook, "__module__", "") not in HARMLESS_HOOKS for hook in found):
        return True
    every = [layer, *fingerprint.modules]
    return any("_hf_hook" in vars(m) or vars(m).get("_compiled_call_impl") is not None for m in every)


def is_sharded(layer: nn.Module, fingerprint: Fingerprint) -> bool:
    """Return whether the layer's parameters are sharded, or come from FSDP, which gathers them anew for each use."""
    if any("_is_fsdp_managed_module" in vars(module) for module in [layer, *fingerprint.modules]):
        return True
    return any(
        hasattr(tensor, "ds_id") or type(tensor).__torch_dispatch__ is not context.own_dispatch
        for tensor in fingerprint.tensors
    )


def noticing_hooks(function: Function, watching: list[bool]) -> Function:
    """Make a Task's function raise a Refusal if the layer puts a hook on an activation, which a replay would not run."""

    def noticed(*arguments: Any) -> Any:
        if not watching or runtime.is_capturing():
            return function(*arguments)
        with hooks_on_activations() as found:
            result = function(*arguments)
        if found:
            raise Refusal(Reason.GRAPH_HOOKED, f"the layer calls {found[0]} on an activation")
        return result

    return noticed


def captured(layer: Any, key: Any, task_of: Callable[[Fingerprint], Task]) -> GraphedLayer | Refusal:
    """Capture the layer for a key. Return its graphs, or a Refusal that says why the layer cannot be captured.

    Args:
        task_of: makes the Task of the capture from the layer's fingerprint.
    """
    fingerprint = Fingerprint(layer)
    if detail := fingerprint.code.foreign():
        return Refusal(Reason.GRAPH_OWN_CODE, detail)
    if graphs.is_shared(layer):
        return Refusal(Reason.GRAPH_REUSED, "")
    if is_sharded(layer, fingerprint):
        return Refusal(Reason.GRAPH_SHARDED, "")
    if is_hooked(layer, fingerprint):
        return Refusal(Reason.GRAPH_HOOKED, "")
    try:
        task = task_of(fingerprint)
    except Refusal as refusal:
        return refusal
    if sys.getprofile() is not None:
        return Refusal(Reason.GRAPH_MODE, "a Python profiler is active, which a capture would interrupt")
    watching = [True]
    task = task._replace(function=noticing_hooks(task.function, watching))
    device, length, trains = task.x.get_device(), task.x.numel(), task.static_cache is None
    with graphs.lock:
        while True:
            graphs.make_room(key)
            pool = graphs.pools.get(device)
            try:
                if pool is None:
                    pool = graphs.pools[device] = Pool(device)
                # The graphs of a decode step take little memory.
                with pool.lock, pool.leaving_enough() if trains else contextlib.nullcontext():
                    graph = (GraphedLayer if trains else GraphedForward)(pool, task)
                watching.clear()
                pool.longest = max(pool.longest, length)
                if (
                    trains
                    and graph.is_random
                    and not checkpoint_options(layer._gradient_checkpointing_func)["preserve_rng_state"]
                ):
                    graph.reset()
                    return Refusal(Reason.GRAPH_CHECKPOINT, "it draws random numbers, and preserve_rng_state is False")
                return graph
            except Refusal as refusal:
                return refusal
            except torch.cuda.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            finally:
                if pool is not None and pool.broken:
                    graphs.drop()
            graphs.drop()
            # Without the graphs of shorter inputs, the memory may be enough. Those are captured again later, and can use
            # the memory of the longer input.
            if pool is None or not 0 < pool.longest < length:
                return Refusal(Reason.GRAPH_MEMORY, reason)


def graphed(target: Target, original: Function) -> Function:
    """Make the replacement for ``transformers.modeling_layers.GradientCheckpointingLayer.__call__``.

    The replacement runs a decoder layer as CUDA graphs where it can. Otherwise the original runs.
    """
    fallbacks = Fallbacks(target.name)

    def refused(refusal: Refusal) -> Reason:
        fallbacks.details[refusal.reason] = refusal.detail
        if refusal.reason in WARNED:
            warn_once(f"nf4_patch: a decoder layer runs without CUDA graphs ({refusal.reason.name}): {refusal.detail}")
        return refusal.reason

    def attempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache_name, static_cache = static_cache_of(self, kwargs)
        reason = why_not(self, args, static_cache is not None)
        if reason is not None:
            warn_of_wrong_results(self, args, kwargs)
            return reason
        tensors: list[Tensor] = []
        environment, x = Environment.current(), args[0]
        try:
            options = tuple(switch.config.options.items())  # type: ignore[union-attr]
            plain = kwargs if static_cache is None else {**kwargs, cache_name: None}
            layouts = signature(args, tensors), signature(plain, tensors)
            # In generation, requires_grad of x is ignored: TRL makes the embeddings require a gradient there too.
            reentrant = is_reentrant(self, static_cache)
            mode = x.requires_grad and static_cache is None, reentrant
            key = (*layouts, environment, mode, options, static_cache and weakref.ref(static_cache))
        except Unsupported as error:
            warn_of_wrong_results(self, args, kwargs)
            return refused(Refusal(Reason.GRAPH_ARGUMENTS, str(error)))
        pool = graphs.pools.get(x.get_device())
        if pool is not None and stream_of(pool.device) != pool.replay_stream:
            return Reason.GRAPH_STREAM
        shape = graphs.shape_of(key)
        graph = shape.of(self)
        if graph is None:
            if is_slow(x.get_device()):
                return Reason.GRAPH_SLOW_GPU
            graphs.claim(self)
            if not graphs.is_due(shape, self):
                return Reason.GRAPH_NEW_SHAPE
            try:
                graph = captured(
                    self, key, lambda f: task_of(self, args, plain, tensors, environment, f, cache_name, static_cache)
                )
            except Exception as error:  # the error is recorded, so that later calls do not try again
                graphs.shape_of(key).graphs[self] = Refusal(Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
                raise
            shape = graphs.shape_of(key)  # this is a new Shape if the capture dropped all graphs
            if isinstance(graph, Refusal) and graph.reason is Reason.GRAPH_MEMORY:
                shape.out_of_memory[self] = graph
            shape.graphs[self] = graph
        if isinstance(graph, Refusal):
            if graph.reason not in FOR_GOOD:
                graphs.postpone(shape, self)
            return refused(graph)
        if cache.auto is not None:
            cache.auto.observe(x)  # before the check, because this call may free cached weights that the graph reads
        if not (graph.fingerprint.holds() and graph.is_in_place()):
            graphs.postpone(shape, self)
            return Reason.GRAPH_CHANGED
        if static_cache is not None:
            return step, graph, x, tensors[1:], partial(original, self, *args, **kwargs)
        # The call must not keep x alive, because x may be offloaded.
        repeat = partial(again, self, args[1:], kwargs)
        if reentrant and graph.pending() is not None:
            return Reason.GRAPH_REUSED
        call = Call(graph, environment, tensors[1:], repeat, offloads(reentrant), fallbacks)
        if not self_saves_on_host(self):
            return replay, graph, call, x
        return replay_on_host, graph, call, x

    def task_of(
        self: Any, args: Any, kwargs: Any, tensors: list[Tensor], environment: Environment, fingerprint: Fingerprint,
        cache_name: str, static_cache: Any,
    ) -> Task:  # fmt: skip
        if DROPPED in kwargs and fingerprint.code.names(DROPPED):
            raise Refusal(Reason.GRAPH_ARGUMENTS, f"the layer reads {DROPPED}, which changes at every step")

        def function(given: Any, x: Tensor, buffers: list[Tensor]) -> Any:
            static = {id(tensor): buffer for tensor, buffer in zip(tensors, [x, *buffers], strict=True)}
            arguments = replaced((args, kwargs), lambda tensor: static[id(tensor)])
            (positional, keywords), before = arguments, flattened(arguments)
            if generates:
                result = original(self, *positional, **{**keywords, cache_name: given})
            else:
                result = through(self, given, positional, keywords)
            # In Gemma 4, for example, layers write into a dict that later layers read.
            if flattened(arguments) != before:
                raise Refusal(Reason.GRAPH_STATE, "a call writes into a list or dict among its arguments")
            return result

        generates, reentrant = static_cache is not None, is_reentrant(self, static_cache)
        return Task(self, function, tensors[0], tensors[1:], environment, fingerprint, reentrant, static_cache)

    def through(self: Any, function: Function, args: Any, kwargs: Any) -> Any:
        """Call the layer as transformers does, but with ``function`` as the layer's checkpoint function."""
        before = self._gradient_checkpointing_func
        try:
            self._gradient_checkpointing_func = function
            return original(self, *args, **kwargs)
        finally:
            self._gradient_checkpointing_func = before

    def again(self: Any, args: Any, kwargs: Any, x: Tensor) -> Any:
        return through(self, lambda function, *arguments: function(*arguments), (x, *args), kwargs)

    return replacement_of(target, original, fallbacks, attempt)
