"""For transformers' mixtures of experts: its own forward runs, on a view of the module.

Reading a packed stack decodes every expert, and transformers saves the dense stack for the backward (1.2 GB in bf16 a
layer of Qwen3-30B-A3B), or copies the few experts that a token needs out of it. In the view the packed stack is saved, and
only the experts that are needed are decoded; results are the same to the bit.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..cache.store import cache
from ..counters import warn_once
from ..dequantizer import Dequantizer
from ..reasons import Reason
from ..replacement import Function, replacement_of
from ..switch import switch
from ..target import Target
from . import forward
from .product import View, is_kept_packed, pending
from .read import stacks_of


class Loads:
    """Whether a model was loaded with ``experts="4bit"`` on: what is in 16 bits then was left so by request, or with a warning."""

    seen = False


@functools.cache  # it walks all objects
def is_nothing_packed() -> bool:
    library = sys.modules.get("bitsandbytes.nn.parametrize")
    kind = getattr(library, "Bnb4bitParametrization", None)
    return not any(type(each) is kind for each in gc.get_objects())


def warn_of_16_bits(module: Any) -> None:
    if not Loads.seen and is_nothing_packed():
        warn_once(
            f'nf4_patch: experts="4bit" is on, but the weights of {parametrize.type_before_parametrizations(module).__name__} are not '
            "packed: the model was loaded before. To pack them, load it again, with load_in_4bit=True, after "
            'nf4_patch.enable(experts="4bit"). To leave them as they are, nothing is to be done.'
        )


def on_view(
    target: Target,
    original: Function,
    whole: bool,
    transformers: Function | None = None,
    kind: Callable[..., View] = View,
) -> Function:
    """``original`` on a view of the experts module, or as it is for a Reason.

    What ``original`` raises on the view is its own: it is not run again.

    Args:
        whole: it reads all experts, and only reads them.
        transformers: its forward, where ``original`` is another library's and cannot run on a view.
        kind: makes the view.
    """
    dequantizer, gate = Dequantizer(target.name), switch.gates["experts"]
    transformers = transformers or original

    def prepare(module: Any) -> View | Reason:
        lora = {name: found for (owner, name), found in pending.lora.items() if owner == id(module)}
        stacks = stacks_of(module, dequantizer, whole and (is_kept_packed() or cache.on))
        if isinstance(stacks, Reason):
            if stacks is Reason.EXPERTS_NOT_PACKED and gate.on:
                warn_of_16_bits(module)
            if not lora:
                return stacks
            dequantizer.fallbacks.count(stacks)
            stacks = {}
        elif not whole and torch.is_grad_enabled():
            if not lora:
                return Reason.BATCHED_MM_GRADIENT
            dequantizer.fallbacks.count(Reason.BATCHED_MM_GRADIENT)
        for name in lora:
            del pending.lora[id(module), name]
        return kind(module, stacks, lora)

    def attempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        view = prepare(self)
        if isinstance(view, Reason):
            return view
        ours = whole and gate.on and dequantizer.fallbacks.attempt(forward.why_not, self, *args, **kwargs) is None
        return (functools.partial(forward.forward if ours else transformers, view, *args, **kwargs),)

    return replacement_of(target, original, dequantizer.fallbacks, attempt)


# Of ``grouped_mm_experts_forward``, which saves the dense stacks for the backward.
grouped_mm = functools.partial(on_view, whole=True)
# Of ``batched_mm_experts_forward``, with which ``generate`` decodes tokens on a GPU.
batched_mm = functools.partial(on_view, whole=False)


# --- Liger's experts ---


def on_ligers(*args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(*args, **kwargs)


@functools.cache
def ligers_view() -> type[View]:
    """With what transformers' forward asks of experts and Liger's class lacks, as Liger's kernels compute."""
    from transformers.integrations.moe import _default_apply_gate

    no = dict.fromkeys(("has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel"), False)
    yes = {"has_gate": True, "is_concatenated": True, "act_fn": torch.nn.SiLU(), "_apply_gate": _default_apply_gate}
    return type("LigersView", (View,), no | yes)


# Of ``LigerExperts.forward``, which reads a packed stack dense in each pass, and uses no LoRA on it.
ligers = functools.partial(
    on_view, whole=True, transformers=on_ligers, kind=lambda module, stacks, lora: ligers_view()(module, stacks, lora)
)
