"""A packed stack as part of its module: the parameter with the packed bytes, and the ParametrizationList that decodes them."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import bitsandbytes.nn
import torch
from torch import Tensor
from torch.nn.utils import parametrize


class Params4bit(bitsandbytes.nn.Params4bit):
    """bitsandbytes' class for parameters of packed bytes, except that casting the model to another dtype never changes the bytes.

    The class keeps its name, because peft, transformers, accelerate and TRL recognize packed bytes by it. They count a packed byte
    as two weights, and neither cast nor shard it.
    """

    # ``__torch_function__`` is switched off. bitsandbytes implements it in Python, which costs 11 us per layer at every
    # read (2-core CPU machine, Python 3.11).
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the parameter and its QuantState to another device. Ignore a dtype in the arguments."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if device is None else super().to(device=device, non_blocking=non_blocking)  # type: ignore[misc]

    def float(self, *_: Any, **__: Any) -> Any:
        return self

    bfloat16 = double = half = float

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        # ``memo`` remembers the copied QuantState, so that the copied parametrization gets the same copy.
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        return copied


def end_caching(module: torch.nn.Module) -> None:
    """Make bitsandbytes end its caching of dense stacks also if the forward raises an exception.

    Before 0.50, bitsandbytes leaves the caching on after an exception. A checkpoint stops its recompute early with an
    exception, so every dense stack would stay in memory.
    """
    library: Any = sys.modules["bitsandbytes.nn.parametrize"]
    for key, hook in module._forward_hooks.items():
        if hook is library._disable_parametrization_cache:
            module._forward_hooks_always_called[key] = True


class Merged(NamedTuple):
    """The original bytes of a stack with merged adapters, and the hashes of the merged stack."""

    packed: Tensor  # in host memory, because a copy on the GPU would double the memory of the packed stack
    state: Any
    content: dict[str, Any] | None = None


PART = 2**24  # bytes that are hashed at a time
# The constants of splitmix64: the increment, and the shift and factor of each round
STEP, *ROUNDS = -7046029254386353131, (30, -4658895280553007687), (27, -7723592293110705685), (31, 1)


def hash_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, and a 64-bit hash of the bytes.

    The hash is computed on the tensor's device, and its value does not depend on the device. STEP times the index of a
    word is added to each word of 8 bytes. The result is mixed as in splitmix64 (Steele, Lea and Flood, 2014). The hash
    is the sum of all mixed words.
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
    """Return hashes of the packed bytes and of their QuantState, by name. Copying or moving a model does not change the hashes."""
    return {name: hash_of(each) for name, each in {"": packed, **state.as_dict(packed=True)}.items()}


class Chain(parametrize.ParametrizationList):
    """The ParametrizationList of a packed stack that has LoRA adapters.

    If our forward of the experts does not run, peft appends its LoRA to this list before each forward and removes it
    afterwards. A dense weight in the parametrize cache would then lack this LoRA, or still include it. So this class
    clears the cache at every change of the list.
    """

    def append(self, parametrization: torch.nn.Module) -> Any:
        """Append a parametrization, and clear the parametrize cache.

        ``register_parametrization`` reads the weight before it calls this method, so the cache holds the weight without
        the new parametrization.

        peft 0.21 has two classes of LoRA proxies, but removes only ``_LoraParameterProxy``. So a ``_LoraFactorsProxy`` is turned
        into an instance of both classes.
        """
        layer: Any = sys.modules.get("peft.tuners.lora.layer")
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
        """Return a copy of the packed bytes in host memory, so that unmerging can restore them."""
        return Merged(self.original.detach().to("cpu", copy=True), self[0].quant_state)

    def replace(self, packed: Tensor, state: Any) -> None:
        """Write other packed bytes and their QuantState into the stack, in place."""
        original: Any = self.original
        original.copy_(packed)
        state.to(original.device)  # the model may have been moved while adapters were merged
        # The parametrization shares the parameter's QuantState, which moves to another device with the parameter.
        self[0].quant_state = original.quant_state = state
        parametrize._cache.clear()  # an outer ``parametrize.cached()`` may hold the previous dense weight
