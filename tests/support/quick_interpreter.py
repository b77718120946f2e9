"""Triton's interpreter without what it does again and again: the same kernels, the same bits, in a third of the time."""

from __future__ import annotations

from nf4_patch.nf4.dequantize import compilation, launch


def install() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    # A launch has put the interpreter's functions into triton.language; a function that its kernel calls puts them there again.
    InterpretedFunction.__call__ = lambda self, *args, **keywords: self.rewrite()(*args, **keywords)
    interpret, most = launch._interpret, compilation.INTERPRETER_WARPS

    def fitted(weight, out):
        """In a CTA or a few of about the size of the weight, whatever is left of a large one is computed as well."""
        compilation.INTERPRETER_WARPS = min(most, max(4, 1 << (weight.numel() // 512 - 1).bit_length()))
        return interpret(weight, out)

    launch._interpret = fitted
