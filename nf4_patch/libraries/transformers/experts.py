"""Replacements for the functions of transformers and Liger that run the experts of a mixture.

transformers decodes every expert, and in training saves the dense stack, 1.2 GB in bf16 per layer of Qwen3-30B-A3B.
nf4_patch saves the packed stack, and in generation decodes only the needed experts.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

import torch
from torch.nn.utils import parametrize

from ...cache.store import cache
from ...moe.active import Wrapper, active_wrappers
from ...moe.forward import forward, trait
from ...moe.product import is_kept_packed
from ...moe.read import PackedExperts
from ...patching.context import function_mode_active
from ...patching.counters import warn_once
from ...patching.dequantizer import Dequantizer
from ...patching.originals import is_own
from ...patching.placement import is_ours
from ...patching.reasons import Reason
from ...patching.replacement import Function, replacement_of
from ...patching.target import Target
from ...patching.targets import MODULES
from ..bitsandbytes import PARAMETRIZE
from ..bitsandbytes.stacks import packed_chains, stacks_of

FUSED = MODULES["fused experts"]
SERVED = ("grouped_mm", "batched_mm")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Loads:
    """Records whether any model was loaded while ``experts`` was on. If so, ``warn_of_16_bits`` logs nothing."""

    seen = False


@functools.cache  # because walking all objects of the process is slow
def is_nothing_packed() -> bool:
    library = sys.modules.get(PARAMETRIZE)
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
    """Run nf4_patch's forward of the experts, with the LoRA factors of ``wrappers``. See ``experts`` for ``whole``."""
    return forward(module, stacks, {each.name: each.factors() for each in wrappers}, whole, *routed)


def experts(target: Target, original: Function, whole: bool) -> Function:
    """Replace a function that runs experts. Errors of nf4_patch's forward reach the caller.

    ``whole`` says whether the original multiplies by whole stacks, which it only reads. Otherwise, it copies each row's
    weight.
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
            # nf4_patch's forward still has to run and apply LoRA, but it reads the dense stack.
            dequantizer.fallbacks.count(refused)
        for wrapper in wrappers:
            wrapper.is_asked = True
        read = {} if isinstance(stacks, Reason) else stacks
        return run, self, read, wrappers, whole, hidden_states, top_k_index, top_k_weights

    return replacement_of(target, original, dequantizer.fallbacks, attempt)


# Replaces ``grouped_mm_experts_forward``, which saves the dense stacks for the backward, and ``LigerExperts.forward``, which
# decodes a packed stack in each pass and ignores LoRA.
grouped_mm = functools.partial(experts, whole=True)
# Replaces ``batched_mm_experts_forward``, which ``generate`` uses on a GPU for one-token steps.
batched_mm = functools.partial(experts, whole=False)


def implementation_of(experts: Any) -> str | None:
    return getattr(getattr(experts, "config", None), "_experts_implementation", None)


def supports(experts: Any, name: str, packed: bool) -> bool:
    """Return whether nf4_patch's forward will run and apply the LoRA adapters of the stack ``name``, ``packed`` or not.

    Otherwise, peft's own code has to add B·A to the dense stack.
    """
    bound = vars(experts).get("_old_forward", vars(experts).get("forward"))
    function = type(experts).forward if bound is None else getattr(bound, "__func__", None)
    if is_ours(function):  # it replaces another library's forward, and supports only packed experts
        return packed and is_own(function, FUSED, "forward")
    implementation, weight = implementation_of(experts), experts._parameters.get(name)
    if not packed and (type(weight) is not torch.nn.Parameter or weight.dtype not in DTYPES):
        return False
    asks = "_experts_implementation" in getattr(getattr(function, "__code__", None), "co_names", ())
    if (
        implementation not in SERVED
        or function is not type(experts).forward
        or not asks
        or trait(experts, "_is_expert_parallel")
    ):
        return False
    from transformers.integrations import moe

    serves = moe.ALL_EXPERTS_FUNCTIONS[implementation]
    return is_ours(serves) and is_own(serves, moe.__name__, f"{implementation}_experts_forward")
