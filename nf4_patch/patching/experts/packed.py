"""The parameter that holds the packed bytes of a stack."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes.nn
import torch


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
