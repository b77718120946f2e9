"""Functions that only read the weights which they dequantize: a thread inside one may be handed a cached weight."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from .cache import cache
from .context import is_compiling
from .switch import switch


class Reader(threading.local):
    """ "forward" or "backward" where the thread is inside such a function of the library."""

    bitsandbytes = ""
    unsloth = ""


reader = Reader()


def replace_reader(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For the ``forward`` or ``backward`` of an autograd function, which reaches for the library's public dequantization."""
    library, direction = target.partition(".")[0], target.rpartition(".")[2]

    @functools.wraps(original)
    def read(*args, **kwargs):
        if is_compiling() or not (switch.on and cache.on):
            return original(*args, **kwargs)
        before = getattr(reader, library)
        setattr(reader, library, direction)
        try:
            return original(*args, **kwargs)
        finally:
            setattr(reader, library, before)

    return read
