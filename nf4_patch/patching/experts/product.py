"""The weight of all experts as transformers' grouped and batched products use it.

transformers' forward runs on a view of the experts module. A grouped product of a packed stack keeps the packed one for
the backward, and LoRA is a sum of its own: x·W + (x·left)·right, with W never changed.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...nf4.runtime import has_memory
from ..context import backward_in_progress, is_compiling, saved_tensors_hooks, transforms_active
from .read import Stack

Product = Callable[..., Tensor]  # of x [rows, in], a weight [experts, in, out] and offs, where each expert's rows end
# left [experts, in, rank] and right [experts, rank, out], in the order of the stack's sides
Lora = tuple[Tensor, Tensor]


class Pending(threading.local):
    """LoRA on experts whose forward this thread is in: by the id of the module and the name of the stack."""

    def __init__(self) -> None:
        self.lora: dict[tuple[int, str], Lora] = {}


pending = Pending()


class Kept:
    """A packed stack as it is now, for the backward: whatever is done to the module until then, to offload it for
    example, the backward decodes what the forward did.
    """

    def __init__(self, stack: Stack):
        state = copy.copy(stack.state)
        state.state2 = copy.copy(getattr(state, "state2", None))
        fields = [value for part in (state, state.state2) if part is not None for value in vars(part).values()]
        self.tensors = stack.packed.detach(), *(value for value in fields if isinstance(value, Tensor))
        self.stack = dataclasses.replace(stack, state=state)

    def dense(self) -> Tensor:
        """
        Raises:
            RuntimeError: memory was freed in between. That nothing was changed in place autograd checks.
        """
        stack, packed = self.stack, self.tensors[0]
        if not (is_compiling() or all(map(has_memory, self.tensors))):
            raise RuntimeError(
                f"the memory of packed experts {list(stack.state.shape)} was freed between forward and backward: "
                "bring it back before the backward, or free it in a hook on the experts module"
            )
        if is_compiling() or stack.packed.data_ptr() != packed.data_ptr():  # ``parameter.data`` was replaced
            stack = Stack(packed, stack.state, stack.dequantizer)
        return stack.dense()


class FrozenProduct(torch.autograd.Function):
    """``product(x, weight, offs)`` of a packed stack that is frozen, and is decoded again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Operand, product: Product, offs: Tensor) -> Tensor:
        assert isinstance(weight.stack, Stack)
        ctx.kept, ctx.transposed, ctx.product = Kept(weight.stack), weight.transposed, product
        ctx.save_for_backward(offs, *(tensor for tensor in ctx.kept.tensors if not tensor.is_inference()))
        return product(x, weight.frozen(), offs=offs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        offs, *_ = ctx.saved_tensors  # raises where one was changed in place
        weight = ctx.kept.dense()
        return ctx.product(gradient, weight if ctx.transposed else weight.mT, offs=offs), None, None, None


def is_kept_packed() -> bool:
    """Whether autograd is to keep a packed stack, not the dense one.

    Under gradient checkpointing the hooks drop what is saved in the forward, and what the recompute decodes serves the
    backward at once: it is not decoded a third time.
    """
    recomputed = backward_in_progress() != -1 or saved_tensors_hooks(True) is not None
    return torch.is_grad_enabled() and transforms_active() is None and not recomputed


@dataclasses.dataclass(frozen=True)
class Operand:
    """The weight of all experts, [experts, ...], packed or dense, and LoRA on it. What is no grouped product of it and no
    choice of some experts gets a dense tensor.
    """

    stack: Stack | Tensor
    lora: Lora | None = None
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.state.dtype if isinstance(self.stack, Stack) else self.stack.dtype

    @property
    def device(self) -> torch.device:
        return self.stack.packed.device if isinstance(self.stack, Stack) else self.stack.device

    def data_ptr(self) -> int:
        """Aligned, as transformers asks on a CPU: that of a tensor which does not exist yet."""
        return 0 if isinstance(self.stack, Stack) else self.stack.data_ptr()

    @property
    def shape(self) -> torch.Size:
        experts, *sides = self.stack.state.shape if isinstance(self.stack, Stack) else self.stack.shape
        return torch.Size((experts, *(reversed(sides) if self.transposed else sides)))

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def transpose(self, *dims: int) -> Operand | Tensor:
        if sorted(dim % 3 for dim in dims) != [1, 2]:
            return self.dense().transpose(*dims)
        lora = None if self.lora is None else (self.lora[1].mT, self.lora[0].mT)
        return Operand(self.stack, lora, not self.transposed)

    def frozen(self) -> Tensor:
        """The dense weight without LoRA, not to be written into."""
        dense = self.stack.dense() if isinstance(self.stack, Stack) else self.stack
        return dense.mT if self.transposed else dense

    def dense(self) -> Tensor:
        """The dense weight that LoRA is a part of."""
        return summed(self.frozen(), self.lora)

    def __getitem__(self, ids: Tensor) -> Tensor:
        """The experts ``ids``, int64 [n]: [n, ...]. Of a packed stack no other is decoded."""
        chosen = self.stack[ids]
        return summed(
            chosen.mT if self.transposed else chosen,
            None if self.lora is None else (self.lora[0][ids], self.lora[1][ids]),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense(), name)

    def multiplied(self, x: Tensor, product: Product, offs: Tensor) -> Tensor:
        if isinstance(self.stack, Stack) and is_kept_packed():
            y: Tensor = FrozenProduct.apply(x, self, product, offs)  # type: ignore[no-untyped-call]
        else:
            y = product(x, self.frozen(), offs=offs)
        if self.lora is None:
            return y
        left, right = self.lora
        return y.add_(product(product(x, left, offs=offs), right, offs=offs))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What PyTorch calls in place of ``function`` where one of its arguments is an Operand."""
        kwargs = kwargs or {}
        given = {name: value for name, value in kwargs.items() if value is not None}
        if given.keys() == {"offs"} and len(args) == 2 and isinstance(args[1], cls):  # whichever grouped_mm it is
            return args[1].multiplied(args[0], function, given["offs"])
        return function(*(arg.dense() if isinstance(arg, cls) else arg for arg in args), **kwargs)


def summed(weight: Tensor, lora: Lora | None) -> Tensor:
    return weight if lora is None else weight + (lora[0] @ lora[1]).to(weight.dtype)


class View:
    """An experts module whose packed stacks, and weights with LoRA on them, are operands."""

    def __init__(self, module: Any, stacks: dict[str, Stack], lora: dict[str, Lora]):
        vars(self).update(_module=module, _stacks=stacks, _lora=lora)

    def __getattr__(self, name: str) -> Any:
        value = self._stacks[name] if name in self._stacks else getattr(self._module, name)
        return Operand(value, self._lora.get(name)) if name in self._stacks or name in self._lora else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)
