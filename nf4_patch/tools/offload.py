"""Estimate from its configuration whether a model fits on a GPU, for ``nf4-patch doctor --offload`` and ``--measure``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..libraries.transformers.loading import is_stack
from ..offload import planning
from .advice import EXPERTS, FAST, OFFLOAD
from .report import NotAvailable
from .step import shortened

RANK, TOKENS = 16, 2048  # LoRA's rank and the tokens per step for which the memory is estimated
TRAINED = 6  # bytes per trained weight, for the weight and its gradient in bf16, and two 8-bit moments
GB, GIB = 10**9, 2**30
MARGIN = 1.3  # measured peaks of mixtures were up to 1.3 times the sum in ``sizes_of`` (H200, docs/offload.md)
CUDA_BYTES = GB // 2  # memory that a process takes on a GPU outside of PyTorch
CARDS = (12, 16, 24, 48)  # the usual GPU sizes in GB, shown on a machine without a GPU


@dataclass(frozen=True)
class Sizes:
    """The bytes that a model takes in training, estimated from its configuration."""

    layers: Counter[str]  # packed weights of each layer
    others: int  # everything else that a step needs on the GPU
    is_mixture: bool

    def line(self, gpu: int) -> tuple[str, int]:
        """Return the value of ``offload`` for a GPU with ``gpu`` bytes, and the bytes of host memory that this value takes.

        The value is "" if the GPU is too small.
        """
        packed, buffers = self.layers.total(), 2 * max(self.layers.values(), default=0)
        room = gpu - CUDA_BYTES - self.others
        if room >= packed:
            return "off", 0
        if room < buffers:
            return "", packed
        budget = room // (GIB // 2) * (GIB // 2)
        if budget <= buffers:
            return "all", packed
        return f"{budget / GIB:g}GiB", packed + buffers - budget


def sizes_of(model: Any) -> Sizes:
    """Estimate the sizes of a model that is on the meta device."""
    layers: Counter[str] = Counter()
    linear = {f"{name}.weight" for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    rest, largest, mixture = 0, 0, False
    features: Counter[str] = Counter()
    trained = 0
    dense: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        layer, stack = planning.layer_of(name), is_stack(model, name)
        if not layer or not (name in linear or stack):
            rest += 2 * parameter.numel()
            continue
        layers[layer] += planning.packed_size(parameter.numel(), True)
        trained += RANK * (parameter.numel() // parameter.shape[-1] + parameter.numel() // parameter.shape[-2])
        if stack:
            mixture = True
            dense[layer] += 2 * parameter.numel()
        else:
            features[layer] += sum(parameter.shape)
            largest = max(largest, parameter.numel())
    hidden = model.config.get_text_config().hidden_size
    inputs = len(layers) * TOKENS * hidden * 2
    activations = 3 * TOKENS * max(features.values(), default=0) + 4 * largest + max(dense.values(), default=0)
    return Sizes(layers, int(MARGIN * (rest + TRAINED * trained + inputs + activations)), mixture)


def configuration(name: str) -> Any:
    """Return the configuration of a model, given as a name or a folder.

    Raises:
        NotAvailable: transformers cannot read the configuration.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # a wrong field raises whatever transformers calculates with it
        raise NotAvailable(f"transformers cannot read the configuration of {name}: {in_one_line(error)}") from error


def in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def on_meta(config: Any) -> Any:
    """Build a model on the meta device.

    Raises:
        NotAvailable: transformers has no causal language model for the configuration, or cannot build it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    kind = f"a model of the type {config.model_type}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotAvailable(f"{kind} is no causal language model, and no other model can be estimated")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        raise NotAvailable(f"{kind} cannot be built: {in_one_line(error)}") from error


def layers_that_fit(whole: Any, name: str, most: int) -> int:
    """Return how many layers, at most ``most``, fit into the free GPU memory when they are built in 16 bits.

    Raises:
        NotAvailable: the model is a mixture, no layer fits, or transformers cannot build the model with fewer layers.
    """
    if not hasattr(whole, "num_hidden_layers"):
        raise NotAvailable(f"the configuration of {name} has no num_hidden_layers")
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 2**62
    for layers in range(min(most, whole.num_hidden_layers), 0, -1):
        try:
            config = shortened(whole, layers)
        except Exception as error:
            raise NotAvailable(
                f"the configuration of {name} allows no other number of layers: {in_one_line(error)}"
            ) from error
        model = on_meta(config)
        sizes = sizes_of(model)
        if sizes.is_mixture:
            raise NotAvailable(f"{name} is a mixture of experts. --measure needs a dense model")
        if 2 * sum(parameter.numel() for parameter in model.parameters()) + sizes.others <= free:
            return layers
    raise NotAvailable(f"not even one layer of {name} fits into the {free / 2**30:.1f} GiB that are free on this GPU")


def lines(name: str, gpus: list[tuple[int, int]]) -> Iterator[str]:
    """Yield lines that tell the user what to type for a model, given as a name or a folder.

    ``gpus`` holds the index and the bytes of each GPU. If it is empty, the lines are for GPUs of usual sizes.
    """
    sizes = sizes_of(on_meta(configuration(name)))
    if not sizes.layers:
        raise NotAvailable(f"no layer of {name} can be packed in 4 bits: its decoder layers have no torch.nn.Linear")
    yield (
        f"{name}: {sizes.layers.total() / GB:.1f} GB of packed weights in {len(sizes.layers)} layers, and about "
        f"{sizes.others / GB:.1f} GB for all else in a step of {TOKENS:,} tokens, with LoRA r = {RANK} on all linear layers, 8-bit "
        "AdamW, gradient checkpointing and Liger's loss. This estimate is careful: docs/offload.md has measured models"
    )
    line = EXPERTS if sizes.is_mixture else FAST.removesuffix(")")
    here = [(f"GPU {index}", index, size) for index, size in gpus]
    for place, index, size in here or [(f"a GPU of {card} GB", 0, card * GB) for card in CARDS]:
        offload, host = sizes.line(size)
        if not offload:
            yield f'  {place}: too small even with offload="all". Train fewer tokens, a smaller rank, or fewer layers'
            continue
        is_tight = offload != "off" or size - sizes.others - sizes.layers.total() < size / 8
        options = ', cache="off"' * is_tight + f', offload="{offload}"' * (offload != "off")
        call = f'{OFFLOAD}"{offload}")' if sizes.is_mixture and offload != "off" else f"{line}{options})"
        yield (
            f'  {place}: nf4_patch.{call}, device_map={{"": {index}}}; '
            f"{host / GB:.1f} GB of host memory"
            + f", of which {planning.free_memory() / GB:.1f} GB are free"
            * bool(here)
        )
        if 0 < host < sizes.layers.total():
            yield f'    or offload="auto", which finds the size in training; {sizes.layers.total() / GB:.1f} GB of host memory'
