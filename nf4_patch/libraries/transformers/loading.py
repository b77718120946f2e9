"""Replacements for transformers' loading and saving, so that ``load_in_4bit`` packs the stacks of experts too.

A stack is a tensor [experts, ...] that holds one weight, such as down_proj, of all experts in a layer. transformers
quantizes each weight as soon as it is read. During loading, a packed stack is a parameter with its QuantState as an
attribute. After loading, it gets the parametrization of bitsandbytes' ``replace_parameter_4bit``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import parametrize

from ...memory.spare import spare
from ...offload import planning
from ...patching.placement import installed
from ...patching.replacement import around
from ...patching.switch import switch
from ...patching.targets import TARGETS
from ..bitsandbytes import FIELDS, PARAMETRIZE, STATE
from ..bitsandbytes.stacks import functions, is_managed, packed_chains
from . import TESTED_LOADING
from .experts import Loads
from .offload import planned

logger = logging.getLogger("nf4_patch")
NAMES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # names of the stacks that are packed
WHOLE = (None, None)  # (converter, pattern) of a stack that was saved as one tensor, and needs no conversion
LARGEST = 2**31 - 1  # the most elements of a stack that can be packed, because bitsandbytes counts in 32 bits on a GPU
ENABLE = 'nf4_patch.enable(experts="4bit")'
OWN = ".libraries.transformers.loading:"


def is_stack(model: Any, full_name: str) -> bool:
    """Return whether ``full_name`` names a stack of experts in the model before it is packed."""
    path, _, name = full_name.rpartition(".")
    parameter = model.get_submodule(path)._parameters.get(name) if name in NAMES else None
    return parameter is not None and parameter.dim() == 3


def is_matrix(name: str, parameter: Any) -> bool:
    """Return whether a parameter is a weight matrix, not a bias or an integer tensor."""
    return parameter is not None and parameter.dim() > 1 and parameter.is_floating_point() and not name.endswith("bias")


def packed_stacks(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (full name, module, name in the module) of every packed stack."""
    for path, module in list(model.named_modules()):
        for name in packed_chains(module):
            yield f"{path}.{name}", module, name


def carrying(packed: Tensor, state: dict[str, Any]) -> Any:
    """Return a parameter that holds packed bytes and has their QuantState as an attribute.

    Args:
        state: the QuantState as a dict, in the format in which bitsandbytes saves it.
    """
    from ..bitsandbytes.packed import Params4bit

    parameter: Any = Params4bit.from_prequantized(packed, state, device=packed.device)
    parameter._is_hf_initialized = True  # otherwise, transformers would overwrite the parameter with random values
    return parameter


def empty_cache(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.empty_cache()


def quantize_stack(stack: Tensor, config: Any) -> Any:
    """Return the packed parameter, with its QuantState as an attribute.

    Raises:
        ValueError: the number of packed bytes is not a multiple of bnb_4bit_quant_storage's item size, so bitsandbytes
            would write past the end of its result (docs/notes/quantize-4bit-storage.md).
    """
    storage, nbytes = config.bnb_4bit_quant_storage, (stack.numel() + 1) // 2
    if nbytes % storage.itemsize:
        raise ValueError(
            f"the {nbytes} packed bytes of a stack {list(stack.shape)} do not fill whole elements of "
            f"bnb_4bit_quant_storage={storage}. Use torch.uint8"
        )
    packed, state = functions().quantize_4bit(
        stack.contiguous(),
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
        quant_storage=storage,
    )
    return carrying(packed, state.as_dict(packed=True))


# --- loading ---


@around
def quantizer_for(original, config, quantization_config, *args, **kwargs) -> Any:
    """Replace ``get_hf_quantizer`` to remove MXFP4 from gpt-oss's config. The class ``Mxfp4`` decodes the stacks instead."""
    published = getattr(config, "quantization_config", None)
    is_mxfp4 = isinstance(published, dict) and published.get("quant_method") == "mxfp4"
    if is_mxfp4 and getattr(quantization_config, "load_in_4bit", False):
        del config.quantization_config  # from_pretrained passes a copy, so the user's config keeps the attribute
    return original(config, quantization_config, *args, **kwargs)


@around
def needs_quantization(original, self, model, param_name, **kwargs) -> Any:
    """Replace ``param_needs_quantization``, so that stacks are quantized unless ``llm_int8_skip_modules`` names them."""
    if not is_stack(model, param_name):
        return original(self, model, param_name, **kwargs)
    rows = (row for row in TARGETS if row.replace.startswith(OWN) and switch.gates[row.option].on)
    if missing := [row.name for row in rows if row.name not in installed or installed[row.name].refusal]:
        names, tested = ", ".join(missing), f"{TESTED_LOADING[0]} to {TESTED_LOADING[-1]}"
        raise RuntimeError(
            f"{ENABLE} cannot replace {names} of this release of transformers. Install transformers {tested}"
        )
    wanted = is_wanted(self, param_name)
    if wanted and (elements := model.get_parameter(param_name).numel()) > LARGEST:
        raise ValueError(
            f"{param_name} has {elements:,} elements, but bitsandbytes packs at most {LARGEST:,}, because it counts in 32 bits. "
            "Keep this weight in 16 bits: "
            f"llm_int8_skip_modules={[*(self.modules_to_not_convert or ()), param_name.rpartition('.')[0]]}"
        )
    return wanted


def is_wanted(quantizer: Any, full_name: str) -> bool:
    """Return whether ``llm_int8_skip_modules`` names neither the parameter nor a module that contains the parameter."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = full_name, full_name.rpartition(".")[0]
    return all(should_convert_module(name, quantizer.modules_to_not_convert) for name in names)


@around
def quantize(original, self, input_dict, full_layer_name=None, model=None, **kwargs) -> Any:
    """Replace ``Bnb4bitQuantize.convert``, which quantizes weights during loading, to pack stacks too.

    ``input_dict`` maps full names to weights. Each stack in ``input_dict`` already holds all experts of its layer.
    """
    if not any(is_stack(model, name) for name in input_dict):
        return original(self, input_dict, full_layer_name=full_layer_name, model=model, **kwargs)
    converted = {}
    for name in list(input_dict):
        value = input_dict.pop(name)  # so that the dense stack is freed as soon as it is packed
        value = value[0] if isinstance(value, list) else value
        if self.hf_quantizer.param_needs_quantization(model, name):
            # Empty the cache of the CUDA allocator before and after packing. Otherwise, small tensors would fragment the
            # memory that the next dense stack needs.
            empty_cache(value)
            value = quantize_stack(value, self.hf_quantizer.quantization_config)
            empty_cache(value)
        converted[name] = value
    return converted


@dataclass(frozen=True)
class Mxfp4:
    """A stack in MXFP4, which is decoded when transformers indexes it like a slice of a safetensors file."""

    blocks: Any
    scales: Any
    device: Any

    def __getitem__(self, _everything: Any) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        packed = [part[...].to(self.device) for part in (self.blocks, self.scales)]
        stack: Tensor = convert_moe_packed_tensors(*packed, rows_per_chunk=2**20)  # 64 MiB of indices at a time
        return stack


@around
def load(original, model, state_dict, load_config, disk_offload_index=None) -> Any:
    """Replace ``convert_and_load_state_dict_in_model`` to read stacks that were saved packed or in MXFP4."""
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    spare.before_model()
    stacks = {name: parameter for name, parameter in model.named_parameters() if is_stack(model, name)}
    where = targets(model, load_config.weight_mapping or (), stacks)
    in_4bit = {key.partition(STATE)[0] for key in state_dict if STATE in key}
    saved: dict[str, dict[Any, list[str]]] = {}  # the checkpoint's keys, by stack and by (converter, pattern)
    for key in in_4bit if stacks else ():
        name, *part = where(key)
        if name in stacks:
            saved.setdefault(name, {}).setdefault(tuple(part), []).append(key)
    on = switch.gates["experts"].on
    Loads.seen |= on
    if saved and not on:
        raise ValueError(
            f"{load_config.pretrained_model_name_or_path} holds experts that are packed in 4 bits ({min(saved)} and "
            f"{len(saved) - 1} more). To load them, call {ENABLE} first, or set NF4_PATCH_EXPERTS=4bit"
        )
    if not isinstance(load_config.hf_quantizer, Bnb4BitHfQuantizer):
        return original(model, state_dict, load_config, disk_offload_index)
    left = [] if on else [stack for name, stack in stacks.items() if is_wanted(load_config.hf_quantizer, name)]
    if left:
        size = sum(stack.nbytes for stack in left) / 1e9
        moves = " offload moves only packed weights." * switch.gates["offload"].on
        logger.warning(
            "nf4_patch: load_in_4bit leaves the experts in 16 bits, %.2g GB in total.%s To pack them, call %s before loading",
            size,
            moves,
            ENABLE,
        )
    devices = device_of_stacks(model, load_config) if on else {}
    double = load_config.hf_quantizer.quantization_config.bnb_4bit_use_double_quant
    with planned(model, load_config, {name: double and parts.keys() <= {WHOLE} for name, parts in saved.items()}):
        if not on:
            return original(model, state_dict, load_config, disk_offload_index)
        state_dict, packed = dict(state_dict), {}
        for name, parts in saved.items():
            read = functools.partial(read_packed, state_dict, device=devices[name])
            packed[name] = read(parts[WHOLE][0]) if WHOLE in parts else joined(name, stacks[name], parts, read)
            packed[name].quant_state.dtype = stacks[name].dtype  # decode to the dtype of the model's parameter
            packed[name] = planning.placed(model, name, packed[name])
        for blocks in [key for key in state_dict if key.endswith("_blocks")]:
            key = blocks.removesuffix("_blocks")
            if (name := where(key)[0]) in devices:
                state_dict[key] = Mxfp4(state_dict.pop(blocks), state_dict.pop(f"{key}_scales"), devices[name])
        own_names = [name for name, _ in model.named_parameters()]
        info, disk_offload_index = original(model, state_dict, load_config, disk_offload_index)
    for name, parameter in packed.items():
        path, _, stack = name.rpartition(".")
        setattr(model.get_submodule(path), stack, parameter)
        info.missing_keys.discard(name)
    lost = info.missing_keys & devices.keys()
    unread = in_4bit & {key.partition(STATE)[0] for key in info.unexpected_keys}
    if unread and (lost or any(key.rpartition(".")[2] in NAMES for key in unread)):
        raise ValueError(
            f"{load_config.pretrained_model_name_or_path} holds packed experts, such as {min(unread)}, for which "
            f"{type(model).__name__} of this release of transformers has no parameter. Load the original 16-bit model and pack it"
        )
    # Record the used conversions, because transformers reverses the recorded conversions when it saves a dequantized model.
    # A conversion that makes only packed stacks did not run, but is needed for saving too.
    model._weight_conversions = [
        each for each in load_config.weight_mapping or ()
        if not reads_state(each) and (each.was_used() or (packed and makes_only(each, packed, own_names)))
    ]  # fmt: skip
    return info, disk_offload_index


def reads_state(conversion: Any) -> bool:
    """Return whether a conversion builds packed weights from saved QuantStates.

    transformers cannot reverse such a conversion when it saves the model.
    """
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    return any(isinstance(op, Bnb4bitDeserialize) for op in getattr(conversion, "operations", ()))


def device_of_stacks(model: Any, load_config: Any) -> dict[str, Any]:
    """Return the device of each stack by its full name.

    Raises:
        ValueError: ``device_map`` offloads experts that would be packed, or a device mesh shards them.
    """
    from transformers.integrations.accelerate import get_device

    places = load_config.device_map or {"": "cpu"}
    devices = {name: get_device(places, name) for name, _ in model.named_parameters() if is_stack(model, name)}
    needed = [name for name in devices if load_config.hf_quantizer.param_needs_quantization(model, name)]
    offloaded = {"disk", "cpu" if len(set(places.values())) > 1 else "disk"} & {devices[name] for name in needed}
    if needed and (offloaded or load_config.device_mesh is not None):
        found = f"a device_map with {' and '.join(offloaded)}" if offloaded else "tensor or expert parallelism"
        raise ValueError(
            f"{ENABLE} packs experts for one GPU, for several GPUs with whole layers each, or for a CPU. Found {found}. Change this, "
            'or keep the experts in 16 bits with experts="off". If the model is too large for the GPU, use device_map={"": 0} and '
            'offload="all"'
        )
    return devices


def makes_only(conversion: Any, stacks: dict[str, Any], names: list[str]) -> bool:
    """Return whether ``conversion`` produces only packed stacks. ``names`` are the full names of all parameters of the model."""
    back = conversion.reverse_transform()
    made = {name for name in names if back.rename_source_key(name)[1] is not None}
    return bool(made) and made <= stacks.keys()


def targets(model: Any, mapping: Any, stacks: dict[str, Any]) -> Any:
    """Return a function that maps a checkpoint's key to (name, converter, pattern).

    ``name`` is the full name of the parameter. ``converter`` is the entry of ``mapping`` that converts the tensor, and
    ``pattern`` is the source pattern that matches the key. The last two are None if the tensor needs no conversion.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter) and not reads_state(each)]
    by_pattern: dict[Any, Any] = {pattern: each for each in converters for pattern in each.source_patterns}

    def target(key: str) -> tuple[str, Any, str | None]:
        # First look up the key without any conversion, because a packed stack is saved under its full name.
        for conversions in (([], []), (renamings, []), (renamings, converters)):
            name, pattern = rename_source_key(key, *conversions, model.base_model_prefix, stacks)
            if name in stacks:
                break
        return name, by_pattern.get(pattern), pattern

    return target


def read_packed(state_dict: dict[str, Any], key: str, device: Any) -> Any:
    """Pop a packed weight and its QuantState from ``state_dict``, and return them as a parameter."""
    state = {field: state_dict.pop(f"{key}.{field}")[...] for field in FIELDS if f"{key}.{field}" in state_dict}
    return carrying(state_dict.pop(key)[...].to(device), state)


JOINED = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def joined(name: str, stack: Tensor, parts: dict[Any, list[str]], read: Any) -> Any:
    """Join experts that were packed one by one into one packed stack, by concatenating their bytes and their absmax.

    The offset of nested absmax differs between experts. So nested absmax is first decoded to fp32, which takes 0.37 bits more
    per weight.

    Args:
        parts: the experts' keys in the checkpoint, by (converter, pattern) as in ``targets``.
        read: returns the packed weight of a key as a parameter.

    Raises:
        ValueError: the experts cannot be joined.
    """
    from transformers.core_model_loading import dot_natural_key

    converter = next(iter(parts))[0]
    keys = [sorted(parts.get((converter, pattern), ()), key=dot_natural_key) for pattern in converter.source_patterns]
    experts = [read(key) for expert in zip(*keys, strict=False) for key in expert]
    states = [expert.quant_state for expert in experts]
    kinds = {(each.dtype, each.blocksize, each.quant_type) for each in experts}
    size = sum(math.prod(state.shape) for state in states)
    if [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations] not in JOINED:
        why = f"{converter.operations} does not make one stack of them"
    elif {*map(len, keys)} != {stack.shape[0]} or size != stack.numel():
        why = f"the stack has {stack.numel()} elements, but the packed experts have {size}"
    elif len(kinds) > 1:
        why = "they differ in dtype, blocksize or quant_type"
    elif any(math.prod(state.shape) % state.blocksize for state in states):
        why = f"an expert does not consist of whole blocks of {states[0].blocksize}"
    else:
        scales = [
            functions().dequantize_blockwise(state.absmax, state.state2) + state.offset
            if state.nested
            else state.absmax
            for state in states
        ]
        kind = states[0].code, states[0].blocksize, states[0].quant_type, stack.dtype
        state = functions().QuantState(torch.cat(scales), stack.shape, *kind)
        return carrying(torch.cat(experts), state.as_dict(packed=True))
    raise ValueError(
        f"the experts of {name} were packed one by one, such as {min(map(min, parts.values()))}, and cannot be joined, because {why}. "
        "Load the original 16-bit model and pack it"
    )


@around
def finish(original, self, model, **kwargs) -> Any:
    """Replace ``_process_model_after_weight_loading`` to give packed stacks bitsandbytes' parametrization.

    First pack stacks that are still dense, with a warning. Also warn about experts that stay in 16 bits.
    """
    from ..bitsandbytes.packed import end_caching

    library: Any = importlib.import_module(PARAMETRIZE)
    left, dense = [], {}
    for path, module in list(model.named_modules()):
        for name, parameter in [item for item in module._parameters.items() if item[0] in NAMES]:
            full_name = f"{path}.{name}"
            if is_stack(model, full_name) and self.param_needs_quantization(model, full_name):
                left.append(full_name)
                parameter = quantize_stack(parameter.detach(), self.quantization_config)
                setattr(module, name, parameter)
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                library.replace_parameter_4bit_prequantized(module, name, state.as_dict(packed=True), parameter.device)
                parameter.quant_state = module.parametrizations[name][0].quant_state
        end_caching(module)
        kind = parametrize.type_before_parametrizations(module).__name__
        for name, parameter in module._parameters.items() if "Expert" in kind else ():
            if is_matrix(name, parameter) and is_wanted(self, f"{path}.{name}"):
                dense[f"{path}.{name}"] = f"{kind}.{name}", parameter.nbytes
    if left:
        said = f"{len(left)} stacks of experts were packed only after loading, and took 16 bits per weight until then"
        logger.warning("nf4_patch: %s: %s", said, ", ".join(left))
    if dense:
        kinds, size = ", ".join(sorted({kind for kind, _ in dense.values()})), sum(size for _, size in dense.values())
        said = f"{len(dense)} weights of experts stay in 16 bits, {size / 1e9:.2g} GB in total"
        logger.warning(
            "nf4_patch: %s: %s. %s packs only 3-D weights with the names %s", said, kinds, ENABLE, ", ".join(NAMES)
        )
    return original(self, model, **kwargs)


# --- saving and dequantizing a loaded model ---


@around
def save(original, model, state_dict) -> Any:
    """Replace ``revert_weight_conversion``, which would split a packed stack into one tensor for each expert."""
    stacks = tuple(f"{name}." for name, _, _ in packed_stacks(model))
    kept = {key: tensor for key, tensor in state_dict.items() if f"{key}.".startswith(stacks)}
    return original(model, {key: tensor for key, tensor in state_dict.items() if key not in kept}) | kept


@around
def dequantize(original, self, model, dtype=None) -> Any:
    """Replace ``_dequantize``, which ``model.dequantize()`` calls, so that packed stacks become dense too."""
    model = original(self, model, dtype)
    for _, module, name in packed_stacks(model):
        if not (switch.gates["experts"].on or is_managed(module.parametrizations[name])):
            continue
        dense = getattr(module, name).to(dtype)
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        setattr(module, name, Parameter(dense))
    return model
