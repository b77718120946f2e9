"""Read the bytes of packed stacks directly, without PyTorch's parametrization.

A packed stack holds one weight, such as down_proj, of every expert of a layer in 4 bits. bitsandbytes'
``nn.parametrize.replace_parameter_4bit`` packs the weight and puts a PyTorch parametrization in front of it. Every read
of the weight, such as ``module.gate_up_proj``, then decodes all experts. Code that reads the packed bytes can decode
only the experts that it needs, or keep the stack packed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..nf4.runtime import has_memory
from ..patching.context import is_compiling, own_dispatch
from ..patching.cpu import corrected
from ..patching.dequantizer import Dequantizer
from ..patching.module_hooks import HOOKS_ON_ALL, is_called_otherwise, is_written_in
from ..patching.reasons import Reason
from ..patching.switch import switch


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """A packed stack: its bytes, its QuantState, and a Dequantizer.

    The Dequantizer decodes the bytes, and counts how often the kernel ran (hits) and how often it did not (fallbacks).
    """

    packed: Tensor
    state: Any  # QuantState of shape [experts, ...]
    dequantizer: Dequantizer
    only_read: bool = False  # True if no caller writes into the dense stack. ``dense`` may then return a cached one.

    def dense(self) -> Tensor:
        """Decode all experts. Return [experts, ...]. The result may come from the cache, so do not write into it."""
        with torch.no_grad():  # bitsandbytes' parametrization passes no gradient to the packed weight either.
            if switch.on and not is_compiling():
                own, attempt = self.dequantizer, self.dequantizer.fallbacks.attempt
                result = attempt(own.of_state, self.packed, self.state, only_read=self.only_read)
                if type(result) is not Reason:
                    return result
            if (right := corrected("packed experts", self.packed, self.state, None)) is not None:
                return right
            from bitsandbytes.functional import dequantize_4bit

            dense: Tensor = dequantize_4bit(self.packed, self.state)
            return dense

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Decode only the experts with the indices ``ids``, int64 [n]. Return [n, ...].

        transformers indexes a dense stack in the same way, so its code also works with a packed stack.
        """
        if not len(ids):
            return torch.empty(0, *self.state.shape[1:], dtype=self.state.dtype, device=ids.device)
        chosen = self.dequantizer.fallbacks.attempt(self.select, ids)
        return self.dense()[ids] if type(chosen) is Reason else chosen.dense()

    def select(self, ids: Tensor) -> PackedExperts | Reason:
        """Return a smaller packed stack, [n, ...], with copies of the packed bytes of the experts ``ids``, int64 [n].

        Return a Reason if the bytes of single experts cannot be copied (see ``has_whole_experts``).
        """
        if not self.has_whole_experts():
            return Reason.EXPERT_BLOCKS
        from bitsandbytes.functional import QuantState

        state, second = self.state, self.state.state2

        def selected(tensor: Tensor) -> Tensor:
            return tensor.detach().reshape(state.shape[0], -1)[ids].flatten()

        nested = {}
        if second is not None:
            scales = QuantState(
                selected(second.absmax), code=second.code, blocksize=second.blocksize, dtype=second.dtype
            )
            nested = {"offset": state.offset, "state2": scales}
        shape = torch.Size((len(ids), *state.shape[1:]))
        kind = state.code, state.blocksize, state.quant_type, state.dtype
        experts = QuantState(selected(state.absmax), shape, *kind, **nested)
        return PackedExperts(selected(self.packed).unsqueeze(1), experts, self.dequantizer)

    def has_whole_experts(self) -> bool:
        """Return whether the bytes of single experts can be copied out of the stack.

        This needs experts that consist of whole bytes and whole blocks. If the quantization is nested, each expert must
        also consist of whole second-level blocks.
        """
        state, second, numel = self.state, self.state.state2, math.prod(self.state.shape)
        block = state.blocksize * (1 if second is None else second.blocksize)
        return bool(
            # The next line is false if the storage dtype is not uint8, and if ``packed`` is only a shard of the stack.
            2 * self.packed.numel() == numel == state.blocksize * state.absmax.numel()
            and (second is None or block * second.absmax.numel() == numel)
            and math.prod(state.shape[1:]) % block == 0
        )


# --- parametrizations and hooks of a stack ---


def packed_chains(module: Any) -> dict[str, Any]:
    """Return the ParametrizationList of each packed stack of a module, by the stack's name.

    The first parametrization in each list is that of bitsandbytes.
    """
    chains = module.parametrizations.items() if parametrize.is_parametrized(module) else ()
    return {name: chain for name, chain in chains if getattr(chain[0], "quant_state", None) is not None}


def is_managed(chain: Any) -> bool:
    """Return whether nf4_patch itself packed a stack, or prepared the stack for adapters.

    nf4_patch then handles the saving and merging of the stack even while ``experts="4bit"`` is off.

    Args:
        chain: the ParametrizationList of the stack.
    """
    packed = sys.modules.get(f"{__package__}.packed")
    return packed is not None and (isinstance(chain, packed.Chain) or isinstance(chain.original, packed.Params4bit))


def stacks_of(module: Any, dequantizer: Dequantizer, only_read: bool = False) -> dict[str, PackedExperts] | Reason:
    """Return the packed stacks of an experts module by name.

    If the stacks must be read through the parametrization, return the Reason instead.
    """
    packed = packed_chains(module)
    chains = {name: chain for name, chain in packed.items() if len(chain) == 1}
    if not chains:
        return Reason.SECOND_PARAMETRIZATION if packed else Reason.EXPERTS_NOT_PACKED
    if is_hooked(module, chains):
        return Reason.HOOKED
    stacks = {
        name: PackedExperts(chain.original, chain[0].quant_state, dequantizer, only_read)
        for name, chain in chains.items()
    }
    for stack in stacks.values():
        if type(stack.packed).__torch_dispatch__ is not own_dispatch:
            return Reason.TENSOR_SUBCLASS
        if stack.packed.is_meta or not has_memory(stack.packed):
            return Reason.NO_STORAGE
    return stacks


def is_hooked(module: Any, chains: dict[str, Any]) -> bool:
    """Return whether reading one of the stacks runs other code than bitsandbytes' parametrization, such as a hook.

    If so, the packed bytes must not be read directly. For example, libraries for offloading and sharding load a weight
    in a hook and free it in another hook. Such hooks are on the experts module, on the ParametrizationList, or on
    bitsandbytes' parametrization in that list.

    bitsandbytes' own two hooks on the experts module do not count. They cache a dense stack during one forward. An
    outer ``parametrize.cached()`` does count, because it keeps the dense stack for longer.

    Args:
        chains: the ParametrizationList of each stack, by name.
    """
    library = sys.modules.get("bitsandbytes.nn.parametrize")
    if library is None or any(HOOKS_ON_ALL):
        return True
    caching, no_longer = (getattr(library, f"_{verb}_parametrization_cache", None) for verb in ("enable", "disable"))
    if parametrize._cache_enabled > [*module._forward_pre_hooks.values()].count(caching):
        return True
    return is_called_otherwise(module, (caching, no_longer)) or any(
        is_called_otherwise(chain)
        or is_called_otherwise(chain[0])
        or not is_written_in(parametrize, getattr(getattr(type(module), name, None), "fget", None))
        or not is_written_in(parametrize, type(chain).forward)
        or not is_written_in(library, type(chain[0]).forward)
        for name, chain in chains.items()
    )
