"""The forward of a mixture's experts with ``enable(experts="4bit")``.

Around the two grouped products, by gate_up_proj and down_proj, transformers reads and writes all rows about ten times. On
a GPU, two kernels do this work. The first adds LoRA and applies the gate. The second applies the router's weights, adds
LoRA and sums each token's rows in fp32. The backward needs no scatter, because ``Order`` holds the rows of every token.
On a CPU, and for generation, PyTorch operators run. Without LoRA, their results are bit-identical to those of
transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patching.context import MODES, PLAIN, is_compiling, only_keeps_results, saved_tensors_hooks, watched
from ..patching.decisions import decisions_of
from ..patching.module_hooks import is_called_otherwise, is_written_in
from ..patching.reasons import Reason
from ..patching.targets import MODULES
from . import launch, reference
from .product import EXPERTS, ExpertWeight, Lora, grouped, summed
from .read import PackedExperts

ACTIVATIONS = MODULES["activation functions"], "torch.nn.modules.activation"
GATES = ("SiLUActivation", "SiLU")
# Attributes that transformers' decorator sets on an experts module, with the values for a class that lacks them, such as
# Liger's.
DEFAULTS = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}  # fmt: skip


def trait(module: Any, name: str) -> bool:
    """Return a boolean attribute of an experts module, or its value in DEFAULTS if the module lacks it."""
    return bool(getattr(module, name, DEFAULTS[name]))


def kernels_or_reference(gradient: Tensor) -> Any:
    """Return ``reference`` if a backward needs PyTorch operators, else ``launch``.

    Compiled autograd, ``create_graph=True``, ``is_grads_batched=True``, modes, traces and tensor subclasses need them.
    """
    if is_compiling() or torch.is_grad_enabled() or watched(gradient) is not None:
        return reference
    return launch


class Saved(torch.autograd.Function):
    """Saves a tensor for the backward of ``Combined`` in an autograd node that runs before the down projection."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return nothing.view_as(nothing)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[None, None]:
        return None, None  # after the backward of ``Combined``, so that autograd then frees the saved tensor


class Order(NamedTuple):
    """The order of the rows, sorted by expert."""

    expert_of: Tensor  # the expert of each row, int16 [rows]
    slot_of: Tensor  # the slot of each row, int64 [rows]
    row_of: Tensor  # the row of each slot, int64 [tokens, top_k]
    ends: Tensor  # the index after the last row of each expert, int32 [experts]
    # The result of ``Saved``, which has to live until the backward, because PyTorch 2.11 frees the tensors that an autograd
    # node saved as soon as the node's result is freed.
    saved: Any = None

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Order:
        """Sort the rows of ``ids``, int64 [tokens, top_k], by expert."""
        # Sort the ids as int16, because sorting int64 takes four times as many passes.
        expert_of, slot_of = torch.sort(ids.reshape(-1).short(), stable=True)
        row_of = slot_of.scatter(0, slot_of, torch.arange(len(slot_of), device=ids.device))  # inverts slot_of
        every = torch.arange(experts, dtype=torch.short, device=ids.device)
        ends = torch.searchsorted(expert_of, every, right=True).int()
        return cls(expert_of, slot_of, row_of.view(ids.shape), ends)

    def for_backward(self, needed: bool) -> Order:
        """Return a copy that, if ``needed``, saves slot_of for the backward of ``Combined``."""
        return self._replace(saved=Saved.apply(torch.empty(0, requires_grad=needed), self.slot_of))

    def tokens(self) -> Tensor:
        """Return each row's token, int64 [rows]."""
        return self.slot_of // self.row_of.shape[1]


# The classes below save row indices with ``ctx.save_for_backward``, not as attributes of ``ctx``. The recompute of a
# checkpoint might choose experts other than the forward's, and the backward needs the recompute's indices. An attribute of
# ``ctx`` would still hold the forward's indices.


class Gathered(torch.autograd.Function):
    """Copy each token's hidden state [tokens, hidden] to its rows [rows, hidden]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(order.row_of)
        ctx.dtype = hidden.dtype
        return hidden.to(dtype).index_select(0, order.tokens())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (row_of,) = ctx.saved_tensors
        return kernels_or_reference(gradient).combine(gradient.contiguous(), row_of, ctx.dtype), None, None


class Gated(torch.autograd.Function):
    """Return silu(gate) * up, [rows, inner], and total = rows + addend, [rows, 2 * inner], whose halves are gate and up.

    Only the total is saved. It is also a result, so that autograd can differentiate the backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, total = launch.silu_and_mul(rows, addend)
        ctx.save_for_backward(total)
        ctx.set_materialize_grads(False)
        ctx.adds = addend is not None
        return out, total if ctx.adds else None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_total: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        (rows,) = ctx.saved_tensors
        found = of_total
        if gradient is not None:
            found = kernels_or_reference(gradient).silu_and_mul_backward(rows, gradient.contiguous())
            found = found if of_total is None else found + of_total
        return found, found if ctx.adds else None


class Weighted(torch.autograd.Function):
    """Multiply, in the backward, the gradient of the down projection's input by the router's weights.

    The projection is linear, so the output's gradient need not be multiplied, and the output need not be saved. The
    recompute of a checkpoint then stops before the projection.

    The forward returns its input twice. The weights multiply the gradient of the first result, which feeds the frozen
    projection, but not that of the second, which feeds LoRA, because ``products`` already multiplied LoRA's product.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Order) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, weights, order.slot_of)
        ctx.set_materialize_grads(False)
        return rows.view_as(rows), rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, addend: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        rows, weights, slot_of = ctx.saved_tensors
        addend = None if addend is None else addend.contiguous()
        weigh = kernels_or_reference(gradient).weigh
        return *weigh(gradient.contiguous(), addend, rows, slot_of, weights, ctx.needs_input_grad[1]), None


class Combined(torch.autograd.Function):
    """Multiply the rows by the router's weights, add ``addend``, and sum each token's rows.

    In the backward, ``Weighted`` multiplies by the weights. Under a checkpoint, this node saves no tensor, so that the
    recompute stops before the down projection. The backward then reads slot_of from the node ``Saved``, whose result is
    ``saved``.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, addend: Tensor | None, weights: Tensor, order: Order, saved: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.saved, ctx.top_k, ctx.dtype, ctx.adds = saved, order.row_of.shape[1], rows.dtype, addend is not None
        # Without a checkpoint's hooks on saved tensors, save slot_of in this node. Compiled autograd needs this, because it
        # can read only the tensors that this node saved.
        if saved_tensors_hooks(True) is None or saved.grad_fn is None:
            ctx.save_for_backward(order.slot_of)
        return launch.combine(rows, order.row_of, dtype, weights, addend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slot_of,) = ctx.saved_tensors or ctx.saved.grad_fn.saved_tensors
        found = gradient.to(ctx.dtype).index_select(0, slot_of // ctx.top_k)
        return found, found if ctx.adds else None, None, None, None, None


def products(
    weight: ExpertWeight, x: Tensor, order: Order, weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return each row's product with its frozen weight, plus bias, and with the LoRA factors (None without LoRA).

    x is [rows, in], sorted by expert. Pass the router's weights [tokens, top_k] if ``Combined`` follows. They multiply
    LoRA's product here, and ``Combined`` multiplies the frozen product by them.
    """
    addend, factors = None, weight.factors()
    x, for_lora = (x, x) if weights is None else Weighted.apply(x, weights, order)
    if factors is not None:
        inner = grouped(for_lora, factors[0], order.ends)
        if weights is not None:
            inner = (inner * weights.flatten().index_select(0, order.slot_of)[:, None]).to(inner.dtype)
        addend = grouped(inner, factors[1], order.ends).contiguous()
    # Compute the frozen product last, so that the recompute of a checkpoint stops before it.
    y = weight.multiplied(x, order.ends).contiguous()
    if weight.bias is not None:
        y = summed(y, weight.bias[order.expert_of.long()])
    return y, addend


def forward(
    module: Any, stacks: dict[str, PackedExperts], lora: dict[str, Lora], whole: bool,
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    """Run the experts of one layer, in place of ``grouped_mm_experts_forward`` or ``batched_mm_experts_forward``.

    hidden_states and the result are [tokens, hidden]. top_k_index (the chosen experts) and top_k_weights are [tokens,
    top_k]. Stacks that are not in ``stacks`` are read from the module as dense weights. ``lora`` has the factors of the
    active adapters, by stack. With ``whole``, multiply all rows in grouped products, otherwise each row by a copy of
    its weight.
    """

    def weight(name: str) -> ExpertWeight:
        bias = getattr(module, f"{name}_bias") if trait(module, "has_bias") else None
        return ExpertWeight(
            stacks.get(name) or getattr(module, name), trait(module, "is_transposed"), lora.get(name), bias
        )

    up = weight("gate_up_proj" if trait(module, "has_gate") else "up_proj")
    arguments = hidden_states, top_k_index, top_k_weights
    is_plain = all(type(each) in PLAIN for each in arguments)
    if whole and is_plain and launch.supports(hidden_states) and may_use_kernels():
        return by_kernels(module, up, lambda: weight("down_proj"), *arguments)
    return in_pytorch(module, up, lambda: weight("down_proj"), *arguments, whole)


def may_use_kernels() -> bool:
    """Return whether no mode, trace or transform has to see this call's operations. A recompute repeats the forward's answer."""
    decisions, earlier = decisions_of("experts") or ([], None)
    if earlier is False:
        return False
    reason = watched()
    if reason is Reason.DISPATCH_MODE and only_keeps_results():
        reason = None
    decisions.append(reason is None or (earlier is True and reason in MODES))
    return decisions[-1] is True


# Both functions below read the weight of the down projection after the first product, as transformers does. A dense copy
# of the weight then takes memory for a shorter time.


def by_kernels(
    module: Any, up: ExpertWeight, read_down: Callable[[], ExpertWeight],
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    order = Order.of(top_k_index, module.num_experts)
    gate = (
        (lambda *both: Gated.apply(*both)[0])
        if is_silu_and_mul(module)
        else lambda y, addend: gated(module, summed(y, addend))
    )
    # Do not store the two products in a variable, so that their memory is freed as soon as ``gate`` has added them.
    y = gate(*products(up, Gathered.apply(hidden_states, order, up.dtype), order))
    # A copy, because the caller may write into its weights before the backward, and because they may be inference tensors.
    weights, down = top_k_weights.clone(memory_format=torch.contiguous_format), read_down()
    has_norm = trait(module, "has_post_expert_norm")
    trained = y, weights, *down.trained(), *(module.post_expert_norm.parameters() if has_norm else ())
    order = order.for_backward(torch.is_grad_enabled() and any(each.requires_grad for each in trained))
    # With a bias or a norm, the down projection is not linear. If its weight is trained, the gradient of the weight needs
    # the router's weights too. In both cases, ``Weighted`` is applied to the projection's output, so that the router's
    # weights multiply the gradient of the output, not of the input.
    if down.bias is not None or has_norm or down.is_trained():
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
    return y.view(tokens, top_k, y.shape[-1]).sum(dim=1).to(hidden_states.dtype)


def gated(module: Any, rows: Tensor) -> Tensor:
    """Apply the module's gate and activation to [rows, 2 * inner]. Return [rows, inner]."""
    if hasattr(module, "_apply_gate"):
        result: Tensor = module._apply_gate(rows) if trait(module, "has_gate") else module.act_fn(rows)
        return result
    gate, up = rows.chunk(2, dim=-1)  # Liger's experts
    return torch.nn.functional.silu(gate) * up


def normed(module: Any, rows: Tensor) -> Tensor:
    """Apply the module's norm, if any, after the down projection."""
    result: Tensor = module.post_expert_norm(rows) if trait(module, "has_post_expert_norm") else rows
    return result


def is_silu_and_mul(module: Any) -> bool:
    """Return whether the module computes silu(gate) * up, with gate as the first half."""
    if not hasattr(module, "_apply_gate"):  # Liger's experts
        return True
    gate, library = getattr(module._apply_gate, "__func__", None), sys.modules[EXPERTS]
    own = gate is library._default_apply_gate and is_written_in(library, gate)
    if not (own and trait(module, "has_gate") and trait(module, "is_concatenated")):
        return False
    act = module.act_fn
    own = type(act).__name__ in GATES and not is_called_otherwise(act)
    return own and any(is_written_in(sys.modules[name], type(act).forward) for name in ACTIVATIONS)
