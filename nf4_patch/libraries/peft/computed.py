"""The library functions whose work fused LoRA does itself.

If somebody replaced one of them, peft's forward runs and calls the new function.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

from torch import nn

from ...patching.counters import warn_once
from ...patching.originals import is_own
from ..bitsandbytes import AUTOGRAD as MATMUL
from ..bitsandbytes import FUNCTIONS as DECODE
from ..bitsandbytes import LAYERS as NN
from ..bitsandbytes import NAME, OPS
from . import LINEAR_LAYERS as PEFT

# For each function: its public name, and the module and name under which the library defines it.
COMPUTED = (
    (f"{NAME}.nn.Linear4bit.forward", NN, "forward"),
    (f"{NAME}.matmul_4bit", MATMUL, "matmul_4bit"),
    (f"{DECODE}.dequantize_4bit", DECODE, "dequantize_4bit"),
    (f"{DECODE}.gemv_4bit", DECODE, "gemv_4bit"),
    (f"{OPS}._gemm_4bit_kernel_impl", OPS, "_gemm_4bit_kernel_impl"),
    (f"{OPS}._dequant_linear_fallback", OPS, "_dequant_linear_fallback"),
    (f"{NAME}.MatMul4Bit.forward", MATMUL, "forward"),
    (f"{NAME}.MatMul4Bit.backward", MATMUL, "backward"),
    ("torch.nn.Linear.forward", "torch.nn.modules.linear", "forward"),
    ("torch.nn.Identity.forward", "torch.nn.modules.linear", "forward"),
    ("torch.nn.Dropout.forward", "torch.nn.modules.dropout", "forward"),
    ("torch.nn.functional.linear", "torch._C._nn", "linear"),
    ("torch.nn.Module.__call__", "torch.nn.modules.module", "_wrapped_call_impl"),
    ("torch.nn.Module._call_impl", "torch.nn.modules.module", "_call_impl"),
)


class Computed:
    """Detects whether somebody replaced peft's forward (``original``) or a function in COMPUTED."""

    def __init__(self, original: Any):
        package, functions, decode = (sys.modules[name] for name in (NAME, MATMUL, DECODE))
        base, product = sys.modules[NN].Linear4bit, functions.MatMul4Bit

        def current() -> tuple[Any, ...]:
            ops = sys.modules.get(OPS)  # bitsandbytes imports this module only if there is a GPU
            # spelled out, because a loop would be slower
            return (
                base.forward, package.matmul_4bit, decode.dequantize_4bit, decode.gemv_4bit,
                getattr(ops, "_gemm_4bit_kernel_impl", None), getattr(ops, "_dequant_linear_fallback", None),
                product.forward, product.backward,
                nn.Linear.forward, nn.Identity.forward, nn.Dropout.forward, nn.functional.linear,
                nn.Module.__call__, nn.Module._call_impl,
            )  # fmt: skip

        self.current = current
        self.original = "" if is_own(original, PEFT, "forward") else f"{PEFT}.Linear4bit.forward"
        # Functions known to be the libraries' own or nf4_patch's. A user's function is never stored.
        self.verified: tuple[Any, ...] = (None,) * len(COMPUTED)

    def replaced(self) -> str:
        """Return the name of a replaced function, or ""."""
        current = self.current()
        if any(map(operator.is_not, current, self.verified)):
            for function, (name, *own) in zip(current, COMPUTED, strict=True):
                if function is not None and not is_own(function, *own):
                    return name
            self.verified = current
        return self.original


def say(name: str) -> None:
    """Log once that peft's forward runs, because ``name`` was replaced."""
    warn_once(
        f"nf4_patch: peft's forward runs, because {name} is not the library's own function. "
        'To use lora="fused" or matmul="auto" there, take the other function out'
    )
