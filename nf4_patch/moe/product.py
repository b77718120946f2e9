"""Products with the weight of all experts, packed or dense, and LoRA on it.

LoRA is a sum of its own: x·W + (x·left)·right, with W never changed. A grouped product of a packed stack keeps the packed one
for the backward.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nf4.runtime import has_memory
from ..patching.context import backward_in_progress, is_compiling, saved_tensors_hooks, transforms_active
from .read import PackedExperts

# left [experts, in, rank] and right [experts, rank, out], in the order of the stack's sides
Lora = tuple[Tensor, Tensor]


class SavedExperts:
    """A packed stack as it is now, for the backward: whatever is done to the module until then, to offload it for
    example, the backward decodes what the forward did.
    """

    def __init__(self, stack: PackedExperts):
        state = copy.copy(stack.state)
        state.state2 = copy.copy(getattr(state, "state2", None))
        parts = [vars(part) for part in (state, state.state2) if part is not None]
        self.places = [(part, name) for part in parts for name, value in part.items() if isinstance(value, Tensor)]
        # the memory of now, also where ``tensor.data`` is replaced
        self.tensors = stack.packed.detach(), *(part[name].detach() for part, name in self.places)
        self.versions = [None if tensor.is_inference() else tensor._version for tensor in self.tensors]
        self.stack = dataclasses.replace(stack, state=state)

    def dense(self) -> Tensor:
        """
        Raises:
            RuntimeError: the memory was freed or written into since the forward. In compiled code only autograd checks the latter.
        """
        stack, (packed, *fields) = self.stack, self.tensors
        if not (is_compiling() or all(map(has_memory, self.tensors))):
            raise RuntimeError(
                f"the memory of packed experts {list(stack.state.shape)} was freed between forward and backward: "
                "bring it back before the backward, or free it in a hook on the experts module"
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
            stack = PackedExperts(packed, stack.state, stack.dequantizer)
        return stack.dense()


class FrozenProduct(torch.autograd.Function):
    """``ExpertWeight.multiplied`` of a packed stack that is frozen, and is decoded again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ExpertWeight, ends: Tensor) -> Tensor:
        assert isinstance(weight.stack, PackedExperts)
        ctx.kept, ctx.is_transposed = SavedExperts(weight.stack), weight.is_transposed
        # autograd checks the versions of what is saved; hooks would copy it, and turn the check off
        watched = ctx.kept.tensors if saved_tensors_hooks(True) is None else ()
        ctx.save_for_backward(ends, *(tensor for tensor in watched if not tensor.is_inference()))
        return grouped(x, weight.frozen(), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ends, *_ = ctx.saved_tensors  # raises where one was changed in place
        weight = ctx.kept.dense()
        return grouped(gradient, weight.mT if ctx.is_transposed else weight, ends), None, None


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [rows, in], sorted by expert, times weight [experts, in, out] of each row's expert; ``ends``: int32 [experts]."""
    from transformers.integrations.moe import _grouped_mm

    result: Tensor = _grouped_mm(x, weight, offs=ends)
    return result


def summed(y: Tensor, addend: Tensor | None) -> Tensor:
    """Return y + addend in the dtype of y.

    The sum is a new tensor, because selective checkpointing may have kept y, the result of an op, for the recompute.
    """
    return y if addend is None else (y + addend).to(y.dtype)


def is_checkpointed() -> bool:
    """Return whether this forward is a checkpoint's, or its recompute: what it saves is dropped, or used at once.

    PyTorch calls only the innermost hooks on saved tensors. Those of ``torch.utils.checkpoint`` drop tensors. Other hooks keep
    them, or copies in host memory as ``save_on_cpu`` does, also in the recompute of a reentrant checkpoint.
    """
    hooks = saved_tensors_hooks(True)
    if hooks is None:
        return backward_in_progress() != -1
    return hooks is True or getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_kept_packed() -> bool:
    """Return whether autograd must keep a packed stack instead of the dense one.

    Under gradient checkpointing it need not: the backward uses the dense stack of the recompute, without a third decode.
    """
    return torch.is_grad_enabled() and transforms_active() is None and not is_checkpointed()


class ExpertWeight(NamedTuple):
    """The weight of all experts, [experts, ...], packed or dense, and LoRA on it."""

    stack: PackedExperts | Tensor
    is_transposed: bool  # [experts, in, out], as gpt-oss has it
    lora: Lora | None = None
    bias: Tensor | None = None  # [experts, out]

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.state.dtype if isinstance(self.stack, PackedExperts) else self.stack.dtype

    def frozen(self) -> Tensor:
        """Dense, without LoRA, not to be written into: [experts, in, out]."""
        dense = self.stack.dense() if isinstance(self.stack, PackedExperts) else self.stack
        return dense if self.is_transposed else dense.mT

    def multiplied(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows sorted by expert times the frozen weight, [rows, out]."""
        x = x.to(self.dtype)
        if isinstance(self.stack, PackedExperts) and is_kept_packed():
            product: Tensor = FrozenProduct.apply(x, self, ends)  # type: ignore[no-untyped-call]
            return product
        return grouped(x, self.frozen(), ends)

    def factors(self) -> Lora | None:
        """LoRA's as ``frozen`` lies: [experts, in, rank] and [experts, rank, out]."""
        if self.lora is None or self.is_transposed:
            return self.lora
        return self.lora[1].mT, self.lora[0].mT

    def chosen(self, x: Tensor, experts: Tensor) -> Tensor:
        """Each row times its own expert's weight, LoRA included, plus bias; of a packed stack no other expert is decoded."""
        from transformers.integrations.moe import _batched_linear

        weight = self.stack[experts]
        if self.lora is not None:
            weight = weight + (self.lora[0][experts] @ self.lora[1][experts]).to(weight.dtype)
        y: Tensor = _batched_linear(x, weight, is_transposed=self.is_transposed)
        return summed(y, None if self.bias is None else self.bias[experts])
