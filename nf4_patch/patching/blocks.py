"""``with nf4_patch.enabled()``: blocks that may overlap, in several threads too."""

from __future__ import annotations

from .hooks import Options, disable, finish_imports, in_force, lock, switch_on

_blocks: list[list[Options]] = []  # of each block that is entered
_outside: tuple[bool, Options] = (False, (None, None))  # on and with what, before the first of them


def enter(matmul: str | None, cache: str | int | None) -> list[Options]:
    """Enter a block; what comes back is for ``leave``."""
    global _outside
    options = (matmul, cache)
    block: list[Options] = [options]
    with lock:
        before = in_force()
        switch_on(options)
        if not _blocks:
            _outside = before
        _blocks.append(block)
    finish_imports()
    return block


def leave(block: list[Options]) -> None:
    """Leave a block: the options of the one entered last of those still open, or the state before the first of all."""
    with lock:
        _blocks[:] = [other for other in _blocks if other is not block]
        on, options = (True, _blocks[-1][0]) if _blocks else _outside
        if on:
            switch_on(options)
        else:
            disable()
