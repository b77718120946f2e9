"""Sliding layers of transformers' StaticCache, which count their tokens on the host.

What a sliding layer does in a decode step depends on the number only in one way: whether its window is full. So a graph serves
all tokens before, another one all tokens after. The number itself is counted at each replay.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LENGTHS = "get_seq_length", "get_mask_sizes"  # functions that read the number


def length_of(static_layer: Any) -> int | None:
    """Return the number of tokens that a layer of a StaticCache counts on the host, or None if it counts none."""
    length = vars(static_layer).get("cumulative_length_int")
    return length if isinstance(length, int) else None


def window_is_full(static_layer: Any) -> bool:
    length = length_of(static_layer)
    return length is not None and length >= static_layer.max_cache_len


def roll(static_layer: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Drop the oldest token of a full window, and append one. The library's function copies an index from the host."""
    static_layer.cumulative_length_int += 1
    for held, new in ((static_layer.keys, key_states), (static_layer.values, value_states)):
        held.copy_(torch.cat((held[:, :, 1:], new.to(held.dtype)), dim=-2))
    return static_layer.keys, static_layer.values


@functools.cache
def rolls_alike(kind: Any) -> bool:
    """Return whether ``roll`` does what the installed transformers does. It is tried on a CPU."""
    theirs, ours = (kind(max_cache_len=3, sliding_window=3) for _ in range(2))
    drawn = torch.arange(24.0).view(1, 2, 6, 2)
    for token in range(6):
        new = drawn[:, :, token : token + 1], -drawn[:, :, token : token + 1]
        found = [*theirs.update(*new), *(roll(ours, *new) if window_is_full(ours) else ours.update(*new))]
        if not (torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])):
            return False
        lengths = [(each.cumulative_length_int, int(each.cumulative_length)) for each in (theirs, ours)]
        if lengths[0] != lengths[1] or found[2] is not ours.keys or found[3] is not ours.values:
            return False
    return True


@contextlib.contextmanager
def rolling(static_cache: Any) -> Iterator[list[str]]:
    """Let full windows roll without a copy from the host inside the ``with`` block.

    Yield a list that gets the names of the functions that read a window's length on the host.
    """
    read: list[str] = []
    sliding = [layer for layer in static_cache.layers if length_of(layer) is not None]

    def noticing(layer: Any, name: str) -> Any:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            read.append(name)
            return getattr(type(layer), name)(layer, *args, **kwargs)

        return noticed

    try:
        for layer in sliding:
            layer.get_seq_length, layer.get_mask_sizes = (noticing(layer, name) for name in LENGTHS)
            if window_is_full(layer) and rolls_alike(type(layer)):
                layer.update = functools.partial(roll, layer)
        yield read
    finally:
        for layer in sliding:
            for name in (*LENGTHS, "update"):
                vars(layer).pop(name, None)
