"""Faster QLoRA training in less GPU memory, for peft, TRL and Unsloth, with one line of code.

>>> import nf4_patch
>>> nf4_patch.enable("fast")  # or NF4_PATCH=fast in the environment; only plain enable() is bit-identical

Importing this module is cheap: torch, triton and the patched libraries are imported only when needed.
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

from . import libraries as libraries
from . import options as options
from .version import __version__ as __version__

if TYPE_CHECKING:
    import torch

    from .cache.store import StaleWeightError as StaleWeightError
    from .patching.config import ConfigError as ConfigError
    from .patching.counters import FallbackError as FallbackError
    from .snapshot import Status as Status

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
    "ConfigError": ".patching.config", "FallbackError": ".patching.counters", "StaleWeightError": ".cache.store",
    "Status": ".snapshot",
}  # fmt: skip
Profile = Literal["fast"]
Matmul = Literal["off", "auto"] | bool
Experts = Literal["off", "4bit"] | bool
Lora = Literal["off", "fused"] | bool
Graphs = Literal["off", "auto"] | bool
Merge = Literal["off", "reversible"] | bool


def __getattr__(name: str) -> Any:
    """Import an error class or ``Status`` on first use, so that ``import nf4_patch`` imports no torch."""
    if name in TYPES:
        return getattr(importlib.import_module(TYPES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def enable(
    profile: Profile | None = None, *, matmul: Matmul | None = None, cache: str | int | None = None,
    experts: Experts | None = None, lora: Lora | None = None, offload: str | int | None = None, graphs: Graphs | None = None,
    activations: str | int | None = None, merge: Merge | None = None,
) -> bool:  # fmt: skip
    """Patch bitsandbytes, Unsloth and the other supported libraries, now or when they are imported.

    An option that is None keeps its value if the patch is already on. Otherwise it takes the value of its environment
    variable, for example NF4_PATCH_MATMUL for ``matmul``. ``False`` means "off", the default. If an option has only one
    value besides "off", ``True`` means this value.

    Args:
        profile: "fast" turns on every option that needs no decision: ``lora="fused"``, ``graphs="auto"``,
            ``matmul="auto"``, ``cache="auto"``, ``activations="auto"`` and ``merge="reversible"``. Results are as
            accurate, but not bit-identical. Options that an argument or a variable has set keep their value. An option
            whose library is missing or too old stays off, and ``status()`` says why.
        matmul: "auto" multiplies few rows of activations (generation, short sequences) directly by the packed weight,
            where this was measured to be faster. It is as accurate as dequantizing the weight first, but not
            bit-identical.
        cache: "6GiB" keeps up to 6 GiB of dequantized weights on every GPU, with bit-identical results. "6G" and a
            number of bytes work too; "6GB" is 6 * 10^9 bytes. Functions of bitsandbytes, Unsloth and transformers get
            a weight from the cache if they only read it. "auto" uses the memory that training leaves free. 0 means "off".
        experts: "4bit" lets transformers' ``load_in_4bit`` also quantize the experts of a mixture-of-experts model, which
            it loads in 16 bits otherwise. If these experts have LoRA adapters, the activations are multiplied by the LoRA
            matrices A and B separately. peft's own code would add B @ A to a 16-bit copy of all experts.
        lora: "fused" runs peft's LoRA on 4-bit linear layers as one function. It is as accurate as peft's code, but not
            bit-identical.
        offload: "6GiB" lets the packed weights of decoder layers and their prefetch buffers take at most 6 GiB on each
            GPU. The other layers stay in pinned host memory and are prefetched, with bit-identical results. The option
            applies to models that are loaded from now on. "all" keeps only the prefetch buffers on the GPU. "auto" also
            keeps as many layers there as fit into the memory that training leaves free.
        graphs: "auto" runs decoder layers as CUDA graphs, so that the GPU does not wait for Python, in training with
            gradient checkpointing and in generation with transformers' static cache. Results are bit-identical.
        activations: "auto" lets decoder layers under gradient checkpointing keep their activations where memory is free,
            so that these layers are not computed twice. Results are bit-identical. "8GiB" limits this memory on every
            GPU. 0 means "off".
        merge: "reversible" lets ``unmerge_adapter()`` restore the packed bytes that 4-bit linear layers had before
            ``merge_adapter()``. This needs host memory for one copy of the packed weights. Otherwise, peft's code
            quantizes the layers again.

    Returns:
        True if the patch is on, and False if NF4_PATCH=0 or NF4_USE_TRITON=0 keeps it off.

    Raises:
        ConfigError: an argument or an NF4_* variable has an unknown value, or an option that you named needs another
            release of a library.
    """
    from .patching import hooks

    return hooks.enable(
        profile, matmul=matmul, cache=cache, experts=experts, lora=lora, offload=offload, graphs=graphs, activations=activations,
        merge=merge,
    )  # fmt: skip


def disable() -> None:
    """Restore the original functions and forget the options.

    Two kinds of replacement stay in place: those that models with packed experts need, and those that another library
    has wrapped. A wrapped replacement calls the original from then on.
    """
    from .patching import hooks

    hooks.disable()


def release() -> None:
    """Drop every cached weight, CUDA graph and copy of an offloaded weight. PyTorch gets the memory back once nothing uses it.

    Call this function after a write through ``parameter.data`` or a raw pointer. Such a write does not raise the
    weight's version counter, so the options ``cache`` and ``offload`` do not notice it. The options stay on and copy
    the weights again.
    """
    store = sys.modules.get(f"{__name__}.cache.store")  # not imported here, because it imports torch
    if store is not None:
        store.cache.release()
    prefetch = sys.modules.get(f"{__name__}.offload.prefetch")
    if prefetch is not None:
        prefetch.release()
    layers = sys.modules.get(f"{__name__}.graphs.layers")
    if layers is not None:
        layers.graphs.forget()
    kept = sys.modules.get(f"{__name__}.activations.layers")
    if kept is not None:
        kept.activations.forget()


def is_enabled() -> bool:
    """Return whether the patch is on."""
    from .patching.switch import switch

    return switch.on


@contextlib.contextmanager
def enabled(
    profile: Profile | None = None, *, matmul: Matmul | None = None, cache: str | int | None = None,
    experts: Experts | None = None, lora: Lora | None = None, offload: str | int | None = None, graphs: Graphs | None = None,
    activations: str | int | None = None, merge: Merge | None = None,
) -> Iterator[None]:  # fmt: skip
    """Turn the patch on inside a ``with`` block, with the arguments of ``enable``, and restore the previous state after it.

    The patch applies to all threads. If blocks overlap, the options of the block entered last apply, and the end of the
    last block restores the state from before the first.
    """
    from .patching import hooks

    with hooks.block(
        profile, matmul=matmul, cache=cache, experts=experts, lora=lora, offload=offload, graphs=graphs, activations=activations,
        merge=merge,
    ):  # fmt: skip
        yield


def status() -> Status:
    """Return how many dequantizations ran in the kernel, how many calls each option handled, and why it refused others."""
    from .snapshot import status

    return status()


def dequantize_nf4(weight: torch.Tensor, quant_state: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize a packed 4-bit weight with the fused kernel, or on the CPU with plain torch.

    Args:
        weight: the packed weight, two values per byte. Its shape is [bytes, 1], or [1, bytes] if it is transposed.
        quant_state: a ``bitsandbytes.functional.QuantState``, NF4 or FP4, with or without double quantization.
        out: a contiguous tensor of ``quant_state.shape`` and ``quant_state.dtype``, which is filled and returned.

    Returns:
        The dense weight, of ``quant_state.shape`` and ``quant_state.dtype``, transposed if ``weight`` is. On CUDA it is
        bit-identical to the result of ``bitsandbytes.functional.dequantize_4bit``. The CPU result follows the same formula.
        bitsandbytes' CPU code uses a wrong scale for a quantization block that spans two rows, so its result can differ.

    Raises:
        ValueError: the weight, its state or ``out`` is not supported. The message says what was found.
        RuntimeError: the kernel cannot be compiled on this GPU.
    """
    from .patching.direct import dequantize_nf4

    return dequantize_nf4(weight, quant_state, out)


def triton_dequantize_nf4(layer: torch.nn.Module) -> torch.Tensor:
    """Dequantize the weight of a ``bitsandbytes.nn.Linear4bit``.

    This function can replace ``unsloth_dequantize`` in Unsloth's public challenge on NF4 dequantization.

    Returns:
        The dense weight of shape [out_features, in_features], in the dtype of its quant_state.

    Raises:
        ValueError: the layer has no quantized weight (``.to("cuda")`` quantizes it).
    """
    weight: Any = getattr(layer, "weight", None)
    state = getattr(weight, "quant_state", None)
    if state is None:
        raise ValueError(
            f"{type(layer).__name__} has no quantized weight. Pass a bitsandbytes.nn.Linear4bit after "
            '.to("cuda"), which quantizes it'
        )
    return dequantize_nf4(weight, state)


def load_ipython_extension(shell: Any) -> None:
    """Turn the patch on, for ``%load_ext nf4_patch`` in a notebook."""
    enable()


def unload_ipython_extension(shell: Any) -> None:
    """Turn the patch off, for ``%unload_ext nf4_patch``."""
    disable()


def _autoload() -> None:
    """Enable the patch if NF4_PATCH=1 or NF4_PATCH=fast. Never raise, because the import of bitsandbytes would then fail."""
    # Without any variable of nf4_patch, return before other modules are imported.
    if not any(name.startswith("NF4_PATCH") for name in os.environ):
        return
    from .patching.config import Config, ConfigError, options_set

    try:
        # If only variables of options are set, warn at exit, unless the program called ``enable`` by then.
        if not os.environ.get("NF4_PATCH"):
            atexit.register(_say_what_had_no_effect)
        elif Config.read().requested and _enabled_once() and is_enabled() and "bitsandbytes" in sys.modules:
            on = f"NF4_PATCH={os.environ['NF4_PATCH'].strip()}"
            _say(logging.WARNING, f"nf4_patch {__version__} is on: {', '.join([on, *options_set()])}")
    except (ImportError, ConfigError) as error:  # a required package is missing, or a variable has an unknown value
        _say(logging.ERROR, f"nf4_patch stays off: {error}")
    except Exception:
        logging.getLogger(__name__).exception("nf4_patch stays off")


@functools.cache  # a second call of ``_autoload`` by bitsandbytes must not turn the patch on again after ``disable``
def _enabled_once() -> bool:
    return enable()


@functools.cache
def _say(level: int, line: str) -> None:
    """Log a line once per process. Ranks other than 0 log only errors, and data-loader workers log nothing."""
    from .patching.config import is_worker, rank

    if (level >= logging.ERROR or rank() in ("", "0")) and not is_worker():
        logging.getLogger(__name__).log(level, line)


def _say_what_had_no_effect() -> None:
    from .patching.config import options_set
    from .patching.placement import installed

    if (options := ", ".join(options_set())) and "bitsandbytes" in sys.modules and not installed:
        _say(
            logging.WARNING,
            f"nf4_patch: {options}: no effect, because neither NF4_PATCH=1 nor enable() turned the patch on",
        )


_autoload()
