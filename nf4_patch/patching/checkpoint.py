"""Recognize the function with which a decoder layer of transformers checkpoints its activations."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch.utils.checkpoint

UNSLOTH = "unsloth_zoo.gradient_checkpointing"  # the Python module of Unsloth's checkpoint
UNSLOTHS = UNSLOTH, "unsloth_checkpoint"
CHECKPOINTS = ("torch.utils.checkpoint", "checkpoint"), UNSLOTHS
# Options of a checkpoint that do not change what the layer computes. A checkpoint with other options, such as
# ``context_fn``, is not recognized.
HARMLESS = {"use_reentrant", "preserve_rng_state", "determinism_check", "early_stop"}


class Checkpoint(NamedTuple):
    """How a layer is checkpointed."""

    reentrant: bool
    offloads: bool  # whether the layer's input waits for the backward in host memory, as with Unsloth's "unsloth"


def checkpoint_of(function: Any) -> Checkpoint | None:
    """Return how a checkpoint function works. Return None if it is neither PyTorch's nor Unsloth's, or has other options.

    Without ``preserve_rng_state``, the recompute draws other random numbers, so the result is None, too.
    """
    function = function if type(function) is partial else partial(function)
    name = getattr(function.func, "__module__", ""), getattr(function.func, "__name__", "")
    # A wrapper made by functools.wraps has the name of the function that it wraps. PyTorch's and Unsloth's are such wrappers too.
    module = getattr(function.func, "__globals__", {}).get("__name__")
    if name not in CHECKPOINTS or module not in ("torch._compile", name[0]) or function.args:
        return None
    options = function.keywords
    if not HARMLESS.issuperset(options) or not options.get("preserve_rng_state", True):
        return None
    # PyTorch takes None as True. Unsloth's checkpoint is always reentrant.
    reentrant = options.get("use_reentrant") is not False or name == UNSLOTHS
    class_of_reentrant: Any = torch.utils.checkpoint.CheckpointFunction
    return Checkpoint(reentrant, reentrant and class_of_reentrant.__module__ == UNSLOTH)
