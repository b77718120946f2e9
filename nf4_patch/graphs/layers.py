"""Run decoder layers as CUDA graphs: decide for each call whether to replay graphs, to record them or to run eagerly."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..activations import layers as keeping
from ..activations.layers import activations, through, uncheckpointed
from ..cache.store import cache
from ..memory.spare import spare
from ..nf4 import runtime
from ..patching.reasons import Reason
from ..patching.replacement import Fallbacks, Function, replacement_of
from ..patching.switch import switch
from ..patching.target import Target
from .arguments import Unsupported
from .calls import (
    LayerCall,
    checkpoint_for,
    static_cache_of,
    warn_of_wrong_results,
    why_not,
)
from .capture import GraphedLayer
from .kept import KeptLayer, has_room_to_keep, is_measured, may_record, why_not_kept
from .option import WAIT_FOR_PYTHON
from .recording import key_of, recorded
from .refusal import Refused
from .replay import Call, replay, replay_kept, replay_on_host, step, stream_of
from .shapes import RECORDED_AT, graphs, is_due


def follow(config: Any) -> None:
    activations.give_back, activations.graphs_are_full = graphs.drop, graphs.is_full
    if switch.value("graphs") == "off":
        graphs.forget()
    elif switch.value("activations") == "off" and graphs.kept:
        graphs.drop()


switch.follow(follow)


def is_slow(device: int) -> bool:
    """Return whether the profile "fast" uses no graphs on this GPU, because steps on older GPUs do not wait for Python."""
    config: Any = switch.config
    return device >= 0 and runtime.capability_of(device) < WAIT_FOR_PYTHON and "graphs" not in config.typed


def observe(x: Any) -> None:
    """Update the budgets of ``"auto"``. Drop all graphs if x is larger than all earlier inputs, or if the cache got its budget."""
    if isinstance(x, Tensor) and runtime.runs_on(x) and not runtime.is_capturing():
        graphs.make_way(x)
        if (activations.mode == "auto" or cache.auto is not None) and torch.is_grad_enabled():
            spare.observe(x)
        graphs.note_budget(cache.auto is not None and cache.budget > 0)


def is_on_another_stream(device: int) -> bool:
    keeper = graphs.keepers.get(device)
    recorders = graphs.recorders.get(device), None if keeper is None else keeper.recorder
    return any(each is not None and stream_of(device) != each.replay_stream for each in recorders)


def graph_for(call: LayerCall, layer_call: Function) -> tuple[GraphedLayer | Refused, Reason | None]:
    """Return the graphs for a call, or why there are none. Also return the Reason why the graphs recompute, or None.

    If the call is due for a recording, record the graphs now.
    """
    layer, key, keeper = call.layer, call.key, graphs.keepers.get(call.x.get_device())
    why = why_not_kept(call)
    kept = graphs.kept_recording(key, layer) if why is None else None
    if kept is not None and kept.may_forward():
        return kept, None
    graph = graphs.recording(key, layer) if call.may_recompute else None
    keeps = why is None and may_record(keeper, key, kept is not None)
    if graph is not None:
        keeps = keeps and graphs.is_due_again(key_of(call, True), layer)
    elif (reason := why_not_now(call, why)) is not None:
        return reason, why
    if keeps and has_room_to_keep(call, keeper):
        found = recorded(call, layer_call, keeps=True)
        if isinstance(found, KeptLayer) or not call.may_recompute or graphs.leaving:
            return found, None
    if not call.may_recompute:
        return Refused(why or Reason.GRAPH_REUSED, ""), why
    return graph or recorded(call, layer_call, keeps=False), why or Reason.ACTIVATIONS_BUDGET


def why_not_now(call: LayerCall, why: Reason | None) -> Refused | None:
    """Count this call of a layer without graphs. Return why the layer must not be recorded in this call, or None.

    Args:
        why: the Reason why the layer's graphs would recompute, or None if they would keep the activations.
    """
    layer, key, device = call.layer, call.key, call.x.get_device()
    if (known := graphs.refusal(key_of(call, not call.may_recompute), layer)) is not None:
        return known
    if is_slow(device):
        return Refused(Reason.GRAPH_SLOW_GPU, "")
    if graphs.leaving:  # a recording would find too little memory
        return Refused(Reason.GRAPH_NEW_SHAPE, "")
    calls, keeper = graphs.count(key, layer), graphs.keepers.get(device)
    due = is_due(calls) or (calls >= RECORDED_AT and keeper is not None and keeper.continues(key))
    if due or graphs.claims(key, layer):
        graphs.claim(layer)
    if due and why is Reason.ACTIVATIONS_WAITING and not (call.may_recompute and is_measured(call)):
        graphs.uncount(key, layer)
        return Refused(why, "")
    if due and graphs.has_room(key, layer, calls):
        return None
    return Refused(Reason.GRAPH_NEW_SHAPE, "")


def is_valid(graph: GraphedLayer, call: LayerCall) -> bool:
    """Return whether the layer is unchanged and its graphs still read valid memory. If not, drop the graphs."""
    if cache.auto is not None:
        cache.auto.observe(call.x)  # before the check, because this call may free cached weights that the graph reads
    if graph.fingerprint.holds() and graph.is_in_place():
        return True
    if isinstance(graph, KeptLayer):
        graphs.retire(graph.generation)
    graphs.drop_changed(call.key, call.layer)
    # The layer is unchanged, but its cached weights were freed.
    if graph.pins and cache.auto is not None and not cache.budget:
        graphs.restart_count(call.key, call.layer)
    graphs.count(call.key, call.layer)
    return False


def graphed(target: Target, original: Function, layer_call: Function) -> Function:
    """Make the replacement for ``transformers.modeling_layers.GradientCheckpointingLayer.__call__``.

    The replacement runs a decoder layer as CUDA graphs where it can. Otherwise ``original`` runs.

    Args:
        layer_call: transformers' own function. The graphs record this function, not ``original``.
    """
    fallbacks = Fallbacks(target.name)

    def refused(found: Refused) -> Reason:
        fallbacks.details[found.reason] = found.detail
        return found.reason

    def attempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        if graphs.stepping.on:
            return (partial(layer_call, self, *args, **kwargs),)
        observe(args[0] if args else None)
        cache_name, static_cache = static_cache_of(self, kwargs)
        checkpoint = checkpoint_for(self, static_cache)
        reason = why_not(self, args, checkpoint, static_cache is not None)
        if checkpoint is None or reason is not None:
            warn_of_wrong_results(self, args, kwargs)
            return reason
        try:
            call = LayerCall.of(self, args, kwargs, checkpoint, cache_name, static_cache)
        except Unsupported as error:
            warn_of_wrong_results(self, args, kwargs)
            return refused(Refused(Reason.GRAPH_ARGUMENTS, str(error)))
        if is_on_another_stream(call.x.get_device()):
            return refused(Refused(Reason.GRAPH_MODE, "a call on another CUDA stream than the recording"))
        graph, why = graph_for(call, layer_call)
        if isinstance(graph, Refused):
            return refused(graph)
        if not is_valid(graph, call):
            return Reason.GRAPH_CHANGED
        if not call.trains:
            return step, graph, call.x, call.tensors[1:], partial(original, self, *args, **kwargs)
        if graph.is_reentrant and activations.record_of(self).awaits_backward():
            return Reason.GRAPH_REUSED
        if activations.mode != "off":
            keeping.note(self, call.x, None if graph.keeps else why, graph.nbytes if graph.keeps else 0)
        return replayed(graph, call)

    def replayed(graph: GraphedLayer, call: LayerCall) -> Any:
        # ``repeat`` must not keep x alive, because hooks on saved tensors may offload x.
        repeat = partial(again, call.layer, call.args[1:], call.kwargs)
        replay_of = replay_kept if graph.keeps else replay_on_host if call.checkpoint.saves_on_host else replay
        return replay_of, graph, Call(graph, call.environment, call.tensors[1:], repeat, fallbacks), call.x

    def again(layer: Any, args: Any, kwargs: Any, x: Tensor) -> Any:
        return through(layer, uncheckpointed, layer_call, (x, *args), kwargs)

    return replacement_of(target, original, fallbacks, attempt)
