"""Run decoder layers as CUDA graphs.

This module decides which calls of a layer replay a graph. In training, it connects the replays to autograd.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import layers as keeping
from ..activations.layers import FUNCTION, activations
from ..cache.store import cache
from ..memory.spare import spare
from ..memory.waits import Waits
from ..nf4 import runtime
from ..patching import context
from ..patching.checkpoint import Checkpoint, checkpoint_of
from ..patching.counters import warn_once
from ..patching.module_hooks import HOOKS_ON_ALL
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks, Function, replacement_of
from ..patching.switch import switch
from ..patching.target import Target
from ..patching.targets import MODULES
from .arguments import DROPPED, Unsupported, flattened, replaced, signature
from .capture import Environment, GraphedLayer, Task, alias_of, not_pending, swapped
from .fingerprint import Fingerprint
from .generation import GraphedForward
from .input_offload import MINIMUM_NBYTES, OffloadedInput
from .kept import Keeper, KeptLayer, Token, kept_by
from .option import WAIT_FOR_PYTHON
from .own_code import hooks_on_activations
from .recorder import Recorder, give_back
from .refusal import Refusal, Refused
from .shapes import RECORDED_AT, Graphs, is_due
from .threads import others_may_use_gpu

# FOR_GOOD: a layer that was refused for one of these Reasons is not recorded for the same shape again, until ``release()``.
# A layer that was refused for another Reason is tried again later.
FOR_GOOD = {
    Reason.GRAPH_SYNCHRONIZES,
    Reason.GRAPH_RANDOM,
    Reason.GRAPH_STATE,
    Reason.GRAPH_FAILED,
    Reason.GRAPH_MEMORY,
}
STATIC_CACHES, COLLECTED, LAYERS = (MODULES[name] for name in ("static caches", "collected outputs", "decoder layers"))
# HARMLESS_HOOKS: Python modules whose hooks a replay may skip.
# transformers' hooks only collect outputs. A call whose outputs are collected runs eagerly anyway.
# bitsandbytes' hooks only open and close the cache of torch.nn.utils.parametrize.
HARMLESS_HOOKS = {COLLECTED, MODULES["4-bit parametrization"]}
# CACHE_ARGUMENTS: names of a layer's argument for its keys and values: up to transformers 5.17, in newer releases, and in a few
# older architectures
CACHE_ARGUMENTS = "past_key_values", "cache", "layer_past"
WRONG_TOKENS = (
    "nf4_patch: generate() in training mode with gradient checkpointing gives wrong tokens, because transformers then ignores "
    "the cache of keys and values: call model.eval() before generate()"
)
WRONG_GRADIENTS = (
    "nf4_patch: a reentrant checkpoint over layers that share keys and values gives wrong gradients: set "
    'gradient_checkpointing_kwargs={"use_reentrant": False}'
)
WARNED = {Reason.GRAPH_SYNCHRONIZES, Reason.GRAPH_FAILED, Reason.GRAPH_MEMORY}


graphs = Graphs()


def follow(config: Any) -> None:
    activations.give_back = graphs.drop
    if switch.value("graphs") == "off":
        graphs.forget()
    elif switch.value("activations") == "off" and graphs.kept:
        graphs.drop()


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
        self.versions = [parameter._version for parameter in graph.parameters] if graph.keeps else []
        self.random_state = graph.recorder.generator.get_state() if graph.is_random else None

    def gradients(self, x: Tensor, gradient: Tensor) -> list[Any]:
        """Return the gradients of x and of the graph's parameters, given the gradient of the layer's result.

        Replay the second graph (recompute and backward) if possible. Otherwise recompute the layer eagerly.
        """
        graph, recorder = self.graph, self.graph.recorder
        graph.pending = not_pending
        now = Environment.current()
        # The backward was captured without autocast.
        may_replay = not (torch.is_grad_enabled() or now.autocast) and now.modes == self.environment.modes
        if may_replay and stream_of(recorder.device) == recorder.replay_stream and not is_intercepted(gradient):
            with recorder.lock:
                # A reentrant checkpoint recomputes the layer as it is now, any other one only the tensors of the forward.
                unchanged = not graph.is_reentrant or graph.fingerprint.holds()
                if unchanged and (self.may_use_kept(graph) if isinstance(graph, KeptLayer) else graph.is_in_place()):
                    return graph.backward(x, self.tensors, self.random_state, gradient)
        self.fallbacks.count(Reason.GRAPH_BACKWARD)
        if graph.keeps:  # x is the memory of the graph, which the next forward writes
            copied = x.clone()
            x = copied if torch.is_grad_enabled() else copied.requires_grad_(x.requires_grad)
        return self.recomputed(x, gradient)

    def may_use_kept(self, graph: KeptLayer) -> bool:
        """Return whether the kept activations are those of the layer's parameters as they are now.

        Raises:
            RuntimeError: the parameters were changed since the forward of a layer that is not checkpointed.
        """
        same = self.versions == [parameter._version for parameter in graph.parameters]
        layer: Any = graph.fingerprint.layer()
        if not same and layer is not None and not layer.gradient_checkpointing:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a trained "
                "parameter of a decoder layer, between its forward and its backward"
            )
        return same and graph.may_backward()

    def recomputed(self, x: Tensor, gradient: Tensor) -> list[Any]:
        """Recompute the layer eagerly. Return the gradients of x and of the graph's parameters.

        Under ``create_graph`` these gradients are differentiable.
        """
        differentiable, generator = torch.is_grad_enabled(), self.graph.recorder.generator
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
        with graph.recorder.lock:
            y = graph.forward(x, call.tensors)
        if ctx.offloaded is not None:
            ctx.offloaded.wait()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # raises PyTorch's own error in a second backward without ``retain_graph``
        call: Call = ctx.call
        previous, _ = ctx.next_functions[0]  # the autograd node that computed x: usually the previous layer's Replay
        is_first = type(previous) is not type(ctx)
        if ctx.offloaded is None:
            found = call.gradients(saved[0], gradient)
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
        if not keeps_graph():  # Autograd frees the saved tensors now. A loss that is kept must not keep the rest.
            ctx.call = ctx.offloaded = None
        return (None, *found)


# keeps_graph returns whether the current backward has ``retain_graph``.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


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
    with graph.recorder.lock:
        y = Replay.apply(call, x, *graph.parameters) if graph.alive else None
    if y is None:  # another thread has just dropped all graphs
        return call.again(x)
    graphs.replays += 1
    return y if graph.others is None else (y, *graph.others)


def replay_kept(graph: KeptLayer, call: Call, x: Tensor) -> Any:
    token = Token()
    with graph.recorder.lock:
        y = None
        if graph.alive and graph.may_forward():
            graph.began(token)
            with kept_by(token, graph):
                y = Replay.apply(call, x, *graph.parameters)
    if y is None:  # another thread has just dropped all graphs
        return call.again(x)
    graphs.replays += 1
    return y if graph.others is None else (y, *graph.others)


def replay_on_host(graph: GraphedLayer, call: Call, x: Tensor) -> Any:
    """Replay a layer whose input transformers' option ``offload`` keeps in host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return replay(graph, call, x)


def step(graph: GraphedForward, x: Tensor, tensors: list[Tensor], again: Callable[[], Any]) -> Any:
    """Replay a layer that generates."""
    with graph.recorder.lock:
        y = graph.forward(x, tensors) if graph.alive else None
    if y is None:  # another thread has just dropped all graphs
        return again()
    graphs.replays += 1
    return y if graph.others is None else (y, *graph.others)


def checkpoint_for(layer: Any, static_cache: Any = None) -> Checkpoint | None:
    """Return how the layer is checkpointed in this call: not at all if it generates or is set so, None if in an unknown way."""
    if static_cache is not None or not layer.gradient_checkpointing:
        return NOT_CHECKPOINTED
    return checkpoint_of(layer._gradient_checkpointing_func)


NOT_CHECKPOINTED = Checkpoint(reentrant=False, offloads=False)


def is_checkpointed_without_gradients(layer: Any) -> bool:
    """Return whether a call without gradients runs in a checkpoint, for which transformers drops the cache of keys and values.

    Older releases checkpoint every call in training mode. Newer ones checkpoint the layer's ``forward``, and only with gradients.
    """
    kind: Any = sys.modules[LAYERS].GradientCheckpointingLayer
    return layer.gradient_checkpointing and layer.training and "__init_subclass__" not in vars(kind)


def static_cache_of(layer: Any, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Return the StaticCache that this call of a layer writes, and the name of the argument that holds it.

    Return ("", None) if the call trains or has another cache.
    """
    nothing = "", None
    name = next((name for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)
    if name is None or torch.is_grad_enabled() or is_checkpointed_without_gradients(layer):
        return nothing
    caches: Any = sys.modules[STATIC_CACHES]
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
    checkpoint: Checkpoint | None = NOT_CHECKPOINTED
    if not generates:
        if not (layer.training and torch.is_grad_enabled()):
            return Reason.GRAPH_NOT_TRAINING
        if not layer.gradient_checkpointing:
            if activations.mode == "off":
                return Reason.GRAPH_NOT_CHECKPOINTED
            if context.saved_tensors_hooks(False) is not None:
                return Reason.GRAPH_MODE
        else:
            checkpoint = checkpoint_for(layer)
    if checkpoint is None:
        return Reason.GRAPH_CHECKPOINT
    if not args or not isinstance(args[0], Tensor):
        return Reason.GRAPH_ARGUMENTS
    if not runtime.runs_on(args[0]):
        return Reason.NOT_CUDA
    # A reentrant checkpoint gives no gradients if its input requires none.
    if not args[0].requires_grad and checkpoint.reentrant:
        return Reason.GRAPH_ARGUMENTS
    if args[0].dtype is torch.float32 and checkpoint.offloads:  # Unsloth rounds it to bf16
        return Reason.GRAPH_CHECKPOINT
    if (watcher := context.watched()) is not None:
        return watcher
    collector: Any = sys.modules.get(COLLECTED)
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
        drops_cache = is_checkpointed_without_gradients(layer) and not getattr(
            layer, "_can_checkpoint_with_cache", False
        )
        cached = any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS)
        if drops_cache and cached and args and isinstance(args[0], Tensor) and args[0].shape[1:2] == (1,):
            warn_once(WRONG_TOKENS)
        return
    shares = getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False) and kwargs.get("shared_kv_states")
    checkpoint = checkpoint_for(layer) if shares else None
    if checkpoint is not None and checkpoint.reentrant:
        warn_once(WRONG_GRADIENTS)


def is_hooked(layer: nn.Module, fingerprint: Fingerprint, harmless: Function = lambda hook: False) -> bool:
    """Return whether calls of the layer run code that a replay would skip: hooks, wrappers or compiled modules."""
    found = [hook for hooks in fingerprint.hooks for hook in hooks.values() if not harmless(hook)]
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


def why_not_kept(layer: Any, x: Tensor, args: Any, kwargs: Any) -> Reason | None:
    """Return the Reason why the layer has to recompute in this call, or None if its activations may be kept."""
    if activations.mode == "auto" and spare.waits:
        return Reason.ACTIVATIONS_WAITING
    if not layer.gradient_checkpointing:
        return None
    record = activations.record_of(layer)
    why = keeping.why_not(x, args, kwargs, checkpoint_of(vars(layer).get(FUNCTION)), record)
    if why is None and record.estimate(keeping.InputSize.of(x)) is None:
        return Reason.ACTIVATIONS_WAITING
    return why


def is_measured(layer: Any, x: Tensor) -> bool:
    """Return whether it is known how much memory the layer's activations take. Eager calls measure it."""
    if not layer.gradient_checkpointing or spare.why is Waits.MARGIN:
        return True  # nothing will be kept
    return activations.record_of(layer).estimate(keeping.InputSize.of(x)) is not None


def has_room_to_keep(layer: Any, x: Tensor, keeper: Keeper | None) -> bool:
    if not layer.gradient_checkpointing:
        return True  # training needs the memory without graphs, too
    held = activations.record_of(layer).estimate(keeping.InputSize.of(x)) or 0
    if keeper is None:
        return activations.taken.get(x.get_device(), 0) + 2 * held <= activations.budget
    return keeper.has_room(held)


def captured(
    layer: Any, key: Any, task_of: Callable[[Fingerprint], Task], keeps: bool = False
) -> GraphedLayer | Refused:
    """Record the layer for a key. Return its graphs, or why the layer cannot be recorded.

    Args:
        task_of: makes the Task of the capture from the layer's fingerprint.
        keeps: whether the layer keeps its activations.
    """
    fingerprint = Fingerprint(layer)
    if detail := fingerprint.code.foreign():
        return Refused(Reason.GRAPH_OWN_CODE, detail)
    if graphs.is_shared(layer):
        return Refused(Reason.GRAPH_REUSED, "")
    if is_sharded(layer, fingerprint):
        return Refused(Reason.GRAPH_SHARDED, "")
    if is_hooked(layer, fingerprint):
        return Refused(Reason.GRAPH_HOOKED, "")
    if other := others_may_use_gpu():
        return Refused(Reason.GRAPH_THREADS, f"another thread runs {other}")
    if sys.getprofile() is not None:
        return Refused(Reason.GRAPH_MODE, "a Python profiler is active, which a capture would interrupt")
    try:
        task = task_of(fingerprint)
    except Refusal as refusal:
        return refusal.refused
    watching = [True]
    task = task._replace(function=noticing_hooks(task.function, watching))
    device, length, trains = task.x.get_device(), task.x.numel(), task.static_cache is None
    with graphs.lock:
        if trains and key not in graphs.recordings and key not in graphs.kept:
            # PyTorch keeps the memory that eager calls used. The graphs can use this memory only after it was freed.
            give_back()
        while True:
            keeper = graphs.keepers.get(device) if keeps else None
            recorder = keeper.recorder if keeper is not None else None if keeps else graphs.recorders.get(device)
            try:
                if recorder is None:
                    recorder = Recorder(device)
                    if keeps:
                        keeper = graphs.keepers[device] = Keeper(recorder)
                    else:
                        graphs.recorders[device] = recorder
                needed = keeper.generation.nbytes if keeper is not None and not layer.gradient_checkpointing else 0
                # The graphs of a decode step take little memory.
                with recorder.lock, recorder.leaving_enough(needed) if trains else contextlib.nullcontext():
                    if keeper is not None:
                        graph: GraphedLayer = KeptLayer(keeper, task, key)
                    else:
                        graph = (GraphedLayer if trains else GraphedForward)(recorder, task)
                if keeper is not None:
                    keeper.count(recorder.taken)
                watching.clear()
                recorder.longest = max(recorder.longest, length)
                if (
                    trains
                    and not keeps
                    and graph.is_random
                    and (checkpoint := checkpoint_for(layer)) is not None
                    and not checkpoint.preserves_rng
                ):
                    graph.reset()
                    return Refused(Reason.GRAPH_CHECKPOINT, "it draws random numbers, and preserve_rng_state is False")
                graphs.keep(key, layer, graph)
                return graph
            except Refusal as refusal:
                return refusal.refused
            except torch.OutOfMemoryError as error:
                refused = Refused(Reason.GRAPH_MEMORY, str(error).splitlines()[0])
            finally:
                if recorder is not None and recorder.broken:
                    graphs.drop()
            if not trains:  # The graphs of the training stay.
                return refused
            graphs.drop()
            # Without the graphs of shorter inputs, the memory may be enough. Those are recorded again later, and can use
            # the memory of the longer input.
            if recorder is None or not 0 < recorder.longest < length:
                return refused


def graphed(target: Target, original: Function, layer_call: Function) -> Function:
    """Make the replacement for ``transformers.modeling_layers.GradientCheckpointingLayer.__call__``.

    The replacement runs a decoder layer as CUDA graphs where it can. Otherwise ``original`` runs.

    Args:
        layer_call: what is recorded: the library's own function.
    """
    fallbacks = Fallbacks(target.name)

    def refused(found: Refused) -> Reason:
        fallbacks.details[found.reason] = found.detail
        if found.reason in WARNED:
            warn_once(f"nf4_patch: a decoder layer runs without CUDA graphs ({found.reason.name}): {found.detail}")
        return found.reason

    def attempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        if graphs.stepping.on:
            return (partial(layer_call, self, *args, **kwargs),)
        if args and isinstance(args[0], Tensor) and runtime.runs_on(args[0]) and not runtime.is_capturing():
            graphs.make_way(args[0])
            if activations.mode == "auto" and torch.is_grad_enabled():
                spare.observe(args[0])  # before the budget is read, and before graphs are looked up that it may drop
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
            checkpoint = checkpoint_for(self, static_cache) or NOT_CHECKPOINTED
            reentrant = checkpoint.reentrant
            mode = x.requires_grad and static_cache is None, reentrant
            key = (*layouts, environment, mode, options, static_cache and weakref.ref(static_cache))
        except Unsupported as error:
            warn_of_wrong_results(self, args, kwargs)
            return refused(Refused(Reason.GRAPH_ARGUMENTS, str(error)))
        recorder, keeper = graphs.recorders.get(x.get_device()), graphs.keepers.get(x.get_device())
        for each in (recorder, None if keeper is None else keeper.recorder):
            if each is not None and stream_of(each.device) != each.replay_stream:
                return Reason.GRAPH_STREAM
        trains, checkpointed = static_cache is None, static_cache is not None or self.gradient_checkpointing
        why = why_not_kept(self, x, args, kwargs) if trains and activations.mode != "off" else Reason.ACTIVATIONS_BUDGET
        graph = graphs.recording(key, self) if checkpointed else None
        kept = graphs.kept_recording(key, self) if why is None else None

        def recorded(keeps: bool) -> GraphedLayer | Reason:
            own_key = ("kept", *key) if keeps else key
            if (known := graphs.refusal(own_key, self)) is not None:
                return refused(known)
            try:
                found = captured(
                    self,
                    key,
                    lambda f: task_of(self, args, plain, tensors, environment, f, cache_name, static_cache),
                    keeps,
                )
            except Exception as error:  # the error is remembered, so that later calls do not try again
                graphs.refuse(own_key, self, Refused(Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}"))
                raise
            if isinstance(found, Refused):
                if found.reason in FOR_GOOD or keeps:
                    graphs.refuse(own_key, self, found)
                return refused(found)
            return found

        keeps = kept is not None and kept.may_forward()
        # whether the layer can be recorded now as one that keeps its activations
        open_ = why is None and not keeps and (keeper is None or keeper.is_open())
        if open_ and kept is not None and not (keeper is not None and keeper.continues(key)):
            open_ = False  # the layer was recorded together with others, whose order is another one in this call
        if not keeps and (graph is None or open_):
            if graph is None and (known := graphs.refusal(key, self)) is not None:
                return refused(known)
            if is_slow(x.get_device()):
                return Reason.GRAPH_SLOW_GPU
            graphs.claim(self)
            due = graph is not None
            if not due:
                calls = graphs.count(key, self)
                due = is_due(calls) or (calls >= RECORDED_AT and keeper is not None and keeper.continues(key))
            if not due or not graphs.has_room(key):
                return Reason.GRAPH_NEW_SHAPE
            if why is Reason.ACTIVATIONS_WAITING and graph is None and not is_measured(self, x):
                graphs.uncount(key, self)
                return Reason.GRAPH_NEW_SHAPE
            if open_ and has_room_to_keep(self, x, keeper):
                found = recorded(keeps=True)
                if isinstance(found, KeptLayer):
                    kept, keeps = found, True
                elif not checkpointed:
                    return found  # type: ignore[return-value]
            elif open_:
                why = Reason.ACTIVATIONS_BUDGET
            if not keeps and graph is None:
                if not checkpointed:
                    return why or Reason.GRAPH_REUSED
                found = recorded(keeps=False)
                if isinstance(found, Reason):
                    return found
                graph = found
        used = kept if keeps and kept is not None else graph
        assert used is not None
        if cache.auto is not None:
            cache.auto.observe(x)  # before the check, because this call may free cached weights that the graph reads
        if not (used.fingerprint.holds() and used.is_in_place()):
            if isinstance(used, KeptLayer):
                graphs.retire(used.generation)
            graphs.drop_changed(key, self)
            graphs.count(key, self)
            return Reason.GRAPH_CHANGED
        if static_cache is not None:
            return step, used, x, tensors[1:], partial(original, self, *args, **kwargs)
        # The call must not keep x alive, because x may be offloaded.
        repeat = partial(again, self, args[1:], kwargs)
        if reentrant and used.pending() is not None:
            return Reason.GRAPH_REUSED
        if trains and activations.mode != "off":
            keeping.note(self, x, why if not keeps else None, used.nbytes if keeps else 0)
        call = Call(used, environment, tensors[1:], repeat, not keeps and checkpoint.offloads, fallbacks)
        if keeps:
            return replay_kept, used, call, x
        if not checkpoint.saves_on_host:
            return replay, used, call, x
        return replay_on_host, used, call, x

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
                result = layer_call(self, *positional, **{**keywords, cache_name: given})
            else:
                result = through(self, given, positional, keywords)
            # In Gemma 4, for example, layers write into a dict that later layers read.
            if flattened(arguments) != before:
                raise Refusal(Reason.GRAPH_STATE, "a call writes into a list or dict among its arguments")
            return result

        generates, checkpoint = static_cache is not None, checkpoint_for(self, static_cache) or NOT_CHECKPOINTED
        return Task(
            self, function, tensors[0], tensors[1:], environment, fingerprint, checkpoint.reentrant, static_cache
        )

    def through(self: Any, function: Function, args: Any, kwargs: Any) -> Any:
        """Call the layer as transformers does, but with ``function`` as the layer's checkpoint function."""
        if not self.gradient_checkpointing:
            return layer_call(self, *args, **kwargs)
        before = self._gradient_checkpointing_func
        try:
            self._gradient_checkpointing_func = function
            return layer_call(self, *args, **kwargs)
        finally:
            self._gradient_checkpointing_func = before

    def again(self: Any, args: Any, kwargs: Any, x: Tensor) -> Any:
        return through(self, lambda function, *arguments: function(*arguments), (x, *args), kwargs)

    return replacement_of(target, original, fallbacks, attempt)
