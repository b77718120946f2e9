"""Find the packed stacks of a module, and read their bytes without PyTorch's parametrization.

bitsandbytes' ``nn.parametrize.replace_parameter_4bit`` packs a stack of experts and registers a parametrization. Each
read of ``module.gate_up_proj`` then decodes all experts.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

from ...moe.read import PackedExperts
from ...nf4.runtime import has_memory
from ...patching.context import own_dispatch
from ...patching.dequantizer import Dequantizer
from ...patching.module_hooks import HOOKS_ON_ALL, is_called_otherwise, is_written_in
from ...patching.reasons import Reason
from . import FUNCTIONS, PARAMETRIZE
from .cpu import corrected


def functions() -> Any:
    return importlib.import_module(FUNCTIONS)


def decoded(packed: Tensor, state: Any) -> Tensor:
    """Decode a stack with bitsandbytes' code or, if that code would be wrong, with PyTorch operators."""
    from bitsandbytes.functional import dequantize_4bit  # Dynamo can trace this import

    right = corrected("packed experts", packed, state, None)
    dense: Tensor = dequantize_4bit(packed, state) if right is None else right
    return dense


def packed_chains(module: Any) -> dict[str, Any]:
    """Return the ParametrizationList of each packed stack, by name. Each list starts with bitsandbytes' parametrization."""
    chains = module.parametrizations.items() if parametrize.is_parametrized(module) else ()
    return {name: chain for name, chain in chains if getattr(chain[0], "quant_state", None) is not None}


def is_managed(chain: Any) -> bool:
    """Return whether nf4_patch packed the stack of this ParametrizationList, or prepared it for adapters.

    Such a stack needs nf4_patch for saving and merging, even while ``experts="4bit"`` is off.
    """
    packed = sys.modules.get(f"{__package__}.packed")  # not imported here, because it imports bitsandbytes
    return packed is not None and (isinstance(chain, packed.Chain) or isinstance(chain.original, packed.Params4bit))


def stacks_of(module: Any, dequantizer: Dequantizer, only_read: bool = False) -> dict[str, PackedExperts] | Reason:
    """Return the packed stacks of an experts module by name, or the Reason why the parametrization has to decode them."""
    packed = packed_chains(module)
    chains = {name: chain for name, chain in packed.items() if len(chain) == 1}
    if not chains:
        return Reason.SECOND_PARAMETRIZATION if packed else Reason.EXPERTS_NOT_PACKED
    if is_hooked(module, chains):
        return Reason.HOOKED
    stacks = {
        name: PackedExperts(chain.original, chain[0].quant_state, dequantizer, only_read, decoded)
        for name, chain in chains.items()
    }
    for stack in stacks.values():
        if type(stack.packed).__torch_dispatch__ is not own_dispatch:
            return Reason.TENSOR_SUBCLASS
        if stack.packed.is_meta or not has_memory(stack.packed):
            return Reason.NO_STORAGE
    return stacks


def is_hooked(module: Any, chains: dict[str, Any]) -> bool:
    """Return whether reading a stack runs code other than bitsandbytes' parametrization.

    If so, do not read the packed bytes directly. For example, a library for offloading or sharding loads a weight
    in one hook and frees it in another. The hook may be on the module, on the ParametrizationList (in ``chains``,
    by the stack's name) or on bitsandbytes' parametrization. bitsandbytes' own two hooks, which cache a dense stack
    during one forward, do not count. An outer ``parametrize.cached()`` counts, because it keeps the dense stack for
    longer.
    """
    library = sys.modules.get(PARAMETRIZE)
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
