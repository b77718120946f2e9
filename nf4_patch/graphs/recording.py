"""Record the graphs of a decoder layer, or find why it cannot be recorded."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..activations.layers import through
from ..memory.spare import spare
from ..nf4 import runtime
from ..patching import context
from ..patching.counters import warn_once
from ..patching.reasons import Reason
from ..patching.replacement import Function
from ..patching.targets import MODULES
from .arguments import DROPPED, flattened, replaced
from .calls import COLLECTED, LayerCall
from .capture import GraphedLayer, Task
from .fingerprint import Fingerprint
from .generation import GraphedForward
from .kept import Keeper, KeptLayer
from .own_code import hooks_on_activations
from .recorder import Recorder
from .refusal import Refusal, Refused
from .shapes import graphs
from .threads import others_may_use_gpu

# FOR_GOOD: a layer that was refused for one of these Reasons is not recorded for the same shape again, until ``release()``.
# A layer that was refused for another Reason is tried again later.
FOR_GOOD = {
    Reason.GRAPH_STATE,
    Reason.GRAPH_FAILED,
    Reason.GRAPH_MEMORY,
}
WARNED = {Reason.GRAPH_FAILED, Reason.GRAPH_MEMORY}
# HARMLESS_HOOKS: Python modules whose hooks a replay may skip.
# transformers' hooks only collect outputs. A call whose outputs are collected runs eagerly anyway.
# bitsandbytes' hooks only open and close the cache of torch.nn.utils.parametrize.
HARMLESS_HOOKS = {COLLECTED, MODULES["4-bit parametrization"]}


def recorded(call: LayerCall, layer_call: Function, keeps: bool) -> GraphedLayer | Refused:
    """Record the called layer, unless it was refused for good. Return its graphs, or why it cannot be recorded.

    Args:
        layer_call: the library's own function, which calls the layer.
        keeps: whether the graphs keep the layer's activations.
    """
    key = key_of(call, keeps)
    if (known := graphs.refusal(key, call.layer)) is not None:
        return known
    try:
        found = captured(call, layer_call, keeps)
    except Exception as error:  # the error is remembered, so that later calls do not try again
        graphs.refuse(key, call.layer, Refused(Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}"))
        raise
    if isinstance(found, Refused):
        # While spare memory has no budget, PyTorch's peak may include cached weights that were freed since then.
        is_final = not (found.reason is Reason.GRAPH_MEMORY and spare.waits and spare.needed)
        if found.reason in WARNED and is_final:
            warn_once(f"nf4_patch: a decoder layer runs without CUDA graphs ({found.reason.name}): {found.detail}")
        if found.reason in FOR_GOOD and is_final:
            graphs.refuse(key, call.layer, found)
        elif keeps:
            graphs.put_off(key, call.layer)
    return found


def key_of(call: LayerCall, keeps: bool) -> Any:
    """Return the key under which a refusal to record this call is stored."""
    return ("kept", *call.key) if keeps else call.key


def captured(call: LayerCall, layer_call: Function, keeps: bool) -> GraphedLayer | Refused:
    layer = call.layer
    is_first = call.trains and call.key not in graphs.recordings and call.key not in graphs.kept
    if is_first:
        graphs.claim_again()
    fingerprint = graphs.fingerprint_of(layer) or Fingerprint(layer)
    if (refused := why_not_captured(layer, fingerprint)) is not None:
        return refused
    watching = [True]
    try:
        task = task_of(call, layer_call, fingerprint, watching)
    except Refusal as refusal:
        return refusal.refused
    with graphs.lock:
        while True:
            recorder = None
            try:
                recorder, keeper = recorder_for(call.x.get_device(), keeps, call.trains)
                if is_first:
                    recorder.make_room()
                    is_first = False
                found = made(call, task, recorder, keeper)
            except Refusal as refusal:
                return refusal.refused
            except torch.OutOfMemoryError as error:
                found = Refused(Reason.GRAPH_MEMORY, str(error).splitlines()[0])
            finally:
                if recorder is not None and recorder.broken:
                    graphs.drop()
            if isinstance(found, GraphedLayer):
                watching.clear()
                graphs.keep(call.key, layer, found)
                return found
            if (
                found.reason is not Reason.GRAPH_MEMORY or not call.trains
            ):  # A decode step never drops the graphs of the training.
                return found
            graphs.drop()
            # Without the graphs of shorter inputs, the memory may be enough. Those are recorded again later, and can use
            # the memory of the longer input.
            if recorder is None or not 0 < recorder.longest < call.x.numel():
                return found


def recorder_for(device: int, keeps: bool, trains: bool) -> tuple[Recorder, Keeper | None]:
    """Return the GPU's recorder and None or, if the graphs keep activations, the Keeper's recorder and the Keeper.

    Raises:
        torch.OutOfMemoryError: training has no recorder yet, and the GPU has too little memory for graphs.
    """
    if trains and not (graphs.keepers if keeps else graphs.recorders).get(device):
        Recorder.require(
            device
        )  # A recorder takes memory that stays, and an emptied cache of PyTorch fragments memory.
    if not keeps:
        recorder = graphs.recorders.get(device) or Recorder(device)
        graphs.recorders[device] = recorder
        return recorder, None
    keeper = graphs.keepers.get(device) or Keeper(Recorder(device))
    graphs.keepers[device] = keeper
    return keeper.recorder, keeper


def made(call: LayerCall, task: Task, recorder: Recorder, keeper: Keeper | None) -> GraphedLayer | Refused:
    """Record the layer's graphs, and check that a training step still has enough memory.

    Raises:
        Refusal: the layer cannot be recorded.
        torch.OutOfMemoryError: the GPU has no memory for the graphs.
    """
    # The graphs of a decode step take little memory.
    with (
        recorder.lock,
        recorder.leaving_enough(*in_the_peak(call, keeper)) if call.trains else contextlib.nullcontext(),
    ):
        if keeper is not None:
            graph: GraphedLayer = KeptLayer(keeper, task, call.key)
        else:
            graph = (GraphedLayer if call.trains else GraphedForward)(recorder, task)
    if keeper is not None:
        keeper.count(recorder.taken)
    recorder.longest = max(recorder.longest, call.x.numel())
    if keeper is None and call.trains and graph.is_random and not call.checkpoint.preserves_rng:
        graph.reset()
        return Refused(Reason.GRAPH_CHECKPOINT, "it draws random numbers, and preserve_rng_state is False")
    return graph


def in_the_peak(call: LayerCall, keeper: Keeper | None) -> tuple[int, int]:
    """Return the arguments ``more`` and ``held`` of ``Recorder.leaving_enough`` for the recording of this call."""
    if keeper is not None:
        return 0, keeper.generation.nbytes
    # Unsloth's checkpoint moves the inputs of layers to host memory. Layers with graphs keep them on the GPU.
    count = len(graphs.recordings.get(call.key, ())) + 1
    return count * call.x.nbytes if call.checkpoint.offloads else 0, 0


def why_not_captured(layer: nn.Module, fingerprint: Fingerprint) -> Refused | None:
    if graphs.is_shared(layer):
        return Refused(Reason.GRAPH_REUSED, "another layer holds one of its trained parameters")
    return why_not_replayed(layer, fingerprint) or why_no_capture()


def why_not_replayed(
    module: nn.Module, fingerprint: Fingerprint, harmless: Function = lambda hook: False
) -> Refused | None:
    """Return why a graph can never replace a call of this layer or model, or None.

    Args:
        harmless: returns whether a replay may skip a given hook.
    """
    if detail := fingerprint.code.foreign:
        return Refused(Reason.GRAPH_OWN_CODE, detail)
    if is_sharded(module, fingerprint):
        return Refused(Reason.GRAPH_HOOKED, "its parameters are sharded")
    if is_hooked(module, fingerprint, harmless):
        return Refused(Reason.GRAPH_HOOKED, "a module in it has a hook, or is compiled")
    return None


def why_no_capture() -> Refused | None:
    """Return why the process cannot capture anything now, or None."""
    if other := others_may_use_gpu():
        return Refused(Reason.GRAPH_THREADS, f"another thread runs {other}")
    if sys.getprofile() is not None:
        return Refused(Reason.GRAPH_MODE, "a Python profiler is active, which a capture would interrupt")
    return None


def is_hooked(layer: nn.Module, fingerprint: Fingerprint, harmless: Function) -> bool:
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


def task_of(call: LayerCall, layer_call: Function, fingerprint: Fingerprint, watching: list[bool]) -> Task:
    """Return the Task that captures the layer in this call.

    Args:
        watching: The Task looks for hooks on activations until this list is empty.

    Raises:
        Refusal: the layer reads ``num_items_in_batch``, which a graph drops.
    """
    if DROPPED in call.kwargs and fingerprint.code.names(DROPPED):
        raise Refusal(Reason.GRAPH_ARGUMENTS, f"the layer reads {DROPPED}, which changes at every step")
    layer, tensors = call.layer, call.tensors

    def function(given: Any, x: Tensor, buffers: list[Tensor]) -> Any:
        static = {id(tensor): buffer for tensor, buffer in zip(tensors, [x, *buffers], strict=True)}
        arguments = replaced((call.args, call.kwargs), lambda tensor: static[id(tensor)])
        (args, kwargs), before = arguments, flattened(arguments)
        if call.trains:
            result = through(layer, given, layer_call, args, kwargs)
        else:
            result = layer_call(layer, *args, **{**kwargs, call.cache_name: given})
        # In Gemma 4, for example, layers write into a dict that later layers read.
        if flattened(arguments) != before:
            raise Refusal(Reason.GRAPH_STATE, "a call writes into a list or dict among its arguments")
        return result

    watched, reentrant = noticing_hooks(function, watching), call.checkpoint.reentrant
    return Task(layer, watched, call.x, tensors[1:], call.environment, fingerprint, reentrant, call.static_cache)


def noticing_hooks(function: Function, watching: list[bool]) -> Function:
    """Wrap a Task's function, so that it raises a Refusal if the layer puts a hook on an activation.

    A replay would not run this hook.
    """

    def noticed(*arguments: Any) -> Any:
        if not watching or runtime.is_capturing():
            return function(*arguments)
        with hooks_on_activations() as found:
            result = function(*arguments)
        if found:
            raise Refusal(Reason.GRAPH_HOOKED, f"the layer calls {found[0]} on an activation")
        return result

    return noticed
