"""Merge a LoRA adapter layer by layer, so that host memory holds one layer in 16 bits and not the whole model.

The merged bytes are those of ``PeftModel.from_pretrained(model.dequantize(), adapter).merge_and_unload()``, because the same functions of
transformers, bitsandbytes and peft read, quantize, dequantize and merge each layer. Needs transformers 5.17 or newer.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel, PeftType, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, core_model_loading, modeling_utils
from transformers.integrations.bitsandbytes import dequantize_bnb_weight
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils import logging

PREFIX = "base_model.model."  # of the names in peft's model
SHARD = 2**30  # a file is written as soon as this many bytes wait for it
HANDLED = {  # fields of LoraConfig that do not change how an adapter is merged, or that peft's merge of one layer handles
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "fan_in_fan_out", "bias", "lora_bias", "use_rslora", "use_dora", "modules_to_save",
    "trainable_token_indices", "ensure_weight_tying", "init_lora_weights", "runtime_config", "loftq_config", "eva_config",
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
}  # fmt: skip
# values of init_lora_weights that leave the base weights as they are
KEEPS_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")


class Refused(ValueError):
    """This adapter, checkpoint or folder cannot be merged layer by layer. Nothing was written."""


@contextmanager
def reading(folder: str | Path, *files: str, library: str) -> Iterator[None]:
    """Read a folder or a name on the Hub.

    Raises:
        Refused: the folder lacks one of ``files``, or what it holds is incomplete, damaged or not supported.
    """
    advice = f"Pass the folder that save_pretrained of {library} wrote"
    for file in files:
        if Path(folder).is_dir() and not (Path(folder) / file).is_file():
            raise Refused(f"{folder} has no {file}. {advice}")
    try:
        yield
    except (OSError, ValueError) as error:
        why = str(error).rstrip(".")
        raise Refused(f"{folder} cannot be read: {why}. {advice}, or its name on the Hub") from error


# --- the checkpoint ---


def open_file(file: str | Path) -> Any:
    """Open a safetensors file.

    Raises:
        Refused: the file is missing or damaged.
    """
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise Refused(f"{file} cannot be read: {error}") from error


def empty_model(path: str, **options: Any) -> tuple[Any, list[str], Any]:
    """Return the model that ``from_pretrained`` makes, without reading weights, the checkpoint's files, and how to load them."""
    found: list[Any] = []

    def remember(model: Any, state_dict: Any, files: Any, load_config: Any, *_: Any) -> tuple[None, None]:
        found.extend((files, load_config))
        return None, None

    with ExitStack() as stack:
        for owner, name, replacement in (
            (PreTrainedModel, "_load_pretrained_model", staticmethod(remember)),
            (PreTrainedModel, "_finalize_model_loading", staticmethod(lambda *_: None)),
            (HfQuantizer, "postprocess_model", lambda *_, **__: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(warnings.catch_warnings())
        # A packed checkpoint has its own settings.
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        stack.enter_context(reading(path, "config.json", library="transformers"))
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    files, load_config = found
    if not isinstance(load_config.hf_quantizer, Bnb4BitHfQuantizer):
        raise Refused(f"{path} is not in 16 bits or in 4 bits of bitsandbytes. Pass the model that you trained on")
    if any(getattr(module, "source_cls", None) is Conv1D for module in model.modules()):
        raise Refused(f"{path} has layers of the class Conv1D, which transformers dequantizes to transposed weights")
    if not all(file.endswith(".safetensors") for file in files):
        raise Refused(f"{path} has no safetensors files. Load it with transformers and save it with save_pretrained")
    return model, files, load_config


def dequantized(model: Any) -> Any:
    """Return what ``model.dequantize()`` makes of an empty model."""
    model.hf_quantizer.remove_quantization_config(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            size, bias = (module.in_features, module.out_features), module.bias is not None
            model.set_submodule(path, nn.Linear(*size, bias=bias, dtype=model.config.dtype, device="meta"))
    return model


def layers_of(model: Any) -> list[str]:
    """Return the paths of all layers, which are the elements of the outermost ModuleLists.

    A layer that shares weights with other modules is left out, so that it is merged together with them.
    """
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    shared = getattr(model, "all_tied_weights_keys", None) or {}
    tied = (*shared, *shared.values())
    layers = (f"{path}.{name}" for path in outermost for name, _ in model.get_submodule(path).named_children())
    return [layer for layer in layers if not any(key.startswith(f"{layer}.") for key in tied)]


def one_layer(module: Any, layer: str) -> Any:
    """Return a copy of a model that has this layer only. The layer itself is shared, not copied."""
    copied = copy.copy(module)
    name, _, rest = layer.partition(".")
    child = module._modules[name]
    copied._modules, copied._parameters, copied._buffers = {name: one_layer(child, rest) if rest else child}, {}, {}
    return copied


def without(module: Any, layers: list[str]) -> Any:
    """Return a copy of a model that lacks these layers. Everything else is shared, not copied."""
    copied, inside = copy.copy(module), {}
    copied._modules = dict(module._modules)
    for layer in layers:
        name, _, rest = layer.partition(".")
        inside.setdefault(name, []).append(rest)
    for name, rests in inside.items():
        if "" in rests:
            del copied._modules[name]
        else:
            copied._modules[name] = without(module._modules[name], rests)
    return copied


def keys_by_layer(model: Any, files: list[str], load_config: Any, layers: list[str]) -> dict[str, dict[str, str]]:
    """Return a dict from each layer to its keys in the checkpoint, and their files. What is in no layer is under ``""``."""
    conversions = load_config.weight_mapping or []
    renamings = [each for each in conversions if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, core_model_loading.WeightConverter)]
    names, prefix = model.state_dict(), model.base_model_prefix
    keys: dict[str, str] = {}
    for file in files:
        with open_file(file) as weights:
            keys |= dict.fromkeys(weights.keys(), file)
    found: dict[str, dict[str, str]] = {layer: {} for layer in ("", *layers)}
    for key in sorted(keys, key=core_model_loading.dot_natural_key):
        name, _ = core_model_loading.rename_source_key(key, renamings, converters, prefix, names)
        parts = name.split(".")
        paths = [".".join((*start, *parts[:end])) for start in ((), (prefix,)) for end in range(1, len(parts))]
        found[next((layer for layer in paths if layer in found), "")][key] = keys[key]
    return found


def dense_weights(part: Any, keys: dict[str, str], load_config: Any) -> dict[str, Tensor]:
    """Read weights into a part of an empty model, as ``from_pretrained`` does, and return them dequantized.

    The files are read, not mapped, because pages of a mapped file count as memory of the process.
    """
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt", backend="pread")) for file in set(keys.values())
        }
        slices = {key: opened[file].get_slice(key) for key, file in keys.items()}
        info, _ = modeling_utils.convert_and_load_state_dict_in_model(part, slices, load_config, None)
    if info.conversion_errors:
        raise RuntimeError("\n".join(info.conversion_errors.values()))
    if not set(part.all_tied_weights_keys).isdisjoint(part.state_dict()):
        # removes what it ties from missing_keys
        part.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    if info.missing_keys:
        raise Refused(f"the checkpoint lacks {min(info.missing_keys)}, which {type(part).__name__} has")
    load_config.hf_quantizer.postprocess_model(part)
    dtype = part.config.dtype
    for path, module in list(part.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            if getattr(module.weight, "quant_state", None) is None:
                raise Refused(
                    f"the checkpoint lacks the quantization state of {path}.weight, or transformers does not load it. Pass the model in "
                    "16 bits that you trained on"
                )
            module.weight = nn.Parameter(dequantize_bnb_weight(module.weight).to(dtype), requires_grad=False)
            module.quant_state = None
        for name in list(getattr(module, "parametrizations", ())):
            dense = getattr(module, name).detach().to(dtype)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            setattr(module, name, nn.Parameter(dense, requires_grad=False))
    return part.state_dict(keep_vars=True)


# --- the adapter ---


def config_of(adapter: str) -> tuple[Path, LoraConfig]:
    """Return the folder and the config of an adapter.

    Raises:
        Refused: it is not found, or merging it layer by layer is not supported.
    """
    folder = Path(adapter)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(adapter, allow_patterns=["adapter_*"]))
        except (OSError, ValueError) as error:
            raise Refused(f"{adapter} is neither a folder nor an adapter on the Hub: {error}") from error
    with reading(folder, "adapter_config.json", SAFETENSORS_WEIGHTS_NAME, library="peft"):
        written = json.loads((folder / "adapter_config.json").read_text())
    if written.get("peft_type") != PeftType.LORA:
        raise Refused(f"{adapter} is an adapter of the type {written.get('peft_type')}, but only LORA is supported")
    with reading(folder, library="peft"):
        config = LoraConfig.from_pretrained(folder)
    for field in dataclasses.fields(config):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name not in HANDLED and (value := getattr(config, field.name)) != default:
            raise Refused(f"{adapter} has {field.name}={value!r}, which cannot be merged layer by layer")
    for name in sorted(written.keys() - {field.name for field in dataclasses.fields(config)}):
        if written[name]:  # peft would ignore it
            raise Refused(
                f"{adapter} has {name}={written[name]!r}, which this release of peft does not know. Install a newer one"
            )
    if config.init_lora_weights not in KEEPS_THE_BASE:
        raise Refused(
            f"{adapter} has init_lora_weights={config.init_lora_weights!r}, which changes the base weights. Convert it to plain LoRA "
            "with peft's path_initial_model_for_weight_conversion"
        )
    return folder, config


def with_adapter(dense: Any, adapter: str) -> tuple[Any, dict[str, str], Any]:
    """Add an adapter to an empty dense model.

    Returns:
        peft's model, a dict from the names of its parameters to the keys of the adapter's file, and the open file.
    """
    folder, config = config_of(adapter)
    config.inference_mode = True
    try:
        model = PeftModel(dense, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise Refused(f"{adapter} does not fit the model: {error}") from error
    file = open_file(folder / SAFETENSORS_WEIGHTS_NAME)
    stand_ins = {key: torch.empty(file.get_slice(key).get_shape(), device="meta") for key in file.keys()}  # noqa: SIM118
    keys, loaded, load = {id(tensor): key for key, tensor in stand_ins.items()}, {}, model.load_state_dict

    def remember(state_dict: dict[str, Tensor], **options: Any) -> Any:
        loaded.update(state_dict)
        return load(state_dict, **options)

    with mock.patch.object(model, "load_state_dict", remember):
        try:
            unexpected = set_peft_model_state_dict(model, stand_ins).unexpected_keys
        except (RuntimeError, KeyError) as error:
            raise Refused(f"{adapter} does not fit the model: {error}") from error
    if unexpected or {*map(id, loaded.values())} != keys.keys():
        lost = [key for name, tensor in loaded.items() if name in unexpected for key in [keys.get(id(tensor), name)]]
        lost = lost or sorted(keys.values())
        raise Refused(
            f"{adapter} does not fit the model, which has no place for {lost[0]} and {len(lost) - 1} more tensors"
        )
    names = {name: keys[id(tensor)] for name, tensor in loaded.items()}
    own = {name for name, _ in model.named_parameters() if f".{model.active_adapter}" in name} - names.keys()
    if own:
        raise Refused(f"{adapter} does not fit the model: it has no weights for {min(own)} and {len(own) - 1} more")
    return model, names, file


def merged_part(model: Any, part: Any, names: dict[str, str], file: Any, device: Any) -> Any:
    """Read the adapters of a part of the dense model, and merge them with peft's ``merge_and_unload``."""
    base = dict(part.named_parameters(remove_duplicate=False)) | dict(part.named_buffers())
    ties, tied = model.active_peft_config.ensure_weight_tying, dict[int, Any]()
    for path, module in part.named_modules():
        for tensors in (module._parameters, module._buffers):  # modules_to_save also saves buffers
            for name, empty in tensors.items():
                key = names.get(f"{PREFIX}{path}.{name}")
                if key is None:
                    continue
                # A module in modules_to_save has the dtype of the module that it replaces, which may be fp32.
                replaced = base.get(f"{path}.{name}".replace(".modules_to_save.default.", ".original_module."))
                value = file.get_tensor(key).to(device, (empty if replaced is None else replaced).dtype)
                tensors[name] = nn.Parameter(value, requires_grad=False) if tensors is module._parameters else value
                if ties and replaced is not None:  # modules that shared a weight share it again
                    tensors[name] = tied.setdefault(id(replaced), tensors[name])
    model.base_model.model = part
    return model.base_model.merge_and_unload()


# --- the result ---


class Shards:
    """The files of a checkpoint, written one after another."""

    def __init__(self, folder: Path):
        self.folder, self.files, self.waiting, self.bytes, self.total = folder, [], {}, 0, 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self.waiting |= {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self.bytes >= SHARD:
            self.write()

    def write(self) -> None:
        file = self.folder / f"{len(self.files)}.safetensors"
        save_file(self.waiting, file, {"format": "pt"})
        self.files.append((file, sorted(self.waiting)))
        self.total += self.bytes
        self.waiting, self.bytes = {}, 0

    def finish(self, parameters: int) -> None:
        """Write what waits and the index, and give the files their names."""
        if self.waiting:
            self.write()
        if len(self.files) == 1:
            self.files[0][0].rename(self.folder / "model.safetensors")
            return
        index: dict[str, str] = {}
        for number, (file, names) in enumerate(self.files, 1):
            name = f"model-{number:05d}-of-{len(self.files):05d}.safetensors"
            file.rename(self.folder / name)
            index |= dict.fromkeys(names, name)
        content = {"metadata": {"total_parameters": parameters, "total_size": self.total}, "weight_map": index}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self.folder / "model.safetensors.index.json").write_text(text)


def saved_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights of a part of a model under the names of a checkpoint, as ``save_pretrained`` does."""
    ignored = model._keys_to_ignore_on_save or ()
    state_dict = {name: weight for name, weight in model.state_dict().items() if name not in ignored}
    state_dict = modeling_utils.remove_tied_weights_from_state_dict(state_dict, model)
    return modeling_utils.revert_weight_conversion(model, state_dict)


def merge(path: str, adapter: str, out: str, tokenizer_of: Callable[[str], Any], **options: Any) -> int:
    """Merge an adapter into a checkpoint, and save the sum in ``out``. Return the number of weights.

    Until all files are complete, they are in the folder ``out.incomplete``, which is removed after an error.

    Args:
        tokenizer_of: returns the tokenizer of a checkpoint, or raises ValueError.
        options: as for ``from_pretrained``: dtype, quantization_config, and a device_map with a single device. A checkpoint
            that is packed has its own quantization_config.

    Raises:
        Refused: this cannot be merged layer by layer, and nothing was written.
    """
    final = Path(out).resolve()  # a link cannot be replaced by a folder
    folder = Path(f"{final}.incomplete")
    if final.is_mount():  # the finished folder could not be renamed to it
        raise Refused(f"{out} is a mount point. Choose a folder inside it")
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise Refused(f"{out} exists and is not empty. Choose another folder")
    if folder.exists():
        raise Refused(f"{folder} exists. If no other merge is running, a merge was killed: delete this folder")
    if (Path(path) / "adapter_config.json").is_file():
        raise Refused(
            f"{path} also holds an adapter, which transformers would load with the model. Move its adapter_* files to another folder"
        )
    empty, files, load_config = empty_model(path, **options)
    try:
        tokenizer = tokenizer_of(path)
    except ValueError as error:
        raise Refused(str(error)) from error
    dense = dequantized(empty_model(path, **options)[0])
    size, parameters = sum(tensor.nbytes for tensor in dense.state_dict().values()), dense.num_parameters()
    existing = next(parent for parent in final.parents if parent.exists())
    if (free := shutil.disk_usage(existing).free) < size:
        raise Refused(f"the merged model takes {size / 1e9:.1f} GB, but {existing} has only {free / 1e9:.1f} GB left")
    layers, modules = layers_of(dense), dict(dense.named_modules())
    keys = keys_by_layer(empty, files, load_config, layers)
    tied = dense.all_tied_weights_keys
    model, names, file = with_adapter(dense, adapter)
    for weight in (*tied, *tied.values()):
        if any(name.startswith(f"{PREFIX}{weight.rpartition('.')[0]}.lora_") for name in names):
            raise Refused(
                f"{adapter} has LoRA on {weight}, which is tied. peft's merge would change the weight that it is tied to"
            )

    rest_of = functools.partial(without, layers=layers)

    def merged(part_of: Callable[[Any], Any], keys: dict[str, str]) -> dict[str, Tensor]:
        read = part_of(empty)
        for name, weight in dense_weights(read, keys, load_config).items():
            owner, _, own_name = name.rpartition(".")
            kind = "_buffers" if own_name in modules[owner]._buffers else "_parameters"
            getattr(modules[owner], kind)[own_name] = weight
        part = merged_part(model, part_of(dense), names, file, load_config.device_map[""])
        part._weight_conversions = read._weight_conversions
        if part_of is rest_of:
            part.save_pretrained(folder, state_dict={})  # the configs
        weights = saved_weights(part)
        for module in (*read.modules(), *part.modules()):  # frees them, because both models keep their modules
            module._parameters.clear()
        return weights

    logging.disable_progress_bar()  # transformers would show one for each layer
    try:
        folder.mkdir(parents=True)  # not inside the next ``try``, which would remove the folder of another merge
    except OSError as error:
        raise Refused(f"{folder} cannot be made: {error.strerror}. Choose another folder") from error
    try:
        tokenizer.save_pretrained(folder)
        shards = Shards(folder)
        shards.add(merged(rest_of, keys[""]))
        for layer in tqdm(layers, desc="Merging layers"):
            shards.add(merged(functools.partial(one_layer, layer=layer), keys[layer]))
        shards.finish(parameters)
        if final.exists():
            final.rmdir()
        folder.rename(final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return parameters
