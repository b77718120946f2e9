"""Matrix products with a stack of experts [experts, ...], packed or dense, with or without LoRA.

LoRA is computed as x·W + (x·left)·right, so that the weight W does not change. Without gradient checkpointing, the packed
stack is saved for the backward, not the dense stack.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nf4.runtime import has_memory
from ..patching.context import backward_in_progress, is_compiling, saved_tensors_hooks, transforms_active
from ..patching.targets import MODULES
from .read import PackedExperts

EXPERTS = MODULES["experts"]  # the library's Python module that computes the products
# A pair (left, right). LoRA adds the product left @ right to a stack.
# For a stack [experts, in, out], left is [experts, in, rank] and right is [experts, rank, out].
# For a stack [experts, out, in], left is [experts, out, rank] and right is [experts, rank, in].
Lora = tuple[Tensor, Tensor]


class SavedExperts:
    """A packed stack that is saved, so that the backward decodes the same bytes as the forward."""

    def __init__(self, stack: PackedExperts):
        state = copy.copy(stack.state)
        state.state2 = copy.copy(getattr(state, "state2", None))
        parts = [vars(part) for part in (state, state.state2) if part is not None]
        self.places = [(part, name) for part in parts for name, value in part.items() if isinstance(value, Tensor)]
        # A detached tensor keeps its memory even if other code sets ``data`` of the original tensor.
        self.tensors = stack.packed.detach(), *(part[name].detach() for part, name in self.places)
        self.versions = [None if tensor.is_inference() else tensor._version for tensor in self.tensors]
        self.stack = dataclasses.replace(stack, state=state)

    def dense(self) -> Tensor:
        """Decode the saved stack, [experts, ...].

        Raises:
            RuntimeError: the stack's memory was freed or written to since the forward. Compiled code skips this check,
                because autograd itself checks that no saved tensor was written to.
        """
        stack, (packed, *fields) = self.stack, self.tensors
        if not (is_compiling() or all(map(has_memory, self.tensors))):
            raise RuntimeError(
                f"the memory of packed experts {list(stack.state.shape)} was freed between forward and backward. "
                "Load it again before the backward, or free it in a hook on the experts module"
            )
        if not is_compiling():
            for tensor, version in zip(self.tensors, self.versions, strict=True):
                if version is not None and tensor._version != version:
                    raise RuntimeError(
                        f"packed experts {list(stack.state.shape)} have been modified by an inplace operation between forward and "
                        "backward: change them after the backward"
                    )
            for (part, name), kept in zip(self.places, fields, strict=True):
                if part[name].data_ptr() != kept.data_ptr():
                    part[name] = kept
        if is_compiling() or stack.packed.data_ptr() != packed.data_ptr():
            stack = PackedExperts(packed, stack.state, stack.dequantizer, decode=stack.decode)
        return stack.dense()


class FrozenProduct(torch.autograd.Function):
    """A grouped product with a packed stack, which the backward decodes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ExpertWeight, ends: Tensor) -> Tensor:
        assert isinstance(weight.stack, PackedExperts)
        ctx.kept, ctx.is_transposed = SavedExperts(weight.stack), weight.is_transposed
        # Save the packed tensors so that autograd checks that no code writes into them before the backward. If there are
        # hooks on saved tensors, save none, because hooks copy tensors, and autograd does not check copies.
        watched = ctx.kept.tensors if saved_tensors_hooks(True) is None else ()
        ctx.save_for_backward(ends, *(tensor for tensor in watched if not tensor.is_inference()))
        return grouped(x, weight.frozen(), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ends, *_ = ctx.saved_tensors  # raises an error if a saved tensor was changed in place
        weight = ctx.kept.dense()
        return grouped(gradient, weight.mT if ctx.is_transposed else weight, ends), None, None


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by its expert's weight [experts, in, out].

    ``ends`` holds the index after each expert's last row, int32 [experts].
    """
    result: Tensor = sys.modules[EXPERTS]._grouped_mm(x, weight, offs=ends)
    return result


def summed(y: Tensor, addend: Tensor | None) -> Tensor:
    """Return y + addend in the dtype of y, not in place, because selective checkpointing might have saved y."""
    return y if addend is None else (y + addend).to(y.dtype)


def frees_saved_tensors() -> bool:
    """Return whether tensors that autograd saves now are freed soon, because a checkpoint's forward or recompute runs.

    Return False if other hooks on saved tensors are innermost, such as those of ``save_on_cpu``, because they keep the
    tensors.
    """
    hooks = saved_tensors_hooks(True)
    if hooks is None:
        return backward_in_progress() != -1
    return hooks is True or getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_kept_packed() -> bool:
    """Return whether to save the packed stack for the backward. A checkpoint's recompute saves the dense stack instead."""
    return torch.is_grad_enabled() and transforms_active() is None and not frees_saved_tensors()


class ExpertWeight(NamedTuple):
    """A stack of experts, packed or dense, with its LoRA factors and bias."""

    stack: PackedExperts | Tensor
    is_transposed: bool  # True if the stack is [experts, in, out], as in gpt-oss; False if it is [experts, out, in]
    lora: Lora | None = None
    bias: Tensor | None = None  # [experts, out]

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.state.dtype if isinstance(self.stack, PackedExperts) else self.stack.dtype

    def is_trained(self) -> bool:
        return isinstance(self.stack, Tensor) and self.stack.requires_grad

    def trained(self) -> list[Tensor]:
        """Return the tensors that might need a gradient."""
        tensors = (self.stack, *(self.lora or ()), self.bias)
        return [each for each in tensors if isinstance(each, Tensor)]

    def frozen(self) -> Tensor:
        """Return the dense weight without LoRA, [experts, in, out], read-only, because it might be cached."""
        dense = self.stack.dense() if isinstance(self.stack, PackedExperts) else self.stack
        return dense if self.is_transposed else dense.mT

    def multiplied(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the grouped product of x [rows, in] with the weight, without LoRA and bias."""
        x = x.to(self.dtype)
        if isinstance(self.stack, PackedExperts) and is_kept_packed():
            product: Tensor = FrozenProduct.apply(x, self, ends)  # type: ignore[no-untyped-call]
            return product
        return grouped(x, self.frozen(), ends)

    def factors(self) -> Lora | None:
        """Return the LoRA factors as [experts, in, rank] and [experts, rank, out]."""
        if self.lora is None or self.is_transposed:
            return self.lora
        return self.lora[1].mT, self.lora[0].mT

    def chosen(self, x: Tensor, experts: Tensor) -> Tensor:
        """Multiply each row of x [rows, in] by the weight of its expert, with LoRA and bias.

        ``experts`` holds the expert of each row, int64 [rows]. Only these experts are decoded.
        """
        weight = self.stack[experts]
        if self.lora is not None:
            weight = weight + (self.lora[0][experts] @ self.lora[1][experts]).to(weight.dtype)
        y: Tensor = sys.modules[EXPERTS]._batched_linear(x, weight, is_transposed=self.is_transposed)
        return summed(y, None if self.bias is None else self.bias[experts])
