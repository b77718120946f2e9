"""Sliding-window layers of transformers' StaticCache, which count their tokens on the host.

One graph is replayed before a layer's window is full, another afterwards. Each replay increases the number of tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LENGTH = "cumulative_length_int"  # the attribute with the number
READERS = "get_seq_length", "get_mask_sizes"  # functions that return the number, or what depends on it


def length_of(static_layer: Any) -> int | None:
    """Return the number of tokens that a StaticCache's layer counts on the host, or None."""
    length = vars(static_layer).get(LENGTH)
    return length if isinstance(length, int) else None


def window_is_full(static_layer: Any) -> bool:
    length = length_of(static_layer)
    return length is not None and length >= static_layer.max_cache_len


def roll(static_layer: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Replace a sliding layer's ``update``. In a full window, drop the oldest token and append the new one."""
    if not window_is_full(static_layer) or key_states.shape[-2] != 1:
        return type(static_layer).update(static_layer, key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
    static_layer.cumulative_length_int += 1
    # transformers' own update copies an index from the host here, which a capture forbids.
    for held, new in ((static_layer.keys, key_states), (static_layer.values, value_states)):
        held.copy_(torch.cat((held[:, :, 1:], new.to(held.dtype)), dim=-2))
    return static_layer.keys, static_layer.values


@functools.cache
def rolls_alike(kind: Any) -> bool:
    """Return whether ``roll`` and the installed transformers' ``update`` have equal results on a CPU."""
    try:
        theirs, ours = (kind(max_cache_len=3, sliding_window=3) for _ in range(2))
        for new in torch.arange(24.0).view(6, 1, 2, 1, 2):
            expected = theirs.update(new, -new)
            found = roll(ours, new, -new)
            same = all(map(torch.equal, found, expected)) and theirs.cumulative_length_int == ours.cumulative_length_int
            if not (
                same and torch.equal(theirs.cumulative_length, ours.cumulative_length) and expected[0] is theirs.keys
            ):
                return False
    except (AttributeError, TypeError):  # it has other arguments or attributes
        return False
    return window_is_full(ours)


@contextlib.contextmanager
def rolling(static_cache: Any) -> Iterator[list[str]]:
    """Replace the ``update`` of full windows by ``roll`` inside the ``with`` block.

    Yield a list, to which each function that reads a window's length on the host adds its name.
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
            kind: Any = type(layer)
            layer.get_seq_length, layer.get_mask_sizes = (noticing(layer, name) for name in READERS)
            if window_is_full(layer) and rolls_alike(kind):
                layer.update = functools.partial(roll, layer)
        yield read
    finally:
        for layer in sliding:
            for name in (*READERS, "update"):
                vars(layer).pop(name, None)
