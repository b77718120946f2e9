"""The forward of a mixture's experts with ``enable(experts="4bit")``.

Between its grouped products, transformers reads and writes [tokens * top_k, hidden] some ten times: it masks, casts, weights,
sorts back and adds. Here, on a GPU, one kernel adds LoRA and applies the gate. A second kernel weights the rows, adds LoRA and
sums the rows of each token in fp32. The backward needs no scatter, because the rows of every token are known. On a CPU, and for
generation, the forward is written in PyTorch. Without LoRA its results are bit-identical to transformers'.
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
# The attributes that transformers' decorator sets on an experts module. Liger's class has none of them.
DEFAULTS = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}  # fmt: skip


def trait(module: Any, name: str) -> bool:
    """Return an attribute of an experts module that transformers' decorator sets, or its default from DEFAULTS."""
    return bool(getattr(module, name, DEFAULTS[name]))


class Saved(torch.autograd.Function):
    """Autograd node that saves a tensor before the forward of another node runs, for the backward of that other node."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return nothing.view_as(nothing)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[None, None]:
        return None, None  # runs after the other node's backward; autograd then frees the saved tensor


class Order(NamedTuple):
    """The rows of all tokens, sorted by expert, and the token of each row. A slot is token * top_k + k."""

    expert_of: Tensor  # int16 [rows]
    slot_of: Tensor  # int64 [rows]
    row_of: Tensor  # int64 [tokens, top_k]
    ends: Tensor  # int32 [experts]: the index after the last row of each expert
    # The result of ``Saved``. Kept alive, because PyTorch 2.11 frees a node's saved tensors together with its result.
    saved: Any = None

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Order:
        """Build the Order from the chosen experts of each token, int64 [tokens, top_k]."""
        # sorting int16 takes a quarter of int64's passes
        expert_of, slot_of = torch.sort(ids.reshape(-1).short(), stable=True)
        row_of = slot_of.scatter(0, slot_of, torch.arange(len(slot_of), device=ids.device))  # inverts slot_of
        every = torch.arange(experts, dtype=torch.short, device=ids.device)
        ends = torch.searchsorted(expert_of, every, right=True).int()
        return cls(expert_of, slot_of, row_of.view(ids.shape), ends)

    def for_kernels(self) -> Order:
        """Return a copy whose slot_of is saved for the backward of ``Combined``."""
        return self._replace(saved=Saved.apply(torch.empty(0, requires_grad=True), self.slot_of))

    def tokens(self) -> Tensor:
        """Return the token of each row, int64 [rows]."""
        return self.slot_of // self.row_of.shape[1]


# A checkpoint's recompute may choose other experts than the forward. Autograd then returns the saved rows of the recompute.
# The row indices are therefore saved tensors too: an attribute of ``ctx`` would still be the forward's.


class Gathered(torch.autograd.Function):
    """Copy each token to the rows of its experts: [tokens, hidden] to [rows, hidden] in ``dtype``."""

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
    """Compute silu(gate) * up, where [gate, up] = rows + addend, [rows, 2 * inner]. Only this sum is saved for the backward."""

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
    """Return two views of the rows: one for the frozen weight, one for LoRA. The backward weights and sums their gradients.

    ``Combined`` weights the output of the down projection by the router. The projection is linear, so its gradient may be weighted
    before or after it. Weighting the gradient of the input means that the projection's output need not be saved. A checkpoint's
    recompute then stops before the projection. The gradient of the LoRA view arrives weighted.
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
    """Weight the rows by the router, add the addend's rows, and sum the rows of each token. ``Weighted`` weights the gradient.

    ``Combined`` saves no tensor, because a checkpoint's recompute stops at the last saved one. The backward reads the tensor that
    ``Order.saved`` holds. ``saved`` is an argument too, so that autograd runs its node and frees the tensor.
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
    """Multiply each row by the frozen weight of its expert and add the bias. Return this product and LoRA's, which is added later.

    Args:
        x: [rows, in], sorted by expert.
        weights: the router's weights, [tokens, top_k], if ``Combined`` follows directly. LoRA's product is then weighted here.
            For the frozen product, only the gradient is.
    """
    addend, factors = None, weight.factors()
    x, for_lora = (x, x) if weights is None else Weighted.apply(x, weights, order)
    if factors is not None:
        inner = grouped(for_lora, factors[0], order.ends)
        if weights is not None:
            inner = (inner * weights.flatten().index_select(0, order.slot_of)[:, None]).to(inner.dtype)
        addend = grouped(inner, factors[1], order.ends).contiguous()
    y = weight.multiplied(x, order.ends).contiguous()  # last, so that a checkpoint's recompute stops before it
    if weight.bias is not None:
        y = summed(y, weight.bias[order.expert_of.long()])
    return y, addend


def forward(
    module: Any, stacks: dict[str, PackedExperts], lora: dict[str, Lora], whole: bool,
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    """Compute what transformers' ``grouped_mm_experts_forward`` or ``batched_mm_experts_forward`` computes.

    Args:
        stacks: the packed stacks by name. Other stacks are read from the module as dense weights.
        lora: the factors of the active adapters by stack name.
        whole: use grouped products with all experts; otherwise multiply each row by a copy of its own expert.
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


# Both functions below read the second weight after the first product, as transformers does, so that its dense copy lives shortly.


def by_kernels(
    module: Any, up: ExpertWeight, read_down: Callable[[], ExpertWeight],
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    order = Order.of(top_k_index, module.num_experts).for_kernels()
    gate = Gated.apply if is_silu_and_mul(module) else lambda y, addend: gated(module, summed(y, addend))
    # the products have no names, so that they are freed once summed
    y = gate(*products(up, Gathered.apply(hidden_states, order, up.dtype), order))
    weights, down = top_k_weights.contiguous(), read_down()
    # a bias or a norm makes the map nonlinear, so the gradient is weighted at its output
    if down.bias is not None or trait(module, "has_post_expert_norm"):
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
    """Apply the gate and activation between the two products: [rows, 2 * inner] to [rows, inner]."""
    if hasattr(module, "_apply_gate"):
        result: Tensor = module._apply_gate(rows) if trait(module, "has_gate") else module.act_fn(rows)
        return result
    gate, up = rows.chunk(2, dim=-1)  # Liger's experts
    return torch.nn.functional.silu(gate) * up


def normed(module: Any, rows: Tensor) -> Tensor:
    """Apply the module's norm after the second product, if the module has one."""
    result: Tensor = module.post_expert_norm(rows) if trait(module, "has_post_expert_norm") else rows
    return result


def is_silu_and_mul(module: Any) -> bool:
    """Return whether the module's gate is silu(gate) * up, with all of gate before all of up in memory."""
    from transformers.integrations.moe import _default_apply_gate

    if not hasattr(module, "_apply_gate"):  # Liger's experts
        return True
    own = getattr(module._apply_gate, "__func__", None) is _default_apply_gate
    own = own and trait(module, "has_gate") and trait(module, "is_concatenated")
    return own and type(module.act_fn).__name__ in GATES and not is_called_otherwise(module.act_fn)
