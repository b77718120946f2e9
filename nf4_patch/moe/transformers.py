"""Replacements for the experts' forward of transformers and of Liger.

transformers decodes every expert of a packed stack. In training it saves the dense stack for the backward, 1.2 GB in bf16 per layer
of Qwen3-30B-A3B. In generation it then copies the few experts that a token needs. Our forward saves the packed stack in training,
and decodes only the needed experts in generation.
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
    """Record whether a model was loaded while ``experts="4bit"`` was on.

    If so, the forward does not warn of experts in 16 bits. Either the user asked for them, or loading has warned of them already.
    """

    seen = False


@functools.cache  # cached, because it is slow: it walks all objects of the process
def is_nothing_packed() -> bool:
    """Return whether this process has no packed stack."""
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
    """Run our forward of the experts, with the LoRA factors of ``wrappers``.

    Args:
        routed: hidden_states, top_k_index and top_k_weights.
    """
    try:
        return forward(module, stacks, {each.name: each.factors() for each in wrappers}, whole, *routed)
    except Exception:
        raise
    except BaseException:
        # PyTorch does not call forward hooks after a KeyboardInterrupt. So call bitsandbytes' hook here, which ends the caching of
        # dense stacks.
        library = sys.modules.get("bitsandbytes.nn.parametrize")
        for hook in module._forward_hooks.values():
            if library is not None and hook is library._disable_parametrization_cache:
                hook(module, (), None)
        raise


def experts(target: Target, original: Function, whole: bool) -> Function:
    """Make the replacement for a forward of experts.

    If our forward raises an error, the caller gets the error, and the original forward does not run.

    Args:
        whole: True for a forward that multiplies by the weights of all experts, and only reads them. False for a forward that
            copies the weight of each row's expert.
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
            dequantizer.fallbacks.count(refused)  # our forward still runs, to apply LoRA, but reads the dense stack
        for wrapper in wrappers:
            wrapper.is_asked = True
        read = {} if isinstance(stacks, Reason) else stacks
        return run, self, read, wrappers, whole, hidden_states, top_k_index, top_k_weights

    return replacement_of(target, original, dequantizer.fallbacks, attempt)


# ``grouped_mm`` replaces two functions. ``grouped_mm_experts_forward`` saves the dense stacks for the backward.
# ``LigerExperts.forward`` decodes a packed stack in each pass, and ignores LoRA adapters on it.
grouped_mm = functools.partial(experts, whole=True)
# ``batched_mm`` replaces ``batched_mm_experts_forward``, which ``generate`` uses for its one-token steps on a GPU.
batched_mm = functools.partial(experts, whole=False)
