"""One autograd function that computes LoRA's product, and the gradients of the whole layer.

After the function returns, the caller adds the base product (x times the base weight) in place, without autograd. So
autograd saves no tensor for the base product, which is the most expensive one. A checkpoint's recompute stops as soon
as the last saved tensor exists. So it skips the base product of the last layer in the checkpoint. The backward adds the
base weight's part and LoRA's part of the gradient of x itself, so that autograd does not have to add two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..patching.context import PlainFunction, is_compiling
from .launch import correlate, expand, project


def product(a: Tensor, b: Tensor, scale: float = 1, added_to: Tensor | None = None) -> Tensor:
    """Return scale * (a @ b), rounded once. If ``added_to`` is given, add to it in place and return it."""
    if added_to is None:
        return a @ b if scale == 1 else a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=scale)
    if added_to.dtype is a.dtype:
        return added_to.addmm_(a, b, alpha=scale)
    return added_to.add_(a @ b, alpha=scale)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``. If the tensor has this dtype already, ``cast`` takes a tenth of the time of ``to``."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class Factors:
    """LoRA's factors A [rank, in] and B [out, rank], and the products with them, computed in the factors' dtype."""

    def __init__(self, a: Tensor, b: Tensor, scale: float):
        self.a, self.b, self.scale = a, b, scale

    def inner(self, z: Tensor) -> Tensor:
        """Return z @ A.T, [rows, rank], for z [rows, in]."""
        return cast(z, self.a.dtype) @ self.a.t()

    def outer(self, inner: Tensor, y: Tensor | None) -> Tensor:
        """Return y + scale * inner @ B.T, [rows, out]. The sum may be written into y, which is then returned."""
        return product(inner, self.b.t(), self.scale, y)

    def inner_gradient(self, gradient: Tensor) -> Tensor:
        """Return scale * gradient @ B, [rows, rank], for gradient [rows, out]: the gradient with respect to ``inner``."""
        return product(cast(gradient, self.b.dtype), self.b, self.scale)

    def gradient_of_a(self, inner_gradient: Tensor, z: Tensor) -> Tensor:
        return product(inner_gradient.t(), cast(z, self.a.dtype))

    def gradient_of_b(self, gradient: Tensor, inner: Tensor) -> Tensor:
        return product(cast(gradient, self.b.dtype).t(), inner, self.scale)

    def gradient_of_z(self, inner_gradient: Tensor, added_to: Tensor | None) -> Tensor:
        return product(inner_gradient, self.a, 1, added_to)


class WideFactors(Factors):
    """LoRA factors in fp32. Tensor cores multiply them by bf16 matrices at fp32 precision.

    ``inner`` and ``inner_gradient`` return fp32. ``inner_gradient`` does not apply the scale. ``gradient_of_a`` and
    ``gradient_of_z`` receive its result and apply the scale.
    """

    def inner(self, z: Tensor) -> Tensor:
        return project(z, self.a, True)

    def outer(self, inner: Tensor, y: Tensor | None) -> Tensor:
        return expand(inner, self.b, False, self.scale, y)

    def inner_gradient(self, gradient: Tensor) -> Tensor:
        return project(gradient, self.b, False)

    def gradient_of_a(self, inner_gradient: Tensor, z: Tensor) -> Tensor:
        return correlate(z, inner_gradient, True, self.scale)

    def gradient_of_b(self, gradient: Tensor, inner: Tensor) -> Tensor:
        return correlate(gradient, inner, False, self.scale)

    def gradient_of_z(self, inner_gradient: Tensor, added_to: Tensor | None) -> Tensor:
        return expand(inner_gradient, self.a, True, self.scale, added_to)


Adapter = tuple[type[Factors], float, bool]  # the class to multiply with, the scale, and whether LoRA's input z is x


class LoraProduct(PlainFunction):
    """Compute y plus the sum of scale * z @ A.T @ B.T over the adapters, [rows, out].

    The caller adds the base product x @ dense().T to the result. The backward returns the gradients of this whole sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Any,
        dense: Callable[[], Tensor],
        adapters: list[Adapter],
        *tensors: Any,
    ) -> Tensor:
        """
        Args:
            x: [rows, in], in the dtype of the layer's product.
            y: what is added to the product, in the dtype of x: None, a bias [out], or a tensor [rows, out]. A tensor
                [rows, out] may be overwritten with the sum, so it is allowed only if nothing needs a gradient.
            dense: returns the base weight [out, in] in the dtype of x. The weight is only read.
            tensors: three for each adapter. z: LoRA's input [rows, in], or None if it is x. A: [rank, in]. B: [out, rank].
        """
        if y is not None and y.dim() == 1:
            y = y.expand(len(x), -1).clone()
        saved: list[Tensor | None] = []
        for index, (kind, scale, is_x) in enumerate(adapters):
            z, a, b = tensors[3 * index : 3 * index + 3]
            z = x if is_x else z
            factors = kind(a, b, scale)
            inner = factors.inner(z)
            y = cast(factors.outer(inner, y), x.dtype if y is None else y.dtype)
            of_a, of_b = ctx.needs_input_grad[3 * index + 5 : 3 * index + 7]
            saved += (z if of_a else None, inner if of_b else None, a, b)
        ctx.save_for_backward(*saved)
        ctx.dense, ctx.adapters = dense, adapters
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        device = gradient.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            of_x, of_bias, _, _, *needed = ctx.needs_input_grad
            saved = ctx.saved_tensors  # accessed only once, because a checkpoint returns each saved tensor only once
            traced = is_compiling()  # compiled autograd can trace PyTorch's products, but not our kernels
            x_gradient: Any = None
            found: list[Tensor | None] = []
            for index, (kind, scale, is_x) in enumerate(ctx.adapters):
                of_z, of_a, of_b = needed[3 * index : 3 * index + 3]
                z, inner, a, b = saved[4 * index : 4 * index + 4]
                factors = (Factors if traced else kind)(a, b, scale)
                t: Any = factors.inner_gradient(gradient) if of_a or of_z or (is_x and of_x) else None
                z_gradient = None
                if is_x and of_x:
                    x_gradient = cast(factors.gradient_of_z(t, x_gradient), gradient.dtype)
                elif of_z:
                    z_gradient = factors.gradient_of_z(t, None)
                found += (
                    z_gradient,
                    factors.gradient_of_a(t, z) if of_a else None,
                    factors.gradient_of_b(gradient, inner) if of_b else None,
                )
            if of_x:  # the base weight's part is added last, so that this larger part is rounded only once
                x_gradient = product(gradient, ctx.dense(), 1, x_gradient)
            return x_gradient, gradient.sum(0) if of_bias else None, None, None, *found
