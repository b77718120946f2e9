"""The forward of a mixture's experts with ``enable(experts="4bit")``.

transformers passes over [tokens * top_k, hidden] some ten times between its grouped products, to mask, cast, weight, sort back
and add. On a GPU one kernel adds LoRA and gates, another weights, adds LoRA and sums each token's rows, and the backward needs
no scatter, as the rows of every token are known; sums are in fp32. Elsewhere, and where few experts are read at a time, the
same is written in PyTorch, with the bits of transformers' own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..patching.context import transforms_active
from ..patching.module_hooks import is_called_otherwise
from . import launch
from .product import ExpertWeight, Lora, grouped, summed
from .read import PackedExperts

GATES = ("SiLUActivation", "SiLU")
# What transformers' decorator writes into a module of experts; Liger's class has none of it
DEFAULTS = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}  # fmt: skip


def trait(module: Any, name: str) -> bool:
    return bool(getattr(module, name, DEFAULTS[name]))


class Saved(torch.autograd.Function):
    """A node that saves a tensor before another's forward runs, for the other's backward."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return nothing.view_as(nothing)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[None, None]:
        return None, None  # it runs after the other, and frees what is saved


class Order(NamedTuple):
    """How the rows that are sorted by expert belong to tokens. A slot is token * top_k + k."""

    expert_of: Tensor  # int16 [rows]
    slot_of: Tensor  # int64 [rows]
    row_of: Tensor  # int64 [tokens, top_k]
    ends: Tensor  # int32 [experts]: the row after the last one of each expert
    saved: Any = None  # a result of ``Saved``: PyTorch 2.11 frees what a node has saved as soon as its result is freed

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Order:
        """Of the experts of each token, int64 [tokens, top_k]."""
        expert_of, slot_of = torch.sort(ids.reshape(-1).short(), stable=True)  # a quarter of the passes of int64
        row_of = slot_of.scatter(0, slot_of, torch.arange(len(slot_of), device=ids.device))  # every element is written
        every = torch.arange(experts, dtype=torch.short, device=ids.device)
        ends = torch.searchsorted(expert_of, every, right=True).int()
        return cls(expert_of, slot_of, row_of.view(ids.shape), ends)

    def for_kernels(self) -> Order:
        return self._replace(saved=Saved.apply(torch.empty(0, requires_grad=True), self.slot_of))

    def tokens(self) -> Tensor:
        """The token of each row, int64 [rows]."""
        return self.slot_of // self.row_of.shape[1]


# A checkpoint's recompute may choose other experts than the forward. Autograd then hands out the recompute's rows, so what
# says whose rows they are must be a saved tensor too: on ``ctx`` it would stay the forward's.


class Gathered(torch.autograd.Function):
    """Each token at the rows of its experts, [rows, hidden] in ``dtype``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(order.row_of)
        ctx.dtype = hidden.dtype
        return hidden.to(dtype).index_select(0, order.tokens())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (row_of,) = ctx.saved_tensors
        return launch.combine(gradient.contiguous(), row_of, ctx.dtype), None, None


class Gated(torch.autograd.Function):
    """silu(gate) * up, where [gate, up] is rows + addend, [rows, 2 * inner]. Only that sum is saved."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, addend: Tensor | None) -> Tensor:
        out, total = launch.silu_and_mul(rows, addend)
        ctx.save_for_backward(total)
        ctx.adds = addend is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        (rows,) = ctx.saved_tensors
        found = launch.silu_and_mul_backward(rows, gradient.contiguous())
        return found, found if ctx.adds else None


class Weighted(torch.autograd.Function):
    """The rows twice: the gradient of the first is weighted by the router, that of the second, for LoRA, is added to it.

    ``Combined`` weights what a linear map has made of the rows. The gradient may be weighted on either side of that map: here,
    before it, so that nothing after it is saved, and a checkpoint's recompute ends before it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Order) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, weights, order.slot_of)
        ctx.set_materialize_grads(False)
        return rows.view_as(rows), rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        rows, weights, slot_of = ctx.saved_tensors
        addend = None if addend is None else addend.contiguous()
        found = launch.weigh(gradient.contiguous(), addend, rows, slot_of, weights, ctx.needs_input_grad[1])
        return *found, None


class Combined(torch.autograd.Function):
    """The sum of each token's rows, times the router's weights, and of the addend's rows. ``Weighted`` weights the gradient.

    It saves nothing, as a checkpoint's recompute ends with what is saved last. Its backward reads what ``Order.saved`` holds,
    which is an argument of its own, ``saved``, so that autograd runs that node too, and frees it.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, addend: Tensor | None, weights: Tensor, order: Order, saved: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.saved, ctx.top_k, ctx.dtype, ctx.adds = saved, order.row_of.shape[1], rows.dtype, addend is not None
        return launch.combine(rows, order.row_of, dtype, weights, addend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slot_of,) = ctx.saved.grad_fn.saved_tensors
        found = gradient.to(ctx.dtype).index_select(0, slot_of // ctx.top_k)
        return found, found if ctx.adds else None, None, None, None, None


def products(
    weight: ExpertWeight, x: Tensor, order: Order, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Each row times the frozen weight of its expert plus the bias, and what LoRA adds to it.

    Args:
        weights: the router's, [tokens, top_k], where ``Combined`` follows at once. What LoRA adds is then weighted here, and
            of the rest the gradient.
    """
    addend, factors = None, weight.factors()
    x, for_lora = (x, x) if weights is None else Weighted.apply(x, weights, order)
    if factors is not None:
        inner = grouped(for_lora, factors[0], order.ends)
        if weights is not None:
            inner = (inner * weights.flatten().index_select(0, order.slot_of)[:, None]).to(inner.dtype)
        addend = grouped(inner, factors[1], order.ends).contiguous()
    y = weight.multiplied(x, order.ends).contiguous()  # the last: a recompute ends before it
    if weight.bias is not None:
        y = summed(y, weight.bias[order.expert_of.long()])
    return y, addend


def forward(
    module: Any, stacks: dict[str, PackedExperts], lora: dict[str, Lora], whole: bool,
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    """As transformers' ``grouped_mm_experts_forward`` or ``batched_mm_experts_forward``.

    Args:
        stacks: those that are read packed, by name.
        lora: the factors of active adapters, by name.
        whole: by grouped products of all experts; else each row is multiplied by a copy of its own expert.
        hidden_states: [tokens, hidden].
        top_k_index, top_k_weights: the experts of each token and the router's weights, [tokens, top_k].

    Returns:
        [tokens, hidden].
    """

    def weight(name: str) -> ExpertWeight:
        bias = getattr(module, f"{name}_bias") if trait(module, "has_bias") else None
        return ExpertWeight(
            stacks.get(name) or getattr(module, name), trait(module, "is_transposed"), lora.get(name), bias
        )

    up = weight("gate_up_proj" if trait(module, "has_gate") else "up_proj")
    arguments = hidden_states, top_k_index, top_k_weights
    if whole and launch.supports(hidden_states) and transforms_active() is None:
        return by_kernels(module, up, lambda: weight("down_proj"), *arguments)
    return in_pytorch(module, up, lambda: weight("down_proj"), *arguments, whole)


# The second weight is read after the first product, as in transformers: a dense one is there no longer than it has to be.


def by_kernels(
    module: Any, up: ExpertWeight, read_down: Callable[[], ExpertWeight],
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    order = Order.of(top_k_index, module.num_experts).for_kernels()
    gate = Gated.apply if is_silu_and_mul(module) else lambda y, addend: gated(module, summed(y, addend))
    y = gate(
        *products(up, Gathered.apply(hidden_states, order, up.dtype), order)
    )  # unnamed: freed as soon as they are summed
    weights, down = top_k_weights.contiguous(), read_down()
    if down.bias is not None or trait(module, "has_post_expert_norm"):  # not linear: the gradient is weighted after it
        y, addend = summed(*products(down, y, order)), None
        y, _ = Weighted.apply(normed(module, y), weights, order)
    else:
        y, addend = products(down, y, order, weights)
    result: Tensor = Combined.apply(y.contiguous(), addend, weights.detach(), order, order.saved, hidden_states.dtype)
    return result


def in_pytorch(
    module: Any, up: ExpertWeight, read_down: Callable[[], ExpertWeight],
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, whole: bool,
) -> Tensor:  # fmt: skip
    (tokens, top_k), slots = top_k_index.shape, torch.arange(top_k_index.numel(), device=top_k_index.device)
    order = Order.of(top_k_index, module.num_experts) if whole else None
    slot_of = slots if order is None else order.slot_of

    def product(weight: ExpertWeight, x: Tensor) -> Tensor:
        return weight.chosen(x, top_k_index.reshape(-1)) if order is None else summed(*products(weight, x, order))

    y = gated(module, product(up, hidden_states[slot_of // top_k]))
    y = normed(module, product(read_down(), y)) * top_k_weights.reshape(-1)[slot_of].unsqueeze(-1)
    y = y if order is None else y[order.row_of.flatten()]
    return y.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def gated(module: Any, rows: Tensor) -> Tensor:
    """What stands between the two products."""
    if hasattr(module, "_apply_gate"):
        result: Tensor = module._apply_gate(rows) if trait(module, "has_gate") else module.act_fn(rows)
        return result
    gate, up = rows.chunk(2, dim=-1)  # Liger's experts
    return torch.nn.functional.silu(gate) * up


def normed(module: Any, rows: Tensor) -> Tensor:
    result: Tensor = module.post_expert_norm(rows) if trait(module, "has_post_expert_norm") else rows
    return result


def is_silu_and_mul(module: Any) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    if not hasattr(module, "_apply_gate"):  # Liger's experts
        return True
    own = getattr(module._apply_gate, "__func__", None) is _default_apply_gate
    own = own and trait(module, "has_gate") and trait(module, "is_concatenated")
    return own and type(module.act_fn).__name__ in GATES and not is_called_otherwise(module.act_fn)
