"""For transformers' mixtures of experts, and Liger's: our forward runs in place of theirs.

Reading a packed stack decodes every expert, and transformers saves the dense stack for the backward (1.2 GB in bf16 a
layer of Qwen3-30B-A3B), or copies the few experts that a token needs out of it. Ours saves the packed stack, and decodes
only the experts that are needed.
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


def run(
    module: Any, stacks: dict[str, PackedExperts], wrappers: list[Wrapper], whole: bool, *routed: Any
) -> torch.Tensor:
    """Run our forward of the experts, with the LoRA factors of its wrappers."""
    try:
        return forward(module, stacks, {each.name: each.factors() for each in wrappers}, whole, *routed)
    except Exception:
        raise
    except BaseException:
        # bitsandbytes ends its caching of dense stacks in a hook, which PyTorch does not call after a KeyboardInterrupt
        library = sys.modules.get("bitsandbytes.nn.parametrize")
        for hook in module._forward_hooks.values():
            if library is not None and hook is library._disable_parametrization_cache:
                hook(module, (), None)
        raise


def experts(target: Target, original: Function, whole: bool) -> Function:
    """For a forward of experts. What ours raises is the caller's: the original is not run after it.

    Args:
        whole: it reads all experts, and only reads them.
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
            dequantizer.fallbacks.count(refused)  # dense where it cannot be read packed, and LoRA a product of its own
        for wrapper in wrappers:
            wrapper.is_asked = True
        read = {} if isinstance(stacks, Reason) else stacks
        return run, self, read, wrappers, whole, hidden_states, top_k_index, top_k_weights

    return replacement_of(target, original, dequantizer.fallbacks, attempt)


# Of ``grouped_mm_experts_forward``, which saves the dense stacks for the backward, and ``LigerExperts.forward``, which reads a
# packed stack dense in each pass, and uses no LoRA on it.
grouped_mm = functools.partial(experts, whole=True)
# Of ``batched_mm_experts_forward``, with which ``generate`` decodes tokens on a GPU.
batched_mm = functools.partial(experts, whole=False)
