"""Replacements for transformers' loading, so that each packed weight leaves the GPU before the next one is loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...memory.spare import spare
from ...offload import planning, prefetch
from ...patching.locks import new_lock
from ...patching.placement import installed
from ...patching.replacement import Function, around
from ...patching.targets import TARGETS
from . import TESTED_LOADING

# Without this variable, transformers reads a packed checkpoint in threads, which would fill the GPU with packed weights.
IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"
OWN = ".libraries.transformers.offload:"
lock = new_lock()  # held while a model is loaded, because the variable and the free host memory belong to the process


@around
def warm_up(original: Function, model: Any, expanded_device_map: Any, hf_quantizer: Any) -> None:
    """Replace ``caching_allocator_warmup`` to give spare memory back first, because it reserves the memory of the whole model.

    With ``offload``, reserve nothing, because offloaded weights would be counted too.
    """
    spare.before_model()
    if not prefetch.gate.on:
        original(model, expanded_device_map, hf_quantizer)


@around
def put(original: Function, model: Any, target_name: str, param_value: Any, *others: Any, **kwargs: Any) -> None:
    """Replace ``set_param_for_module``, which stores each weight in the model, to move packed weights to host memory."""
    original(model, target_name, planning.placed(model, target_name, param_value), *others, **kwargs)
    if getattr(param_value, "quant_state", None) is not None and param_value.is_cuda and model in planning.plans:
        # Otherwise, small tensors would fragment the memory that the next dense weight needs.
        torch.cuda.empty_cache()


@contextlib.contextmanager
def planned(model: Any, load_config: Any, nested: Mapping[str, bool]) -> Iterator[None]:
    """While a checkpoint is read into ``model``, move packed weights to host memory if ``offload`` is on.

    Args:
        nested: for each weight that the checkpoint holds packed, whether its scales are quantized too. For other weights,
            the quantization config decides this.

    Raises:
        RuntimeError: nf4_patch cannot replace a function that ``offload`` needs in this release of transformers.
        ValueError: a device mesh shards the weights.
    """
    from transformers.integrations.accelerate import get_device

    if not prefetch.gate.on:
        yield
        return
    rows = (row for row in TARGETS if row.replace.startswith(OWN))
    if missing := [row.name for row in rows if row.name not in installed or installed[row.name].refusal]:
        raise RuntimeError(
            f"offload cannot replace {', '.join(missing)} of this release of transformers. Install transformers "
            f"{TESTED_LOADING[0]} to {TESTED_LOADING[-1]}"
        )
    quantizer, places = load_config.hf_quantizer, load_config.device_map or {"": "cpu"}
    usual = quantizer.quantization_config.bnb_4bit_use_double_quant
    weights = [
        (name, get_device(places, name), planning.packed_size(parameter.numel(), nested.get(name, usual)))
        for name, parameter in model.named_parameters()
        if name in nested or quantizer.param_needs_quantization(model, name)
    ]
    if load_config.device_mesh is not None:
        raise ValueError(
            "offload supports neither tensor nor expert parallelism, because it moves whole weights. Use one of the two"
        )
    with lock:
        before = os.environ.get(IN_ORDER)
        try:
            planning.plan(model, weights)
            os.environ[IN_ORDER] = "1"
            yield
        finally:
            planning.plans.pop(model, None)
            os.environ.pop(IN_ORDER, None)
            if before is not None:
                os.environ[IN_ORDER] = before
