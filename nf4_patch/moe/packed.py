"""A packed stack in its module: the parameter that holds the bytes, and PyTorch's list of what is done to it when it is read."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import bitsandbytes.nn
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..patching.quant_state import weight_of


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
    """A stack before adapters were merged into it, and what it became."""

    packed: Tensor  # in host memory: on the GPU a model would take its packed size twice
    state: Any
    of_sum: Any = None  # the state of the sum, kept so that no other numbers come to the addresses in ``proof``
    proof: tuple[Any, ...] = ()


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

    def proof(self) -> tuple[Any, ...]:
        """What changes when the packed bytes, or their state, do."""
        weight = weight_of(self.original, self[0].quant_state)  # type: ignore[arg-type]
        storage = self.original.untyped_storage()
        return *weight.facts(), storage._cdata, *(tensor._version for tensor in weight.tensors())

    def before_merging(self) -> Merged:
        return Merged(self.original.detach().to("cpu", copy=True), self[0].quant_state)

    def replace(self, packed: Tensor, state: Any) -> None:
        original: Any = self.original
        original.copy_(packed)
        self[0].quant_state = original.quant_state = state  # of the parameter too: it is moved with it
        parametrize._cache.clear()  # a ``parametrize.cached()`` around may have kept what was before
