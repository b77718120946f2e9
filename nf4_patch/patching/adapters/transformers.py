"""For transformers' mixtures of experts: its own forward runs, on a view of the module.

Reading a packed stack decodes every expert, and transformers saves the dense stack for the backward (1.2 GB in bf16 a
layer of Qwen3-30B-A3B), or copies the few experts that a token needs out of it. In the view the packed stack is saved, and
only the experts that are needed are decoded; results are the same to the bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..cache.store import cache
from ..context import is_compiling
from ..dequantizer import Dequantizer
from ..experts import forward
from ..experts.product import View, is_kept_packed, pending
from ..experts.read import stacks_of
from ..reasons import Reason
from ..replacement import Function
from ..switch import switch
from ..targets import Target


def on_view(target: Target, original: Function, whole: bool) -> Function:
    """``original`` on a view of the experts module, or as it is for a Reason.

    What ``original`` raises on the view is its own: it is not run again.

    Args:
        whole: it reads all experts, and only reads them.
    """
    dequantizer, gate = Dequantizer(target.name), switch.gates["experts"]
    attempt: Any = dequantizer.fallbacks.attempt

    def prepare(module: Any) -> View | Reason:
        lora = {name: found for (owner, name), found in pending.lora.items() if owner == id(module)}
        stacks = stacks_of(module, dequantizer, whole and (is_kept_packed() or cache.on))
        if isinstance(stacks, Reason):
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
        return View(module, stacks, lora)

    @functools.wraps(original)
    def experts_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.on and not is_compiling():
            view = attempt(prepare, self)
            if type(view) is not Reason:
                ours = whole and gate.on and attempt(forward.why_not, self, *args, **kwargs) is None
                return (forward.forward if ours else original)(view, *args, **kwargs)
        return original(self, *args, **kwargs)

    return experts_forward


# Of ``grouped_mm_experts_forward``, which saves the dense stacks for the backward.
grouped_mm = functools.partial(on_view, whole=True)
# Of ``batched_mm_experts_forward``, with which ``generate`` decodes tokens on a GPU.
batched_mm = functools.partial(on_view, whole=False)
