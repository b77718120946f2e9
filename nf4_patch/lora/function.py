"""LoRA's product, with the gradients of the whole layer, as one autograd function.

The base's product is added to its result afterwards, in place, with nothing saved: a checkpoint's recompute ends with the last
tensor that is saved, before the product that costs most. The gradient of x is one sum, of the base's part and LoRA's.
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
    """scale * (a @ b), rounded once; added to ``added_to`` in place where that is given."""
    if added_to is None:
        return a @ b if scale == 1 else a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=scale)
    if added_to.dtype is a.dtype:
        return added_to.addmm_(a, b, alpha=scale)
    return added_to.add_(a @ b, alpha=scale)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, at a tenth of its cost where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class Factors:
    """LoRA's A and B, and their products, in their own dtype: that of the layer, or fp32."""

    def __init__(self, a: Tensor, b: Tensor, scale: float):
        self.a, self.b, self.scale = a, b, scale  # [rank, in], [out, rank]

    def inner(self, z: Tensor) -> Tensor:
        """What ``outer`` and ``gradient_of_b`` take for z @ A.T, of z [rows, in]."""
        return cast(z, self.a.dtype) @ self.a.t()

    def outer(self, inner: Tensor, y: Tensor | None) -> Tensor:
        """y + scale * z @ A.T @ B.T, [rows, out]; y is written to."""
        return product(inner, self.b.t(), self.scale, y)

    def inner_gradient(self, gradient: Tensor) -> Tensor:
        """What ``gradient_of_a`` and ``gradient_of_z`` take for scale * gradient @ B, of gradient [rows, out]."""
        return product(cast(gradient, self.b.dtype), self.b, self.scale)

    def gradient_of_a(self, inner_gradient: Tensor, z: Tensor) -> Tensor:
        return product(inner_gradient.t(), cast(z, self.a.dtype))

    def gradient_of_b(self, gradient: Tensor, inner: Tensor) -> Tensor:
        return product(cast(gradient, self.b.dtype).t(), inner, self.scale)

    def gradient_of_z(self, inner_gradient: Tensor, added_to: Tensor | None) -> Tensor:
        return product(inner_gradient, self.a, 1, added_to)


class WideFactors(Factors):
    """The same of fp32 factors and bf16 z on tensor cores, at fp32's precision; what is inner is in fp32."""

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


Adapter = tuple[type[Factors], float, bool]  # how its products are computed, scaling, whether z is x


class LoraProduct(PlainFunction):
    """y + the sum of scaling * z @ A.T @ B.T over the adapters, [rows, out], with the gradients of that plus x @ dense().T."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Any,
        dense: Callable[[], Tensor],
        adapters: list[Adapter],
        *tensors: Any,
    ) -> Tensor:
        """``tensors``: for each adapter z, [rows, in], or None where z is x; A, [rank, in]; and B, [out, rank].

        Args:
            x: [rows, in], in the dtype of the layer's product.
            y: a bias, [out]; or [rows, out] that is written to, where nothing needs a gradient; or None. Of that dtype.
            dense: gives the base's weight [out, in], of that dtype, not to be written into.
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
            saved = ctx.saved_tensors  # read once: a checkpoint hands each tensor out once
            traced = is_compiling()  # by compiled autograd: PyTorch's products, which it can trace
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
            if of_x:  # the larger part last: it is rounded once, in the sum
                x_gradient = product(gradient, ctx.dense(), 1, x_gradient)
            return x_gradient, gradient.sum(0) if of_bias else None, None, None, *found
