"""A faster copy of keys and values for all heads that share them. transformers makes this copy if attention has a mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...nf4.runtime import runs_on
from ...patching.context import watched
from ...patching.replacement import Function

WORD = torch.complex128  # a copy moves elements, and this is the largest of them


def repeat_kv(original: Function, hidden_states: Tensor, n_rep: int) -> Tensor:
    """Replace transformers' ``repeat_kv``, which repeats each head of [b, heads, tokens, d] n_rep times in a row.

    Words of 16 bytes are copied, because index arithmetic limits a copy of 2-byte elements.
    """
    x = hidden_states
    if n_rep == 1 or is_observed(x) or not is_in_words(x):
        return original(x, n_rep)  # type: ignore[no-any-return]
    words = x.view(WORD)
    b, heads, tokens, d = words.shape
    every = words[:, :, None].expand(b, heads, n_rep, tokens, d)
    return every.reshape(b, heads * n_rep, tokens, d).view(x.dtype)


def is_observed(x: Tensor) -> bool:
    """Return whether PyTorch differentiates the copy, or a mode sees it."""
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0 or watched() is not None


def is_in_words(x: Tensor) -> bool:
    """Return whether ``x`` is a plain tensor on the GPU whose rows consist of whole 16-byte words."""
    if not runs_on(x):  # Apple's GPUs have no 16-byte elements
        return False
    if type(x) is not Tensor or x.dim() != 4 or x.stride(3) != 1 or x.dtype.is_complex or x.is_neg():
        return False
    sizes = (x.shape[3], x.storage_offset(), *x.stride()[:3])
    return all(size * x.element_size() % WORD.itemsize == 0 for size in sizes)
