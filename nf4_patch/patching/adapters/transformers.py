"""For transformers' mixtures of experts whose weights bitsandbytes holds in 4 bits.

Reading a stack decodes every expert. transformers then saves the dense stack for the backward (1.2 GB in bf16 a layer of
Qwen3-30B-A3B), or copies the few experts that a token needs out of it. The replacements run transformers' own function
on a view of the module, so that results are the same to the bit: one saves the packed stack and decodes it again in the
backward, the other decodes only the experts that are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..cache.store import cache
from ..context import is_compiling, saved_tensors_hooks, transforms_active
from ..dequantizer import Dequantizer
from ..experts import Saved, View, nothing_dense_saved, stacks_of
from ..reasons import Reason
from ..replacement import Function
from ..switch import switch
from ..targets import Target

hooks_forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
backward_in_progress = torch._C._current_graph_task_id  # -1: none
Prepared = AbstractContextManager[View] | Reason


def on_view(target: Target, original: Function, prepare: Callable[[Any, Dequantizer], Prepared]) -> Function:
    """``original`` on the view of the experts module that ``prepare`` makes, or as it is for a Reason.

    What ``original`` raises on the view is its own: it is not run again.
    """
    dequantizer = Dequantizer(target.name)

    @functools.wraps(original)
    def experts_forward(self, *args, **kwargs) -> Any:
        if switch.on and not is_compiling():
            prepared = dequantizer.fallbacks.attempt(prepare, self, dequantizer)
            if type(prepared) is not Reason:
                with prepared as view:
                    return original(view, *args, **kwargs)
        return original(self, *args, **kwargs)

    return experts_forward


def why_not_saved() -> Reason | None:
    """Why it is not for us to say what autograd saves."""
    if not torch.is_grad_enabled():
        return Reason.NO_GRADIENT
    if transforms_active() is not None:
        return Reason.FUNCTORCH_TRANSFORM
    if backward_in_progress() != -1 or saved_tensors_hooks(True) is not None or hooks_forbidden() is not None:
        return Reason.SAVED_TENSOR_HOOKS
    return None


def grouped_mm(target: Target, original: Function) -> Function:
    """For ``grouped_mm_experts_forward``, which saves the dense stacks for the backward."""

    def prepare(module: Any, dequantizer: Dequantizer) -> Prepared:
        stacks = stacks_of(module, dequantizer, only_read=True)
        if isinstance(stacks, Reason):
            return stacks
        reason = why_not_saved()
        if reason is None:
            saved = {name: Saved.of(stack) for name, stack in stacks.items()}
            return nothing_dense_saved(module, saved, dequantizer)
        if not cache.on:
            return reason
        dequantizer.fallbacks.count(reason)
        return nullcontext(View(module, stacks, lambda name: stacks[name].dense()))

    return on_view(target, original, prepare)


def batched_mm(target: Target, original: Function) -> Function:
    """For ``batched_mm_experts_forward``, with which ``generate`` decodes tokens on a GPU."""

    def prepare(module: Any, dequantizer: Dequantizer) -> Prepared:
        stacks = stacks_of(module, dequantizer)
        if isinstance(stacks, Reason):
            return stacks
        if torch.is_grad_enabled():
            return Reason.BATCHED_MM_GRADIENT
        whole = {name: stack for name, stack in stacks.items() if stack.has_whole_experts()}
        return nullcontext(View(module, whole, whole.__getitem__)) if whole else Reason.EXPERT_BLOCKS

    return on_view(target, original, prepare)
