"""The parameter that holds the bytes of a packed stack, and the ParametrizationList that decodes them."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import bitsandbytes.nn
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ...patching import guards
from ...patching.quant_state import weight_of
from ...patching.reasons import Reason
from ...patching.targets import MODULES
from . import PARAMETRIZE

DAMAGED = "the checkpoint's packed experts are damaged: a part is missing or does not fit"
# Reasons why the kernels cannot run, although the checkpoint is whole
OF_KERNELS = (
    Reason.NOT_CUDA, Reason.ROCM, Reason.GPU_TOO_OLD, Reason.OUTPUT_DTYPE, Reason.STORAGE_DTYPE, Reason.TENSOR_SUBCLASS,
    Reason.MIXED_DEVICES, Reason.NOT_CONTIGUOUS,
)  # fmt: skip
LORA_LAYERS = MODULES["LoRA layers"]


class Params4bit(bitsandbytes.nn.Params4bit):
    """A parameter with packed bytes that a cast of the model does not change.

    peft, transformers, accelerate and TRL recognize the class name, count two weights per byte, and neither cast nor
    shard the bytes.
    """

    # bitsandbytes' own ``__torch_function__`` costs 11 us per layer each time the weight is read (2-core CPU machine,
    # Python 3.11).
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def from_prequantized(cls, data: Tensor, quantized_stats: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the parameter with these packed bytes and the saved fields of their QuantState.

        Raises:
            ValueError: a field is missing or does not fit. In some cases, bitsandbytes would decode wrong numbers.
        """
        try:
            parameter: Any = super().from_prequantized(data, quantized_stats, *args, **kwargs)
        except (AssertionError, LookupError, ValueError) as error:
            raise ValueError(f"{DAMAGED}: {type(error).__name__}: {error}") from error
        weight = weight_of(parameter, parameter.quant_state)
        why = weight if isinstance(weight, Reason) else guards.why_not(weight, ignore=OF_KERNELS)
        if why in (Reason.STATE_FIELDS, Reason.SIZE_MISMATCH):
            raise ValueError(f"{DAMAGED}: {why.name}: {why.sentence}, packed {list(data.shape)}")
        return parameter

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the parameter and its QuantState to a device. Ignore a dtype."""
        device, _, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if device is None else super().to(device=device, non_blocking=non_blocking)  # type: ignore[misc]

    def float(self, *_: Any, **__: Any) -> Any:
        return self

    bfloat16 = double = half = float

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        # Pass ``memo``, so that the copies of the parameter and of its parametrization share one QuantState.
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        return copied


def end_caching(module: torch.nn.Module) -> None:
    """Make bitsandbytes stop caching dense stacks even after an exception, such as the one that ends a recompute.

    Before bitsandbytes 0.50, an exception skips the hook that ends the caching.
    """
    library: Any = sys.modules[PARAMETRIZE]
    for key, hook in module._forward_hooks.items():
        if hook is library._disable_parametrization_cache:
            module._forward_hooks_always_called[key] = True


class Merged(NamedTuple):
    """The bytes and QuantState of a stack before adapters were merged into it."""

    packed: Tensor  # in host memory, because a second copy on the GPU would take too much memory
    state: Any
    content: dict[str, Any] | None = None  # hashes of the stack after the merge


PART = 2**24  # bytes that are hashed at a time
# Constants of splitmix64: the increment, and then the shift and the factor of each round.
STEP, *ROUNDS = -7046029254386353131, (30, -4658895280553007687), (27, -7723592293110705685), (31, 1)


def hash_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the shape, the dtype, and a 64-bit hash of the bytes that is the same on every device.

    Each 8-byte word plus a multiple of its index is mixed as in splitmix64 (Steele, Lea and Flood, 2014). The hash is the
    sum.
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
    """Return a hash of the packed bytes and of each part of the QuantState, by name."""
    return {name: hash_of(each) for name, each in {"": packed, **state.as_dict(packed=True)}.items()}


class Chain(parametrize.ParametrizationList):
    """ParametrizationList of a packed stack with LoRA adapters. Every change clears the parametrize cache.

    peft's forward appends a parametrization for LoRA and removes it afterwards. Otherwise, the cache would return a
    weight from before the change.
    """

    def append(self, parametrization: torch.nn.Module) -> Any:
        """Append a parametrization, and clear the cache."""
        # peft 0.21 appends proxies of two classes, but removes only ``_LoraParameterProxy``. So make each ``_LoraFactorsProxy``
        # an instance of both classes, which peft removes too.
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
        """Return the QuantState and a copy of the packed bytes in host memory, for ``requantize`` to restore."""
        return Merged(self.original.detach().to("cpu", copy=True), self[0].quant_state)

    def replace(self, packed: Tensor, state: Any) -> None:
        """Write new packed bytes in place, and set their QuantState."""
        original: Any = self.original
        original.copy_(packed)
        state.to(original.device)  # the model might have moved to another device while adapters were merged
        # The parametrization shares the parameter's QuantState, so that both move with the model.
        self[0].quant_state = original.quant_state = state
        parametrize._cache.clear()  # inside ``parametrize.cached()``, the cache might hold the previous dense weight
