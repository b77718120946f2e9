"""Recognize the function that checkpoints the activations of a transformers decoder layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch.utils.checkpoint

from .targets import LIBRARIES, MODULES

OTHERS = [library.checkpoint for library in LIBRARIES if library.checkpoint]  # always reentrant
MODELS = MODULES["models"]
CHECKPOINTS = ("torch.utils.checkpoint", "checkpoint"), *OTHERS
OFFLOADING = {module for module, _ in OTHERS}
# Values of options that do not change the layer's result. ``determinism_check`` can only raise an error, and ``early_stop``
# only saves time. A checkpoint with other options, such as ``context_fn``, is not recognized.
HARMLESS = {"determinism_check": ("default", "none"), "early_stop": (True, False)}

# transformers' option ``offload`` uses a local function of one of these methods: the first in 5.17, the second since then.
ON_HOST = (
    "PreTrainedModel.gradient_checkpointing_enable",
    "PreTrainedModel._activation_checkpointing_enable",
)


class Checkpoint(NamedTuple):
    """The properties of a layer's checkpoint function."""

    reentrant: bool
    offloads: bool  # whether the checkpoint keeps the layer's input in host memory, as Unsloth's "unsloth" mode does
    preserves_rng: bool = True  # whether the recompute draws the same random numbers
    saves_on_host: bool = False  # whether transformers' option ``offload`` keeps the layer's input in host memory


def checkpoint_of(function: Any) -> Checkpoint | None:
    """Return the properties of PyTorch's or Unsloth's checkpoint function.

    Return None for any other function, or if the function has unknown options.
    """
    function = function if type(function) is partial else partial(function)
    inner, options = function.func, dict(function.keywords)
    if function.args or any(options.pop(name, values[0]) not in values for name, values in HARMLESS.items()):
        return None
    reentrant, preserves_rng = options.pop("use_reentrant", None), options.pop("preserve_rng_state", True)
    if options:
        return None
    name = getattr(inner, "__module__", ""), getattr(inner, "__name__", "")
    # Any wrapper made by functools.wraps has the name of the function that it wraps, so check where its code is defined.
    module = getattr(inner, "__globals__", {}).get("__name__")
    if name in CHECKPOINTS and module in ("torch._compile", name[0]):
        # PyTorch takes None as True.
        reentrant = reentrant is not False or name in OTHERS
        kind: Any = torch.utils.checkpoint.CheckpointFunction
        return Checkpoint(reentrant, reentrant and kind.__module__ in OFFLOADING, bool(preserves_rng))
    if is_offloading(inner):
        found = checkpoint_of(partial(inner.__globals__["checkpoint"], **function.keywords))
        return None if found is None or found.saves_on_host else found._replace(saves_on_host=True)
    if is_setting(inner):
        wrapped, value = (cell.cell_contents for cell in inner.__closure__)
        return checkpoint_of(partial(wrapped, **{**function.keywords, "use_reentrant": value}))
    return None


def is_offloading(function: Any) -> bool:
    """Return whether this is the checkpoint function of transformers' option ``offload``."""
    models = sys.modules.get(MODELS)
    method = getattr(function, "__qualname__", "").partition(".<locals>.")[0]
    return method in ON_HOST and models is not None and function.__globals__ is vars(models)


def setting(checkpoint: Callable[..., Any], value: Any) -> Callable[..., Any]:
    def wrapper(*args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
        return checkpoint(*args, use_reentrant=value, **kwargs)

    return wrapper


def is_setting(function: Any) -> bool:
    """Return whether ``function``, like ms-swift's, only sets ``use_reentrant`` and calls a checkpoint function."""
    code, ours = getattr(function, "__code__", None), setting(print, None).__code__  # type: ignore[attr-defined]
    if code is None or attributes_of_code(code) != attributes_of_code(ours):
        return False
    inner, value = (cell.cell_contents for cell in function.__closure__)
    return callable(inner) and (value is None or type(value) is bool)


attributes_of_code = attrgetter("co_code", "co_consts", "co_argcount", "co_kwonlyargcount", "co_flags", "co_names")
