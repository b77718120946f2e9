"""A packed stack in its module: the parameter that holds the bytes, and PyTorch's list of what is done to it when it is read."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import bitsandbytes.nn
import torch
from torch import Tensor
from torch.nn.utils import parametrize


class Params4bit(bitsandbytes.nn.Params4bit):
    """bitsandbytes' parameter of packed bytes, whatever dtype they are stored as: no cast of a model changes them.

    peft, transformers, accelerate and TRL know packed bytes by the name of this class: they count two weights a byte, and
    leave the bytes alone where they cast, or shard, what is stored as numbers.
    """

    # bitsandbytes' own, in Python, costs a layer 11 us at every read (2-core CPU machine, Python 3.11)
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """On another device, its state too."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if device is None else super().to(device=device, non_blocking=non_blocking)  # type: ignore[misc]

    def float(self, *_: Any, **__: Any) -> Any:
        return self

    bfloat16 = double = half = float

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.quant_state = copy.deepcopy(self.quant_state, memo)  # the one that the parametrization's copy has
        return copied


def end_caching(module: torch.nn.Module) -> None:
    """bitsandbytes before 0.50 does not, where a checkpoint ends its recompute, and keeps dense stacks from then on."""
    library: Any = sys.modules["bitsandbytes.nn.parametrize"]
    for key, hook in module._forward_hooks.items():
        if hook is library._disable_parametrization_cache:
            module._forward_hooks_always_called[key] = True


class Merged(NamedTuple):
    """A stack before adapters were merged into it, and the content of the sum that it became."""

    packed: Tensor  # in host memory: on the GPU a model would take its packed size twice
    state: Any
    content: dict[str, Any] | None = None


PART = 2**24  # bytes that are hashed at a time
STEP, *ROUNDS = -7046029254386353131, (30, -4658895280553007687), (27, -7723592293110705685), (31, 1)  # of splitmix64


def hash_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, and a 64-bit hash of the bytes. It is the same on every device, and is computed where the tensor is.

    Each word of 8 bytes is added to STEP times its place, mixed as in splitmix64 (Steele, Lea and Flood, 2014), and summed.
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
    """That of a stack which LoRA is put on. peft's own LoRA joins and leaves it at every forward; see ``append``."""

    def append(self, parametrization: torch.nn.Module) -> Any:
        """Registering it, PyTorch has read the stack, and inside ``parametrize.cached()`` keeps that without it. And of its
        two kinds of proxies peft 0.21 takes out one only.
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
        return Merged(self.original.detach().to("cpu", copy=True), self[0].quant_state)

    def replace(self, packed: Tensor, state: Any) -> None:
        original: Any = self.original
        original.copy_(packed)
        state.to(original.device)  # the model may have been moved while adapters were merged
        self[0].quant_state = original.quant_state = state  # of the parameter too: it is moved with it
        parametrize._cache.clear()  # a ``parametrize.cached()`` around may have kept what was before
