"""Layers that take the same input one after another, as q, k and v do: one product x @ A.T with the A of all, and one gradient
of x, to which each adds its part in place.

Who follows whom is learned from the first calls. At 2,048 tokens of an 8B layer, rank 16, one product takes an H200 10 us and the
product with three A side by side 10 us too: both read x once.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from ..nf4.runtime import current_stream, has_memory
from ..patching.context import backward_in_progress


class Sum:
    """A gradient of x, of several layers: of their products with the base's weights, and what is still to be multiplied."""

    def __init__(self) -> None:
        self.total: Any = None  # [rows, in]
        self.inner: list[Tensor] = []  # of each layer [rows, rank]
        self.all_a: list[Tensor] = []  # of each layer [rank, in]

    def add(self, inner: Tensor, a: Tensor) -> None:
        self.inner.append(inner)
        self.all_a.append(a)

    def add_product(self, gradient: Tensor, weight: Tensor) -> None:
        self.total = gradient @ weight if self.total is None else self.total.addmm_(gradient, weight)

    def result(self) -> Tensor:
        result: Tensor = self.total.addmm_(torch.cat(self.inner, dim=1), torch.cat(self.all_a))
        return result


Sums = defaultdict[int, Sum]  # by the backward that runs


class PlainFunction(torch.autograd.Function):
    """Called without what PyTorch does for functorch's transforms first, in Python: 4 us less of 9 (2-core CPU machine)."""

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


class Alias(PlainFunction):
    """x, for layers that return no gradient of it but add theirs to a sum, which this one returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Sums) -> Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        found = ctx.sums.pop(backward_in_progress(), None)
        if found is None:
            return gradient, None
        return found.result() if gradient is None else found.result().add_(gradient), None


class Latest(threading.local):
    """The input of this thread's latest call, the A that it was for first, and products that are waiting."""

    def __init__(self) -> None:
        self.x: Any = lambda: None
        self.first: Any = lambda: None
        self.version = self.stream = 0
        self.products: dict[int, tuple[Tensor, int, Tensor]] = {}  # by the id of an A: itself, its version, x @ A.T
        self.alias: tuple[Any, ...] = ()  # rows and sums for the layers that are waited for


latest = Latest()
followers: Any = WeakIdKeyDictionary()  # of an A, weak references to others


def shared_input(a: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor | None, Tensor, Sums | None]:
    """rows @ a.T, [rows, rank], where it is computed for several layers at once, and then their rows and sums.

    Args:
        a: a layer's A, [rank, in].
        x: its input; ``rows``, [rows, in], the same in the dtype of A.
    """
    alone = None, rows, None
    if x.is_inference() or a.is_inference():  # they have no version
        return alone
    stream = current_stream(x.get_device())
    if latest.x() is not x or latest.version != x._version or latest.first() is a:
        if latest.products:  # some that followed before did not come
            followers.pop(latest.first(), None)
            latest.alias = ()
        latest.x, latest.version, latest.first, latest.products = weakref.ref(x), x._version, weakref.ref(a), {}
        if (own := together(a, rows)) is None:
            return alone
        sums = Sums(Sum) if torch.is_grad_enabled() and rows.requires_grad else None
        latest.alias, latest.stream = (rows if sums is None else Alias.apply(rows, sums), sums), stream
        return own, *latest.alias
    if waiting := latest.products.pop(id(a), None):
        of, version, product = waiting
        alias = latest.alias if latest.stream == stream else (rows, None)  # one stream would have to wait for the other
        if not latest.products:
            latest.alias = ()
        return (product, *alias) if of is a and version == a._version else alone
    if (first := latest.first()) is not None:
        followers.setdefault(first, []).append(weakref.ref(a))
    return alone


def together(a: Tensor, rows: Tensor) -> Tensor | None:
    """The product with this A, if others follow, whose products then wait."""
    others = [reference() for reference in followers.get(a, ())]
    for each in others:
        if each is None or each.is_inference() or not has_memory(each):
            return None
        if (type(each), each.dtype, each.device, each.shape[1:]) != (type(a), a.dtype, a.device, a.shape[1:]):
            return None
    if not others:
        return None
    with torch.no_grad():
        own: Tensor
        own, *products = (rows @ torch.cat([a, *others]).t()).split([len(each) for each in (a, *others)], dim=1)
    latest.products = {id(each): (each, each._version, its) for each, its in zip(others, products, strict=True)}
    return own
