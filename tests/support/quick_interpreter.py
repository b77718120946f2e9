"""The CPU as the device of the kernels, in Triton's interpreter, without the work that the interpreter repeats.

All code before the kernel is the code that runs on a GPU: guards, remembered launches, addresses as integers, and the
check of the bits. This check, which is a kernel's first use, is interpreted. Later, the dequantization uses its
formula, which takes a tenth of the time. Tests of the kernel itself set ``Interpreted.always``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
from typing import Any
from unittest import mock

CAPABILITY = 7, 9  # no GPU's: rows of its own in tables, and nothing that needs sm_80
PORTABLE = {
    "PTX": "",
    "CONSTRAINTS": "",
    "FTZ": False,
}  # without inline assembly; subnormals as bitsandbytes' CPU library
ONE_AT_A_TIME = threading.Lock()  # Triton's interpreter is not made for threads
WARPS = 4, 16, 64, 256  # a CTA is one Python call: few, large ones
CHECKS = 2  # launches of a kernel before a weight reaches it: one with each code


def install() -> None:
    """Interpret only nf4_patch's kernels.

    TRITON_INTERPRET has its earlier value again before Unsloth or Inductor define kernels.
    """
    import triton  # before the variable is set: Triton's own functions stay compiled

    with contextlib.suppress(ImportError):  # a launch imports it, and it asks for Triton's functions as they are now
        import triton.experimental.gluon.language  # noqa: F401

    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        for folder in ("nf4.dequantize", "moe", "lora"):
            importlib.import_module(f"nf4_patch.{folder}.kernels")
    from triton.runtime.interpreter import InterpretedFunction

    # A launch has put the interpreter's functions into triton.language; a function that its kernel calls puts them there again.
    if "TRITON_INTERPRET" not in os.environ:  # then Triton's own functions are interpreted too, and need it
        InterpretedFunction.__call__ = lambda self, *args, **keywords: self.rewrite()(*args, **keywords)
    multiply_bf16()
    exchange_device()


def exchange_device(package: str = "nf4_patch.nf4") -> Any:
    """Make the CPU the device of ``package``, whose kernels were imported under the interpreter. Return its module runtime."""
    import torch

    runtime: Any = importlib.import_module(f"{package}.runtime")

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        result = torch._C._dynamo.guards._empty_strided_cpu(shape, strides, dtype)  # no dispatch mode sees it either
        ctypes.memset(result.data_ptr(), 255, result.untyped_storage().nbytes())  # NaN in every float
        return result

    runtime.DEVICE = "cpu"
    runtime.WORD = 1  # what is read from a file lies anywhere
    runtime.on_device = lambda device: contextlib.nullcontext()
    runtime.capability_of = lambda device: CAPABILITY
    runtime.is_capturing = lambda: False
    runtime.multiprocessors = lambda device: 2
    runtime.current_device = lambda: -1  # a CPU tensor's get_device()
    runtime.current_stream = lambda device: 0
    runtime.empty_strided_cuda = empty
    runtime.is_interpreted = lambda kernel: False
    runtime.compile_kernel = Interpreted
    fits = runtime.fits
    runtime.fits = lambda out, *of: fits(out, *of) and not out.is_meta  # a meta tensor's get_device() is -1 too
    compilation = importlib.import_module(f"{package}.dequantize.compilation")  # takes from runtime what is there now

    compilation.NUM_WARPS |= {(CAPABILITY, 128 * warps): warps for warps in WARPS} | {(CAPABILITY, 0): WARPS[0]}
    return runtime


class Interpreted:
    """Replaces Triton's CompiledKernel. It has the attributes that KernelEntry.of reads, and launches with plain integers."""

    function = packed_metadata = None
    global_scratch_size = 1  # in Triton 3.6: no entry in C
    always = False

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], values: dict[str, Any], **options: Any):
        from triton import language

        self.kernel, self.run = kernel, self
        self.values = {name: PORTABLE.get(name, value) for name, value in values.items()}
        dtypes = [str(getattr(argument, "dtype", "")).removeprefix("torch.") for argument in arguments]
        self.dtypes, self.checked = dtypes, 0
        self.pointers = [dtype and language.pointer_type(getattr(language, dtype)) for dtype in dtypes]

    def _init_handles(self) -> None:
        """Do nothing, because there is nothing to load."""

    def __call__(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        import numpy as np
        from triton import language
        from triton.runtime.interpreter import TensorHandle

        _, _, _, _, _, *given = arguments  # function, metadata and three of Triton's hooks
        if self.checked >= CHECKS and not self.always:
            return dequantize(x, self.values, self.dtypes, *given[: len(self.pointers)])
        self.checked += self.kernel.__name__ == "dequantize_kernel"
        for index, pointer in enumerate(self.pointers):
            if pointer:
                address = TensorHandle(np.array([given[index]], dtype=np.uint64), pointer)
                given[index] = language.tensor(address, pointer)
        with ONE_AT_A_TIME:
            self.kernel[x, y, z](*given[: len(self.pointers)], **self.values)


def dequantize(
    grid: int, values: dict[str, Any], dtypes: list[str], packed: int, absmax: int, code: int, absmax2: int, code2: int,
    offset: int, out: int, n: int,
) -> None:  # fmt: skip
    """Compute the kernel's formula from the memory at the addresses."""
    elements = 2 * values["THREADS"] * values["ELEMS_PER_THREAD"]  # of a program
    assert grid == -(-n // elements) and (values["EVEN"], values["TAIL"]) == (n % elements == 0, n % 8 != 0)
    import torch

    def at(address: int, count: int, dtype: str) -> torch.Tensor:
        dtype_ = getattr(torch, dtype)
        memory = (ctypes.c_char * (count * dtype_.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype_)

    blocks = -(-n // values["BLOCKSIZE"])
    scales = at(absmax, blocks, dtypes[1])
    if values["BLOCKSIZE2"]:
        second = at(absmax2, -(-blocks // values["BLOCKSIZE2"]), dtypes[3]).repeat_interleave(values["BLOCKSIZE2"])
        scales = at(code2, 256, dtypes[4])[scales.long()] * second[:blocks] + at(offset, 1, dtypes[5]).float()
    pairs = at(packed, -(-n // 2), dtypes[0])
    nibbles = torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[:n].long()
    weight = at(code, 16, dtypes[2])[nibbles] * scales.repeat_interleave(values["BLOCKSIZE"])[:n]
    at(out, n, dtypes[6]).copy_(weight)


def multiply_bf16() -> None:
    """Let the interpreter's tl.dot multiply the numbers that bf16's bits stand for. It takes these bits for integers otherwise."""
    import numpy as np
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def in_fp32(handle):
        if handle.dtype.scalar != language.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *others: create_dot(self, in_fp32(a), in_fp32(b), *others)
