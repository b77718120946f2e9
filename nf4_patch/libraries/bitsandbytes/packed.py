"""A packed stack in its module: the parameter of packed bytes, and the ParametrizationList that decodes them."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import bitsandbytes.nn
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ...patching.targets import MODULES
from . import PARAMETRIZE

LORA_LAYERS = MODULES["LoRA layers"]


class Params4bit(bitsandbytes.nn.Params4bit):
    """Packed bytes, which casting the model never changes.

    peft, transformers, accelerate and TRL recognize packed bytes by this class name. They count a byte as two weights, and neither
    cast nor shard it.
    """

    # Switch ``__torch_function__`` off. The version of bitsandbytes is written in Python.
    # That Python code costs 11 us per layer each time the weight is read (2-core CPU machine, Python 3.11).
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the parameter and its QuantState. A dtype is ignored."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if device is None else super().to(device=device, non_blocking=non_blocking)  # type: ignore[misc]

    def float(self, *_: Any, **__: Any) -> Any:
        return self

    bfloat16 = double = half = float

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        # ``memo`` remembers the copy of the QuantState, so that the copy of the parametrization shares this QuantState.
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        return copied


def end_caching(module: torch.nn.Module) -> None:
    """Make bitsandbytes stop caching dense stacks even if the module's forward raises an exception.

    Before 0.50, an exception skips the hook that ends the caching, and gradient checkpointing ends its recompute with one.
    """
    library: Any = sys.modules[PARAMETRIZE]
    for key, hook in module._forward_hooks.items():
        if hook is library._disable_parametrization_cache:
            module._forward_hooks_always_called[key] = True


class Merged(NamedTuple):
    """Original bytes of a stack into which adapters were merged, and hashes of the stack after the merge."""

    packed: Tensor  # The bytes are in host memory, because a copy on the GPU would take as much as the packed stack.
    state: Any
    content: dict[str, Any] | None = None


PART = 2**24  # bytes that are hashed at a time
# These are the constants of splitmix64: the increment, and then the shift and the factor of each round.
STEP, *ROUNDS = -7046029254386353131, (30, -4658895280553007687), (27, -7723592293110705685), (31, 1)


def hash_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the shape, the dtype, and a 64-bit hash of the bytes, which is the same on every device.

    Words of 8 bytes plus their index times STEP are mixed as in splitmix64 (Steele, Lea and Flood, 2014) and summed.
    """
    total = 0
    for index, part in enumerate(tensor.detach().reshape(-1).view(torch.uint8).split(PART)):
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        words = words + STEP * torch.arange(index * PART, index * PART + len(words), device=words.device)
        for shift, factor in ROUNDS:
            words = (words ^ (words >> shift)) * factor
        total += int(words.sum())
    return tuple(tensor.shape), tensor.dtype, total


def content_of(packed: Tensor, state: Any) -> dict[str, Any]:
    """Return hashes of the packed bytes and of the QuantState's parts by name. Copies have the same hashes."""
    return {name: hash_of(each) for name, each in {"": packed, **state.as_dict(packed=True)}.items()}


class Chain(parametrize.ParametrizationList):
    """ParametrizationList of a packed stack with LoRA adapters. Every change clears the parametrize cache.

    If peft's forward runs, it appends its LoRA here before each forward and removes it afterwards, which the cache would not notice.
    """

    def append(self, parametrization: torch.nn.Module) -> Any:
        """Append a parametrization, and clear the cache, which ``register_parametrization`` filled without it.

        peft 0.21 appends proxies of two classes, but removes only ``_LoraParameterProxy``. So a ``_LoraFactorsProxy`` becomes both.
        """
        layer: Any = sys.modules.get(LORA_LAYERS)
        if type(parametrization) is getattr(layer, "_LoraFactorsProxy", None):
            kinds = type(parametrization), layer._LoraParameterProxy
            parametrization.__class__ = type(kinds[0].__name__, kinds, {})
        parametrize._cache.clear()
        return super().append(parametrization)

    def __delitem__(self, index: Any) -> None:
        parametrize._cache.clear()
        super().__delitem__(index)

    def content(self) -> dict[str, Any]:
        return content_of(self.original, self[0].quant_state)

    def before_merging(self) -> Merged:
        """Return a copy of the packed bytes in host memory, and the QuantState, for unmerging."""
        return Merged(self.original.detach().to("cpu", copy=True), self[0].quant_state)

    def replace(self, packed: Tensor, state: Any) -> None:
        """Write new packed bytes in place, and set their QuantState."""
        original: Any = self.original
        original.copy_(packed)
        state.to(original.device)  # The model may have moved to another device while adapters were merged.
        # The parametrization and the parameter share one QuantState, so that it moves together with the parameter.
        self[0].quant_state = original.quant_state = state
        parametrize._cache.clear()  # Inside ``parametrize.cached()``, the cache may hold the previous dense weight.
