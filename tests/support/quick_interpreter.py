"""The kernels under Triton's interpreter, without what it does again and again: the same bits in a third of the time."""

from __future__ import annotations

import contextlib
import importlib
import os


def install() -> None:
    """Only our kernels: TRITON_INTERPRET is unset again before Unsloth or Inductor define theirs."""
    import triton  # before the variable is set: Triton's own functions stay compiled

    with contextlib.suppress(ImportError):  # a launch imports it, and it asks for Triton's functions as they are now
        import triton.experimental.gluon.language  # noqa: F401

    os.environ["TRITON_INTERPRET"] = "1"
    for folder in ("dequantize", "routing", "low_rank"):
        importlib.import_module(f"nf4_patch.nf4.{folder}.kernels")
    del os.environ["TRITON_INTERPRET"]
    from triton.runtime.interpreter import InterpretedFunction

    # A launch has put the interpreter's functions into triton.language; a function that its kernel calls puts them there again.
    InterpretedFunction.__call__ = lambda self, *args, **keywords: self.rewrite()(*args, **keywords)
    multiply_bf16()


def multiply_bf16() -> None:
    """The interpreter's tl.dot takes bf16's bits for integers; here they are the numbers that they stand for."""
    import numpy as np
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def in_fp32(handle):
        if handle.dtype.scalar != language.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *others: create_dot(self, in_fp32(a), in_fp32(b), *others)
