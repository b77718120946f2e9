"""Read the bytes of a packed stack, in order to decode only the experts that are needed, or to keep the stack packed."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..patching.context import is_compiling
from ..patching.dequantizer import Dequantizer
from ..patching.reasons import Reason
from ..patching.switch import switch
from ..patching.targets import MODULES

FUNCTIONS = MODULES["4-bit functions"]


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """A packed stack, with the Dequantizer that decodes it and counts the reads."""

    packed: Tensor
    state: Any  # QuantState of shape [experts, ...]
    dequantizer: Dequantizer
    only_read: bool = False  # whether no caller writes into the dense stack, so that ``dense`` may return a cached one
    # decodes all experts without the kernel; None stands for bitsandbytes' dequantize_4bit
    decode: Callable[[Tensor, Any], Tensor] | None = None

    def dense(self) -> Tensor:
        """Decode all experts, [experts, ...], read-only, because the result might be cached."""
        with torch.no_grad():  # as in bitsandbytes' parametrization, the packed weight gets no gradient
            if switch.on and not is_compiling():
                own = self.dequantizer
                result = own.fallbacks.attempt(own.of_state, self.packed, self.state, only_read=self.only_read)
                if type(result) is not Reason:
                    return result
            decode = self.decode or sys.modules[FUNCTIONS].dequantize_4bit
            dense: Tensor = decode(self.packed, self.state)
            return dense

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Decode the experts ``ids``, int64 [n], as transformers indexes a dense stack."""
        if not len(ids):
            return torch.empty(0, *self.state.shape[1:], dtype=self.state.dtype, device=ids.device)
        chosen = self.dequantizer.fallbacks.attempt(self.select, ids)
        return self.dense()[ids] if type(chosen) is Reason else chosen.dense()

    def select(self, ids: Tensor) -> PackedExperts | Reason:
        """Return a packed stack of the experts ``ids``, int64 [n], or a Reason if experts cannot be separated."""
        if not self.has_whole_experts():
            return Reason.EXPERT_BLOCKS
        state, second, kind = self.state, self.state.state2, type(self.state)

        def selected(tensor: Tensor) -> Tensor:
            return tensor.detach().reshape(state.shape[0], -1)[ids].flatten()

        nested = {}
        if second is not None:
            scales = kind(selected(second.absmax), code=second.code, blocksize=second.blocksize, dtype=second.dtype)
            nested = {"offset": state.offset, "state2": scales}
        shape = torch.Size((len(ids), *state.shape[1:]))
        code = state.code, state.blocksize, state.quant_type, state.dtype
        experts = kind(selected(state.absmax), shape, *code, **nested)
        return PackedExperts(selected(self.packed).unsqueeze(1), experts, self.dequantizer, decode=self.decode)

    def has_whole_experts(self) -> bool:
        """Return whether each expert consists of whole bytes and whole quantization blocks, of both levels if nested."""
        state, second, numel = self.state, self.state.state2, math.prod(self.state.shape)
        block = state.blocksize * (1 if second is None else second.blocksize)
        return bool(
            # This line is false if the storage dtype is not uint8, or if ``packed`` is only a shard of the stack.
            2 * self.packed.numel() == numel == state.blocksize * state.absmax.numel()
            and (second is None or block * second.absmax.numel() == numel)
            and math.prod(state.shape[1:]) % block == 0
        )
