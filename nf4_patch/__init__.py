"""Fused Triton kernels for 4-bit fine-tuning, inside bitsandbytes and Unsloth, with the same bits.

>>> import nf4_patch
>>> nf4_patch.enable()  # or NF4_PATCH=1 in the environment

Importing this module is cheap: torch, triton and the patched libraries are imported when they are needed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from .version import __version__ as __version__

if TYPE_CHECKING:
    import torch

    from .config import ConfigError as ConfigError
    from .patching.cache.store import StaleWeightError as StaleWeightError
    from .patching.counters import FallbackError as FallbackError
    from .patching.status import Status as Status

__all__ = [
    "ConfigError",
    "FallbackError",
    "StaleWeightError",
    "Status",
    "dequantize_nf4",
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "release",
    "status",
    "triton_dequantize_nf4",
]
TYPES = {
    "ConfigError": ".config", "FallbackError": ".patching.counters", "StaleWeightError": ".patching.cache.store",
    "Status": ".patching.status",
}  # fmt: skip
Matmul = Literal["off", "auto"]
Experts = Literal["off", "4bit"]
Lora = Literal["off", "fused"]


def __getattr__(name: str) -> Any:
    """The errors and ``Status``, from the modules that make them: StaleWeightError's imports torch."""
    if name in TYPES:
        return getattr(importlib.import_module(TYPES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def enable(
    matmul: Matmul | None = None, cache: str | int | None = None, experts: Experts | None = None, lora: Lora | None = None,
    offload: str | int | None = None,
) -> bool:  # fmt: skip
    """Patch bitsandbytes and Unsloth, now or when they are imported. Safe to call again.

    An option that is None stays as it is: where the patch is on, as it is in force; where it is off, also after ``disable``,
    as its variable NF4_PATCH_* says.

    Args:
        matmul: "auto" multiplies few rows (generation, short sequences) straight from the packed weight where that is
            measured to win: as accurate as dequantize + matmul, not the same bits. "off", the default, never does.
        cache: "6GiB" (or "6G", or a number of bytes; "6GB" is 6 * 10^9 bytes): dequantized weights stay in at most that
            much memory of every GPU, for the functions of bitsandbytes, Unsloth and transformers that only read them;
            the same bits. "auto" finds the size: what a training leaves free. "off", the default, or 0 keeps none.
        experts: "4bit": transformers' ``load_in_4bit`` packs the experts of a mixture too, while it loads them, and peft's LoRA
            on them is a product of its own. "off", the default, leaves them in 16 bits.
        lora: "fused": peft's LoRA on 4-bit linear layers runs as one function: as accurate as peft's, not the same bits. "off",
            the default, leaves it to peft.
        offload: "6GiB": of the packed experts of each model that is loaded from now on, at most so much stays on each GPU, what
            is in flight included; the rest waits in pinned host memory and is fetched ahead; the same bits. "all" keeps only
            what is in flight on the GPU. "off", the default, keeps all there. Needs ``experts="4bit"``.

    Returns:
        True if the patch is on; False where NF4_PATCH=0 or NF4_USE_TRITON=0 forbids it, and then it is off.

    Raises:
        ConfigError: an argument or a NF4_* variable has an unknown value.
    """
    from .patching import hooks

    return hooks.enable(matmul=matmul, cache=cache, experts=experts, lora=lora, offload=offload)


def disable() -> None:
    """Put every original back, and forget the options. A replacement that another library has wrapped passes straight through."""
    from .patching import hooks

    hooks.disable()


def release() -> None:
    """Drop every cached weight: its memory is PyTorch's again as soon as nobody uses it. The cache stays on and fills again.

    Call it after a change that no version counter sees: a write through ``parameter.data`` or a raw pointer.
    """
    store = sys.modules.get(f"{__name__}.patching.cache.store")  # it needs torch
    if store is not None:
        store.cache.release()


def is_enabled() -> bool:
    """Whether the patch is on."""
    from .patching.switch import switch

    return switch.on


@contextlib.contextmanager
def enabled(
    matmul: Matmul | None = None, cache: str | int | None = None, experts: Experts | None = None, lora: Lora | None = None,
    offload: str | int | None = None,
) -> Iterator[None]:  # fmt: skip
    """The patch is on inside the ``with`` block, as ``enable`` does; afterwards it is as it was before, with the options of then.

    The patch belongs to the process, not to a thread. While several blocks overlap, the options of the block that was
    entered last are in force. When the last block ends, everything is as it was before the first.
    """
    from .patching import hooks

    with hooks.block(matmul=matmul, cache=cache, experts=experts, lora=lora, offload=offload):
        yield


def status() -> Status:
    """What is patched, how many calls ran in the kernel, how many fell back and why."""
    from .patching.status import status

    return status()


def dequantize_nf4(weight: torch.Tensor, quant_state: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize a packed 4-bit weight with the fused kernel; on the CPU with the plain formula.

    Args:
        weight: the packed weight, ceil(n / 2) bytes, [bytes, 1] or transposed [1, bytes].
        quant_state: its ``bitsandbytes.functional.QuantState``, NF4 or FP4, nested or flat.
        out: filled and returned if given: contiguous, ``quant_state.shape``, ``quant_state.dtype``.

    Returns:
        The weight, bit-identical to ``bitsandbytes.functional.dequantize_4bit`` on CUDA. It has the shape
        ``quant_state.shape``, transposed for a transposed ``weight``, and the dtype ``quant_state.dtype``. On the CPU it is
        the same weight, where bitsandbytes decodes a block that crosses a row with a wrong scale.

    Raises:
        ValueError: the weight, its state or ``out`` is not supported; the message says what was found.
        RuntimeError: the kernel cannot be compiled on this GPU.
    """
    from .patching.direct import dequantize_nf4

    return dequantize_nf4(weight, quant_state, out)


def triton_dequantize_nf4(layer: torch.nn.Module) -> torch.Tensor:
    """Dequantize the weight of a ``bitsandbytes.nn.Linear4bit``: a drop-in for the challenge's ``unsloth_dequantize``.

    Returns:
        [out_features, in_features] in the dtype of the weight's quant_state.

    Raises:
        ValueError: the layer has no quantized weight (it becomes quantized by ``.to("cuda")``).
    """
    weight: Any = getattr(layer, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is None:
        raise ValueError(
            f"{type(layer).__name__} has no quantized weight; a bitsandbytes.nn.Linear4bit on the device is needed "
            '(it is quantized by .to("cuda"))'
        )
    return dequantize_nf4(weight, state)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nf4_patch`` in a notebook: enable."""
    enable()


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext nf4_patch``: disable."""
    disable()


def _autoload() -> None:
    """NF4_PATCH=1 enables. Called inside somebody's import (bitsandbytes loads it as a backend): it never raises."""
    if not any(name.startswith("NF4_PATCH") for name in os.environ):  # then nothing else is imported
        return
    from .config import Config, ConfigError, options_set

    try:
        if not os.environ.get("NF4_PATCH"):  # the code decides; the options count once it calls enable()
            atexit.register(_say_what_had_no_effect)
        elif Config.read().requested and _enabled_once() and is_enabled() and "bitsandbytes" in sys.modules:
            _say(logging.WARNING, f"nf4_patch {__version__} is on: {', '.join(['NF4_PATCH=1', *options_set()])}")
    except (ImportError, ConfigError) as error:  # a package that it needs is missing, or a variable is wrong
        _say(logging.ERROR, f"nf4_patch stays off: {error}")
    except Exception:
        logging.getLogger(__name__).exception("nf4_patch stays off")


@functools.cache  # bitsandbytes asks again, and a ``disable`` meanwhile holds
def _enabled_once() -> bool:
    return enable()


@functools.cache
def _say(level: int, line: str) -> None:
    """Once, and by one process of a training."""
    from .config import is_worker, rank

    if rank() in ("", "0") and not is_worker():
        logging.getLogger(__name__).log(level, line)


def _say_what_had_no_effect() -> None:
    from .config import options_set
    from .patching.placement import installed

    if (options := ", ".join(options_set())) and "bitsandbytes" in sys.modules and not installed:
        _say(logging.WARNING, f"nf4_patch: {options}: no effect, as neither NF4_PATCH=1 nor enable() switched it on")


_autoload()
