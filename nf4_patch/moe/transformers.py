"""Replacements for the functions of transformers and Liger that run the experts of a mixture.

transformers decodes every expert, and in training saves the dense stack for the backward: 1.2 GB in bf16 per layer of
Qwen3-30B-A3B. nf4_patch saves the packed stack, and in generation decodes only the needed experts.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..cache.store import cache
from ..patching.context import function_mode_active
from ..patching.counters import warn_once
from ..patching.dequantizer import Dequantizer
from ..patching.reasons import Reason
from ..patching.replacement import Function, replacement_of
from ..patching.target import Target
from .forward import forward, trait
from .lora import Wrapper, active_wrappers
from .product import is_kept_packed
from .read import PackedExperts, packed_chains, stacks_of


class Loads:
    """Record whether a model was loaded with the option on. Then no warning of experts in 16 bits is needed."""

    seen = False


@functools.cache  # The result is cached, because the function walks all objects of the process, which is slow.
def is_nothing_packed() -> bool:
    """Return whether this process holds no packed stack at all."""
    library = sys.modules.get("bitsandbytes.nn.parametrize")
    kind = getattr(library, "Bnb4bitParametrization", None)
    return not any(type(each) is kind for each in gc.get_objects())


def warn_of_16_bits(module: Any) -> None:
    if not Loads.seen and is_nothing_packed():
        warn_once(
            f'nf4_patch: experts="4bit" is on, but the weights of {parametrize.type_before_parametrizations(module).__name__} are not '
            "packed, because the model was loaded before. To pack them, load the model again with load_in_4bit=True after "
            'nf4_patch.enable(experts="4bit"). To keep them in 16 bits, do nothing.'
        )


def run(
    module: Any, stacks: dict[str, PackedExperts], wrappers: list[Wrapper], whole: bool, *routed: Any
) -> torch.Tensor:
    """Run nf4_patch's forward with the LoRA factors of ``wrappers``. ``routed``: hidden_states, top_k_index, top_k_weights."""
    try:
        return forward(module, stacks, {each.name: each.factors() for each in wrappers}, whole, *routed)
    except Exception:
        raise
    except BaseException:
        # After a KeyboardInterrupt, PyTorch does not call forward hooks.
        # So call the hook of bitsandbytes here that ends the caching of dense stacks.
        library = sys.modules.get("bitsandbytes.nn.parametrize")
        for hook in module._forward_hooks.values():
            if library is not None and hook is library._disable_parametrization_cache:
                hook(module, (), None)
        raise


def experts(target: Target, original: Function, whole: bool) -> Function:
    """Replace a function that runs experts. Errors of nf4_patch's forward reach the caller.

    Args:
        whole: the original multiplies by all experts' weights, and only reads them. False: it copies each row's weight.
    """
    dequantizer = Dequantizer(target.name)

    def attempt(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        wrappers = active_wrappers.of(self)
        if not wrappers and function_mode_active() and packed_chains(self):
            return Reason.FUNCTION_MODE
        refused = stacks = stacks_of(self, dequantizer, whole and (is_kept_packed() or cache.on))
        if trait(self, "_is_expert_parallel"):
            refused = Reason.EXPERT_PARALLEL
        elif not isinstance(stacks, Reason) and not whole and torch.is_grad_enabled():
            refused = Reason.BATCHED_MM_GRADIENT
        if refused is Reason.EXPERTS_NOT_PACKED:
            warn_of_16_bits(self)
        if isinstance(refused, Reason):
            if not wrappers:
                return refused
            # nf4_patch's forward still runs, because it has to apply LoRA, but it reads the dense stack.
            dequantizer.fallbacks.count(refused)
        for wrapper in wrappers:
            wrapper.is_asked = True
        read = {} if isinstance(stacks, Reason) else stacks
        return run, self, read, wrappers, whole, hidden_states, top_k_index, top_k_weights

    return replacement_of(target, original, dequantizer.fallbacks, attempt)


# ``grouped_mm`` replaces ``grouped_mm_experts_forward``, which saves the dense stacks for the backward.
# ``grouped_mm`` also replaces ``LigerExperts.forward``, which decodes a packed stack in each pass and ignores LoRA.
grouped_mm = functools.partial(experts, whole=True)
# ``batched_mm`` replaces ``batched_mm_experts_forward``. On a GPU, ``generate`` uses that function for one-token steps.
batched_mm = functools.partial(experts, whole=False)
