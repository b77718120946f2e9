"""Decide which decoder-layer calls a graph may replace, and describe such a call."""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..activations.layers import activations
from ..nf4 import runtime
from ..patching import context
from ..patching.checkpoint import Checkpoint, checkpoint_of
from ..patching.counters import warn_once
from ..patching.module_hooks import HOOKS_ON_ALL
from ..patching.reasons import Reason
from ..patching.switch import switch
from ..patching.targets import MODULES
from .arguments import signature
from .capture import Environment

STATIC_CACHES, COLLECTED, LAYERS = (MODULES[name] for name in ("static caches", "collected outputs", "decoder layers"))
# CACHE_ARGUMENTS: names of the argument in which a layer gets the cache of keys and values. They are for transformers up to 5.17,
# for newer releases, and for a few older architectures.
CACHE_ARGUMENTS = "past_key_values", "cache", "layer_past"
WRONG_TOKENS = (
    "nf4_patch: generate() in training mode with gradient checkpointing gives wrong tokens, because transformers then ignores "
    "the cache of keys and values: call model.eval() before generate()"
)
WRONG_GRADIENTS = (
    "nf4_patch: a reentrant checkpoint over layers that share keys and values gives wrong gradients: set "
    'gradient_checkpointing_kwargs={"use_reentrant": False}'
)
NOT_CHECKPOINTED = Checkpoint(reentrant=False, offloads=False)


class LayerCall(NamedTuple):
    """A call of a decoder layer that graphs may replace."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # without the StaticCache
    tensors: list[Tensor]  # all tensor arguments, the layer's input first
    environment: Environment
    checkpoint: Checkpoint
    cache_name: str  # the argument that holds the StaticCache
    static_cache: Any  # the StaticCache that the layer writes if the model generates, else None
    key: Any

    @classmethod
    def of(
        cls, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], checkpoint: Checkpoint, cache_name: str,
        static_cache: Any,
    ) -> LayerCall:  # fmt: skip
        """Describe a call of ``layer``.

        Raises:
            Unsupported: a graph cannot replay an argument.
        """
        tensors: list[Tensor] = []
        environment, config = Environment.current(), switch.config
        plain = kwargs if static_cache is None else {**kwargs, cache_name: None}
        layouts = signature(args, tensors), signature(plain, tensors)
        # In generation, x.requires_grad is ignored, because TRL makes the embeddings require a gradient there too.
        mode = args[0].requires_grad and static_cache is None, checkpoint.reentrant
        options = tuple(config.options.items())  # type: ignore[union-attr]
        key = (*layouts, environment, mode, options, static_cache and weakref.ref(static_cache))
        return cls(layer, args, plain, tensors, environment, checkpoint, cache_name, static_cache, key)

    @property
    def x(self) -> Tensor:
        return self.tensors[0]

    @property
    def trains(self) -> bool:
        return self.static_cache is None

    @property
    def may_recompute(self) -> bool:
        """Return whether graphs without kept activations may run the call."""
        return not self.trains or self.layer.gradient_checkpointing


def is_in_checkpoint() -> bool:
    """Return whether the forward runs inside a non-reentrant checkpoint."""
    hooks = context.saved_tensors_hooks(False)
    return type(hooks) is tuple and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def checkpoint_for(layer: Any, static_cache: Any = None) -> Checkpoint | None:
    """Return how this call is checkpointed, or None if the checkpoint function is not recognized."""
    if static_cache is not None or not layer.gradient_checkpointing:
        return NOT_CHECKPOINTED
    return checkpoint_of(layer._gradient_checkpointing_func)


def is_checkpointed_without_gradients(layer: Any) -> bool:
    """Return whether transformers checkpoints the layer even without gradients.

    It then drops the cache of keys and values. Older releases do so in training mode.
    """
    kind: Any = sys.modules[LAYERS].GradientCheckpointingLayer
    return layer.gradient_checkpointing and layer.training and "__init_subclass__" not in vars(kind)


def static_cache_of(layer: Any, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Return the name of the argument that holds the StaticCache, and the StaticCache that this call writes.

    Return ("", None) if the call trains or has no StaticCache that graphs support.
    """
    nothing = "", None
    name = next((name for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)
    if name is None or torch.is_grad_enabled() or is_checkpointed_without_gradients(layer):
        return nothing
    caches: Any = sys.modules[STATIC_CACHES]
    static_cache = arguments[name]
    if type(static_cache) is not caches.StaticCache or getattr(static_cache, "offloading", False):
        return nothing
    # StaticLayer exists since transformers 4.54. Its subclasses are not supported, because they keep state on the host.
    kind = getattr(caches, "StaticLayer", None)
    layers = getattr(static_cache, "layers", (None,))
    return (name, static_cache) if all(type(each) is kind for each in layers) else nothing


def why_not(layer: Any, args: tuple[Any, ...], checkpoint: Checkpoint | None, generates: bool) -> Reason | None:
    """Return the Reason why this call has to run eagerly, or None.

    ``generates`` says whether the call writes a StaticCache.
    """
    if not generates and (reason := why_not_trained(layer)) is not None:
        return reason
    if checkpoint is None:
        return Reason.GRAPH_CHECKPOINT
    if not args or not isinstance(args[0], Tensor):
        return Reason.GRAPH_ARGUMENTS
    if not runtime.runs_on(args[0]):
        return Reason.NOT_CUDA
    # A reentrant checkpoint gives no gradients if its input requires none.
    if not args[0].requires_grad and checkpoint.reentrant:
        return Reason.GRAPH_ARGUMENTS
    if args[0].dtype is torch.float32 and checkpoint.offloads:  # Unsloth rounds it to bf16
        return Reason.GRAPH_CHECKPOINT
    return why_not_here()


def why_not_trained(layer: Any) -> Reason | None:
    if not (layer.training and torch.is_grad_enabled()):
        return Reason.GRAPH_NOT_TRAINING
    if layer.gradient_checkpointing:
        return None
    if activations.mode == "off":
        return Reason.GRAPH_NOT_CHECKPOINTED
    return None if context.saved_tensors_hooks(False) is None else Reason.GRAPH_MODE


def why_not_here() -> Reason | None:
    """Return the Reason why no graph may replace any call now, such as a PyTorch mode or a hook on all modules, or None."""
    if (watcher := context.watched()) is not None:
        return watcher
    collector: Any = sys.modules.get(COLLECTED)
    if any(HOOKS_ON_ALL) or (collector is not None and collector._active_collector.get()):
        return Reason.GRAPH_HOOKED
    if (
        context.backward_in_progress() != -1 or torch.is_anomaly_enabled() or runtime.is_capturing()
        or is_in_checkpoint() or switch.gates["offload"].on
    ):  # fmt: skip
        return Reason.GRAPH_MODE
    return None


def warn_of_wrong_results(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn once if the layer's settings make transformers itself generate wrong tokens or compute wrong gradients."""
    if not (layer.gradient_checkpointing and layer.training):
        return
    if not torch.is_grad_enabled():
        drops_cache = is_checkpointed_without_gradients(layer) and not getattr(
            layer, "_can_checkpoint_with_cache", False
        )
        cached = any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS)
        if drops_cache and cached and args and isinstance(args[0], Tensor) and args[0].shape[1:2] == (1,):
            warn_once(WRONG_TOKENS)
        return
    shares = getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", False) and kwargs.get("shared_kv_states")
    checkpoint = checkpoint_for(layer) if shares else None
    if checkpoint is not None and checkpoint.reentrant:
        warn_once(WRONG_GRADIENTS)
