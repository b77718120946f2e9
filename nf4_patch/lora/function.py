"""One autograd function for a 4-bit linear layer with LoRA, whose forward computes only LoRA's product.

The caller then adds the base product in place, without autograd, so that no tensor is saved for this product, which takes
most of the time. A checkpoint's recompute stops at the last saved tensor, so it skips the base product of the last layer
in the checkpoint. The backward computes all gradients, including the base product's part of x's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..patching.context import PlainFunction, is_compiling, watched
from .launch import correlate, expand, project


def product(a: Tensor, b: Tensor, scale: float = 1, added_to: Tensor | None = None) -> Tensor:
    """Return scale * (a @ b), added in place to ``added_to`` if given. With equal dtypes, the result is rounded once."""
    if added_to is None:
        return a @ b if scale == 1 else a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=scale)
    if added_to.dtype is a.dtype:
        return added_to.addmm_(a, b, alpha=scale)
    return added_to.add_(a @ b, alpha=scale)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, in a tenth of the time if the dtype stays the same."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class Factors:
    """LoRA's A [rank, in] and B [out, rank], which are multiplied in their own dtype."""

    def __init__(self, a: Tensor, b: Tensor, scale: float):
        self.a, self.b, self.scale = a, b, scale

    def inner(self, z: Tensor) -> Tensor:
        """Return z @ A.T, [rows, rank], for z [rows, in]."""
        return cast(z, self.a.dtype) @ self.a.t()

    def outer(self, inner: Tensor, y: Tensor | None) -> Tensor:
        """Return y + scale * inner @ B.T, [rows, out], maybe written into y."""
        return product(inner, self.b.t(), self.scale, y)

    def inner_gradient(self, gradient: Tensor) -> Tensor:
        """Return scale * gradient @ B, [rows, rank], for a gradient [rows, out]."""
        return product(cast(gradient, self.b.dtype), self.b, self.scale)

    def gradient_of_a(self, inner_gradient: Tensor, z: Tensor) -> Tensor:
        return product(inner_gradient.t(), cast(z, self.a.dtype))

    def gradient_of_b(self, gradient: Tensor, inner: Tensor) -> Tensor:
        return product(cast(gradient, self.b.dtype).t(), inner, self.scale)

    def gradient_of_z(self, inner_gradient: Tensor, added_to: Tensor | None) -> Tensor:
        return product(inner_gradient, self.a, 1, added_to)


class WideFactors(Factors):
    """Factors in fp32. Tensor cores multiply them by bf16 matrices at fp32 precision.

    ``gradient_of_a`` and ``gradient_of_z`` multiply by the scale, not ``inner_gradient``, whose result is fp32.
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


Adapter = tuple[type[Factors], float, bool]  # Factors or WideFactors, the scale, and whether LoRA's input z is x


class Once(PlainFunction):
    """Returns the first ``count`` of ``tensors``. Its backward raises an error, because it would be a second derivative.

    ``once_differentiable`` is not connected to the forward's tensors, so ``torch.autograd.grad`` could leave second
    derivatives out without an error.
    """

    @staticmethod
    def forward(_ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        raise RuntimeError('lora="fused" has no second derivatives; train with lora="off"')


class LoraProduct(PlainFunction):
    """Add scale * z @ A.T @ B.T of each adapter to y, [rows, out].

    The backward includes the gradient of the base product, which the caller adds.
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
        """Return y plus LoRA's product of each adapter.

        Args:
            x: [rows, in], in the dtype of the base product.
            y: None, a bias [out], or a tensor [rows, out]. Such a tensor might be overwritten, so it is allowed only if
                nothing requires a gradient.
            dense: returns the base weight [out, in] in the dtype of x, read-only.
            adapters: for each adapter, the class to multiply with, the scale, and whether z is x.
            tensors: z [rows, in], or None if it is x, A [rank, in] and B [out, rank] of each adapter.
        """
        if y is not None and y.dim() == 1:
            y = y.expand(len(x), -1).clone()
        saved: list[Tensor | None] = []
        copy: Tensor | None = None
        for index, (kind, scale, is_x) in enumerate(adapters):
            z, a, b = tensors[3 * index : 3 * index + 3]
            z = x if is_x else z
            factors = kind(a, b, scale)
            inner = factors.inner(z)
            y = cast(factors.outer(inner, y), x.dtype if y is None else y.dtype)
            of_a, of_b = ctx.needs_input_grad[3 * index + 5 : 3 * index + 7]
            # What is saved of z stays connected to z, for Once.
            if of_a and is_x and a.dtype is not x.dtype:
                # peft would save a copy of x in the dtype of A, so the caller may write into x before the backward.
                if copy is None:
                    with torch.enable_grad():
                        copy = x.clone()
                z = copy
            elif of_b and not of_a:
                with torch.enable_grad():
                    z = z[:0].clone()
            saved += (z if of_a or of_b else None, inner if of_b else None, a, b)
        ctx.save_for_backward(*saved)
        ctx.dense, ctx.adapters = dense, adapters
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read only once, because a checkpoint returns each saved tensor only once
        with torch.no_grad():
            found = LoraProduct.gradients(ctx, gradient, saved)
        if torch.is_grad_enabled():  # under create_graph=True
            places = [index for index, each in enumerate(found) if each is not None]
            inputs = [gradient, *[each for each in saved if each is not None]]
            once = Once.apply(len(places), *[found[index] for index in places], *inputs)
            for index, each in zip(places, once, strict=True):
                found[index] = each
        return tuple(found)

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor, saved: Any) -> list[Any]:
        device = gradient.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            of_x, of_bias, _, _, *needed = ctx.needs_input_grad
            # Compiled autograd, modes, transforms (is_grads_batched) and subclasses cannot see nf4_patch's kernels.
            plain = is_compiling() or watched(gradient) is not None
            x_gradient: Any = None
            found: list[Tensor | None] = []
            for index, (kind, scale, is_x) in enumerate(ctx.adapters):
                of_z, of_a, of_b = needed[3 * index : 3 * index + 3]
                z, inner, a, b = saved[4 * index : 4 * index + 4]
                factors = (Factors if plain else kind)(a, b, scale)
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
            # The base weight's part of the gradient is larger, so it is added last and rounded only once.
            if of_x:
                x_gradient = product(gradient, ctx.dense(), 1, x_gradient)
            return [x_gradient, gradient.sum(0) if of_bias else None, None, None, *found]
