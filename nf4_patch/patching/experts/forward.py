"""The experts' forward with ``enable(experts="4bit")``: transformers' grouped products, and kernels of ours around them.

transformers passes over [tokens * top_k, hidden] some ten times between its products, to mask, cast, weight, sort back and
add. Here one kernel adds LoRA and gates, another weights, adds LoRA and sums each token's rows, and the backward needs no
scatter, as the rows of every token are known. Sums are in fp32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...nf4 import runtime
from ...nf4.routing import launch
from ..reasons import Reason
from .product import Operand, View

# Capabilities where a benchmark shows it faster than transformers' forward.
FASTER_ON: tuple[tuple[int, int], ...] = ((9, 0),)
GATES = ("SiLUActivation", "SiLU")


class Saved(torch.autograd.Function):
    """A node that saves a tensor before another's forward runs, for the other's backward."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return nothing.view_as(nothing)


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
        row_of = torch.empty_like(slot_of)
        row_of[slot_of] = torch.arange(len(slot_of), device=ids.device)
        every = torch.arange(experts, dtype=torch.short, device=ids.device)
        ends = torch.searchsorted(expert_of, every, right=True).int()
        saved = Saved.apply(torch.empty(0, requires_grad=True), slot_of)
        return cls(expert_of, slot_of, row_of.view(ids.shape), ends, saved)

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
    """silu(gate) * up of rows + addend, [rows, 2 * inner]. The sum takes the place of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, addend: Tensor | None) -> Tensor:
        out = launch.silu_and_mul(rows, addend)
        ctx.save_for_backward(rows)
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

    It saves nothing, as a checkpoint's recompute ends with what is saved last; its backward reads ``Order.saved``.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, addend: Tensor | None, weights: Tensor, order: Order, dtype: torch.dtype
    ) -> Tensor:
        ctx.saved, ctx.top_k, ctx.dtype, ctx.adds = order.saved, order.row_of.shape[1], rows.dtype, addend is not None
        return launch.combine(rows, order.row_of, dtype, weights, addend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slot_of,) = ctx.saved.grad_fn.saved_tensors
        found = gradient.to(ctx.dtype).index_select(0, slot_of // ctx.top_k)
        return found, found if ctx.adds else None, None, None, None


def products(
    view: Any, name: str, x: Tensor, order: Order, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Each row times the frozen weight of its expert plus the bias, and what LoRA adds to it.

    Args:
        weights: the router's, [tokens, top_k], where ``Combined`` follows at once. What LoRA adds is then weighted here, and
            of the rest the gradient.
    """
    from transformers.integrations.moe import _grouped_mm

    weight, addend = getattr(view, name), None
    x, for_lora = (x, x) if weights is None else Weighted.apply(x, weights, order)
    if not view.is_transposed:
        weight = weight.transpose(-2, -1)
    if isinstance(weight, Operand) and weight.lora is not None:
        left, right = weight.lora
        weight = dataclasses.replace(weight, lora=None)
        inner = _grouped_mm(for_lora, left, offs=order.ends)
        if weights is not None:
            inner = (inner * weights.flatten().index_select(0, order.slot_of)[:, None]).to(inner.dtype)
        addend = _grouped_mm(inner, right, offs=order.ends).contiguous()
    y: Tensor = _grouped_mm(x, weight, offs=order.ends).contiguous()  # the last: a recompute ends before it
    if view.has_bias:
        y.add_(getattr(view, f"{name}_bias")[order.expert_of.long()])
    return y, addend


def forward(view: View, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As ``grouped_mm_experts_forward``: [tokens, hidden], of the experts and weights of each token, [tokens, top_k]."""
    module: Any = view
    into = "gate_up_proj" if module.has_gate else "up_proj"
    order = Order.of(top_k_index, module.num_experts)
    x = Gathered.apply(hidden_states, order, getattr(module, into).dtype)
    y, addend = products(module, into, x, order)
    if is_silu_and_mul(module):
        y = Gated.apply(y, addend)
    else:
        y = y if addend is None else y.add_(addend)
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    weights, normed = top_k_weights.contiguous(), getattr(module, "has_post_expert_norm", False)
    if module.has_bias or normed:  # not linear in the rows before: the gradient is weighted after it
        y, addend = products(module, "down_proj", y, order)
        y, addend = y if addend is None else y.add_(addend), None
        y, _ = Weighted.apply(module.post_expert_norm(y) if normed else y, weights, order)
    else:
        y, addend = products(module, "down_proj", y, order, weights)
    result: Tensor = Combined.apply(y.contiguous(), addend, weights.detach(), order, hidden_states.dtype)
    return result


def is_silu_and_mul(module: Any) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    own = getattr(module._apply_gate, "__func__", None) is _default_apply_gate
    return own and module.has_gate and module.is_concatenated and type(module.act_fn).__name__ in GATES


def why_not(module: Any, hidden_states: Any, *_: Any, **__: Any) -> Reason | None:
    """EXPERTS_FORWARD where transformers' forward is not known to be slower, or the experts are spread over GPUs."""
    usable = runtime.triton is not None and runtime.runs_on(hidden_states)
    if (
        usable
        and not getattr(module, "_is_expert_parallel", False)
        and runtime.capability_of(hidden_states.device) in FASTER_ON
    ):
        return None
    return Reason.EXPERTS_FORWARD
