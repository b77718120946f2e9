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
    """bitsandbytes' parameter of packed bytes. Casting a model to another dtype does not change the bytes, whatever their dtype.

    peft, transformers, accelerate and TRL recognize packed bytes by the name of this class. They count two weights per byte, and
    neither cast nor shard the bytes.
    """

    # bitsandbytes' Python version costs 11 us per layer at every read (2-core CPU machine, Python 3.11)
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the parameter and its QuantState to another device. Ignore a dtype."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if device is None else super().to(device=device, non_blocking=non_blocking)  # type: ignore[misc]

    def float(self, *_: Any, **__: Any) -> Any:
        return self

    bfloat16 = double = half = float

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.quant_state = copy.deepcopy(self.quant_state, memo)  # the same object as in the copied parametrization
        return copied


def end_caching(module: torch.nn.Module) -> None:
    """Make bitsandbytes end its caching of dense stacks after an exception too.

    Before 0.50 bitsandbytes does not. A checkpoint ends its recompute with an exception, and every dense stack stays in memory.
    """
    library: Any = sys.modules["bitsandbytes.nn.parametrize"]
    for key, hook in module._forward_hooks.items():
        if hook is library._disable_parametrization_cache:
            module._forward_hooks_always_called[key] = True


class Merged(NamedTuple):
    """The original bytes of a stack with merged adapters, and the hashes of the merged stack."""

    packed: Tensor  # in host memory, because the GPU would need twice the packed size
    state: Any
    content: dict[str, Any] | None = None


PART = 2**24  # bytes that are hashed at a time
STEP, *ROUNDS = -7046029254386353131, (30, -4658895280553007687), (27, -7723592293110705685), (31, 1)  # of splitmix64


def hash_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, and a 64-bit hash of the bytes. The hash is computed on the tensor's device, and equal on all devices.

    To each word of 8 bytes, add STEP times its index. Mix the result as splitmix64 does (Steele, Lea and Flood, 2014). Sum all words.
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
    """Return hashes of the packed bytes and of their QuantState. Copies and moves of a model do not change them."""
    return {name: hash_of(each) for name, each in {"": packed, **state.as_dict(packed=True)}.items()}


class Chain(parametrize.ParametrizationList):
    """The ParametrizationList of a packed stack that has LoRA adapters.

    Without our forward, peft appends its LoRA to this list before each forward and removes it afterwards.
    """

    def append(self, parametrization: torch.nn.Module) -> Any:
        """Append a parametrization, and clear the parametrize cache: registration cached the weight without this parametrization.

        peft 0.21 has two classes of LoRA proxies, and removes only one of them. A proxy of the other class is made both.
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
        """Copy the packed bytes to host memory."""
        return Merged(self.original.detach().to("cpu", copy=True), self[0].quant_state)

    def replace(self, packed: Tensor, state: Any) -> None:
        """Write other packed bytes and their QuantState into the stack, in place."""
        original: Any = self.original
        original.copy_(packed)
        state.to(original.device)  # the model may have been moved while adapters were merged
        self[0].quant_state = original.quant_state = state  # the parameter moves its state to another device
        parametrize._cache.clear()  # an outer ``parametrize.cached()`` may hold the previous dense weight
