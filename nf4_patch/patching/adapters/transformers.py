"""For transformers' mixtures of experts whose weights bitsandbytes holds in 4 bits.

``bitsandbytes.nn.parametrize.replace_parameter_4bit`` packs all experts of a layer into one weight, a stack; reading it
decodes every expert. transformers then saves the dense stack for the backward (1.2 GB in bf16 a layer of
Qwen3-30B-A3B), or copies the few experts that a token needs out of it. The replacements run transformers' own function
on a view of the module, so that results are the same to the bit: one saves the packed stack and decodes it again in the
backward, the other decodes only the experts that are needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..cache import cache
from ..context import is_compiling, transforms_active
from ..dequantizer import Dequantizer
from ..reasons import Reason
from ..switch import switch

hooks_in_force = torch._C._autograd._top_saved_tensors_default_hooks
hooks_forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
backward_in_progress = torch._C._current_graph_task_id  # -1: none


@dataclass(frozen=True)
class Stack:
    """The 4-bit weight of all experts of a layer."""

    packed: torch.Tensor
    state: Any  # QuantState of shape [experts, ...]
    dequantizer: Dequantizer

    def decode(self, run: Callable[..., Any], packed: torch.Tensor, state: Any) -> torch.Tensor:
        if switch.on and not is_compiling():
            result = self.dequantizer.attempt(run, packed, state)
            if type(result) is not Reason:
                return result
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(packed, state)

    def dense(self) -> torch.Tensor:
        """All experts, not to be written into: [experts, ...]."""
        return self.decode(self.dequantizer.read, self.packed, self.state)

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        """The experts ``ids``, int64 [n], as transformers asks a dense stack for them: [n, ...]. No other is read."""
        return self.decode(self.dequantizer.run, *self.select(ids))

    def select(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy of the packed experts ``ids``, int64 [n], and their QuantState of shape [n, ...]."""
        from bitsandbytes.functional import QuantState

        state, second = self.state, self.state.state2

        def selected(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.reshape(state.shape[0], -1)[ids].flatten()

        nested = {}
        if second is not None:
            scales = QuantState(
                selected(second.absmax), code=second.code, blocksize=second.blocksize, dtype=second.dtype
            )
            nested = {"offset": state.offset, "state2": scales}
        experts = QuantState(
            selected(state.absmax), torch.Size((len(ids), *state.shape[1:])), state.code, state.blocksize,
            state.quant_type, state.dtype, **nested,
        )  # fmt: skip
        return selected(self.packed).unsqueeze(1), experts

    def size(self, dim: int) -> int:
        return self.state.shape[dim]

    def has_whole_experts(self) -> bool:
        """Every expert ends with a byte, a block and, where the state is nested, a block of the second level."""
        state, second = self.state, self.state.state2
        block = state.blocksize * (1 if second is None else second.blocksize)
        whole = self.packed.dtype is torch.uint8 and 2 * self.packed.numel() == math.prod(state.shape)  # no shard
        return whole and math.prod(state.shape[1:]) % block == 0


def stacks_of(module: Any, dequantizer: Dequantizer) -> dict[str, Stack] | Reason:
    """The 4-bit stacks of an experts module by name, or the Reason why there is none."""
    chains = {
        name: chain
        for name, chain in getattr(module, "parametrizations", {}).items()
        if getattr(chain[0], "quant_state", None) is not None
    }
    if not chains:
        return Reason.EXPERTS_NOT_4BIT
    stacks = {
        name: Stack(chain.original, chain[0].quant_state, dequantizer)
        for name, chain in chains.items()
        if len(chain) == 1
    }
    return stacks or Reason.SECOND_PARAMETRIZATION


class View:
    """An experts module whose 4-bit stacks are read by ``read(name)``."""

    def __init__(self, module: Any, names: Any, read: Callable[[str], Any]):
        self._module, self._names, self._read = module, names, read

    def __getattr__(self, name: str) -> Any:
        return self._read(name) if name in self._names else getattr(self._module, name)


def version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # which an inference tensor does not have


class Saved(NamedTuple):
    """What is saved for the backward, and its version then: autograd checks none of what hooks save."""

    tensor: torch.Tensor  # or the packed weight, in place of a view of a dense stack:
    version: int | None
    stack: Stack | None = None
    view: tuple[Any, ...] = ()  # size, stride, offset

    def unpack(self) -> torch.Tensor:
        """
        Raises:
            RuntimeError: the tensor was changed in between.
        """
        version = version_of(self.tensor)
        if version != self.version:
            raise RuntimeError(
                f"a tensor {list(self.tensor.shape)} that the backward of the experts needs was modified by an in-place "
                f"operation: it is at version {version}, expected {self.version}"
            )
        return self.tensor if self.stack is None else self.stack.dense().as_strided(*self.view)


@contextmanager
def nothing_dense_saved(module: Any, stacks: dict[str, Stack]) -> Iterator[View]:
    """A view of the module, in whose use autograd saves the packed stack in place of the dense one."""
    dense: dict[int, tuple[Stack, torch.Tensor]] = {}  # by the storage's address

    def read(name: str) -> torch.Tensor:
        weight = stacks[name].dense()
        dense[weight.untyped_storage()._cdata] = stacks[name], weight
        return weight

    def pack(tensor: torch.Tensor) -> Saved:
        known = dense.get(tensor.untyped_storage()._cdata)
        if known is None:  # detached: the tensor itself may hold the node that saves it
            return Saved(tensor.detach(), version_of(tensor))
        stack, _ = known
        return Saved(
            stack.packed, version_of(stack.packed), stack, (tensor.size(), tensor.stride(), tensor.storage_offset())
        )

    with saved_tensors_hooks(pack, Saved.unpack):
        try:
            yield View(module, stacks, read)
        finally:
            dense.clear()


def replace_grouped_mm(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``grouped_mm_experts_forward``, which saves the dense stacks for the backward."""
    dequantizer = Dequantizer(target)

    def unsupported() -> Reason | None:
        if not torch.is_grad_enabled():
            return Reason.NO_GRADIENT
        if transforms_active() is not None:
            return Reason.FUNCTORCH_TRANSFORM
        if backward_in_progress() != -1 or hooks_in_force(True) is not None or hooks_forbidden() is not None:
            return Reason.SAVED_TENSOR_HOOKS
        return None

    @functools.wraps(original)
    def grouped_mm_experts_forward(self, *args, **kwargs):
        if switch.on and not is_compiling():
            stacks = stacks_of(self, dequantizer)
            reason = stacks if isinstance(stacks, Reason) else unsupported()
            if reason is None:
                with nothing_dense_saved(self, stacks) as view:
                    return original(view, *args, **kwargs)
            dequantizer.fall_back(reason)
            if cache.sized and not isinstance(stacks, Reason):
                return original(View(self, stacks, lambda name: stacks[name].dense()), *args, **kwargs)
        return original(self, *args, **kwargs)

    return grouped_mm_experts_forward


def replace_batched_mm(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``batched_mm_experts_forward``, with which ``generate`` decodes tokens on a GPU."""
    dequantizer = Dequantizer(target)

    def divisible(stacks: dict[str, Stack]) -> dict[str, Stack] | Reason:
        if torch.is_grad_enabled():
            return Reason.BATCHED_MM_GRADIENT
        return {name: stack for name, stack in stacks.items() if stack.has_whole_experts()} or Reason.EXPERT_BLOCKS

    @functools.wraps(original)
    def batched_mm_experts_forward(self, *args, **kwargs):
        if switch.on and not is_compiling():
            stacks = stacks_of(self, dequantizer)
            if not isinstance(stacks, Reason):
                stacks = divisible(stacks)
            if not isinstance(stacks, Reason):
                return original(View(self, stacks, stacks.__getitem__), *args, **kwargs)
            dequantizer.fall_back(stacks)
        return original(self, *args, **kwargs)

    return batched_mm_experts_forward
