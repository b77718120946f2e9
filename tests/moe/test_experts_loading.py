"""enable(experts="4bit"): transformers' load_in_4bit packs the stacks of experts while it loads them."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import itertools
import json
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes.functional as F
import pytest
import torch
from alternation import crossed, thinned
from bitsandbytes.nn.parametrize import Bnb4bitParametrization, replace_parameter_4bit
from peft import PeftModel
from run_example import completed
from safetensors.torch import load_file, save_file
from subprocess_python import program
from tiny_experts import (
    SKIPPED,
    adapters_of,
    architectures,
    in_4bit,
    is_stack,
    loaded,
    random_model,
    saved,
    saved_in_mxfp4,
    with_lora,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

import nf4_patch
from nf4_patch.libraries.transformers import loading

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU; on a GPU: gpu/test_experts_gpu.py")
PACKED = {"experts": "4bit"}
SKIPS_LINEARS = {"llm_int8_skip_modules": ["lm_head", ".*self_attn", "gate"]}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A checkpoint of Qwen3 MoE in bf16, and its stacks."""
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, saved(random_model("qwen3"), folder)


def parametrization(model, name):
    path, _, stack = name.rpartition(".")
    chain = model.get_submodule(path).parametrizations[stack]
    (part,) = chain
    assert type(part) is Bnb4bitParametrization
    return chain.original, part.quant_state


def same_stacks(model, stacks, quant_type="nf4", nested=True, **options):
    for name, dense in stacks.items():
        same_stack(model, name, dense, quant_type, nested, **options)


def same_stack(model, name, dense, quant_type="nf4", nested=True, **options):
    """Check that packed bytes and every field of the state equal those that quantize_4bit makes of the checkpoint's stack."""
    packed, state = parametrization(model, name)
    wanted, wanted_state = F.quantize_4bit(dense, compress_statistics=nested, quant_type=quant_type, **options)
    fields, wanted_fields = state.as_dict(), wanted_state.as_dict()
    assert packed.dtype is wanted.dtype and not packed.requires_grad
    assert torch.equal(packed.view(torch.uint8), wanted.view(torch.uint8))
    assert fields.keys() == wanted_fields.keys()
    for field, value in wanted_fields.items():
        assert torch.equal(fields[field], value) if torch.is_tensor(value) else fields[field] == value, field
    assert state.offset is None or torch.equal(state.offset, wanted_state.offset)


def test_a_stack_that_is_too_large_for_bitsandbytes(qwen3, patched, monkeypatch):
    """A stack that is too large raises an error before loading.

    If ``llm_int8_skip_modules`` names its module, it stays in 16 bits.
    """
    folder, stacks = qwen3
    patched.enable(**PACKED)
    elements = max(stack.numel() for stack in stacks.values())
    monkeypatch.setattr(loading, "LARGEST", elements - 1)
    with pytest.raises(ValueError, match=rf"gate_up_proj has {elements:,} elements") as raised:
        loaded(folder, quantization_config=in_4bit())
    (named,) = re.findall(r"'(model\.layers\.0\.[^']*)'\]", str(raised.value))
    skipped = [*SKIPPED, named, named.replace("0", "1")]
    model = loaded(folder, quantization_config=in_4bit(llm_int8_skip_modules=skipped))
    assert not [module for module in model.modules() if hasattr(module, "parametrizations")]
    monkeypatch.setattr(loading, "LARGEST", elements)
    same_stacks(loaded(folder, quantization_config=in_4bit()), stacks)


def equal_state_dicts(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key in ours:  # NaN of bytes as bf16 is unequal to itself
        a, b = (each[key].reshape(-1).view(torch.uint8) for each in (ours, theirs))
        assert ours[key].dtype is theirs[key].dtype and torch.equal(a, b), key


def logits(model):
    """Return the logits in training mode.

    In eval mode, on a CPU with AVX512-BF16, bitsandbytes repacks linear layers and fails on 32 columns.
    """
    with torch.no_grad():
        return model.train()(torch.arange(24).view(2, 12)).logits


def packed_of(folder):
    with nf4_patch.enabled(**PACKED):
        return loaded(folder, quantization_config=in_4bit())


def packed_and_reloaded(folder, packed, config=None, shards=None, **options):
    """Return a model that is loaded packed, and the model that is loaded from its saved checkpoint."""
    with nf4_patch.enabled(**PACKED):
        model = loaded(folder, quantization_config=config or in_4bit(), **options)
        model.save_pretrained(packed, **({"max_shard_size": shards} if shards else {}))
        return model, loaded(packed, **options)


@pytest.mark.full
@pytest.mark.parametrize("name", architectures())
def test_an_architecture_loads_packed_saves_reloads_and_is_dequantized(name, tmp_path):
    one_dense_layer = {"first_k_dense_replace": 1} if name in ("glm4", "deepseek-v3") else {}
    stacks = saved(random_model(name, **one_dense_layer), tmp_path / "dense")
    assert len(stacks) == (2 if one_dense_layer else 4)
    model, reloaded = packed_and_reloaded(tmp_path / "dense", tmp_path / "packed")
    same_stacks(model, stacks)
    equal_state_dicts(model, reloaded)
    with nf4_patch.enabled(**PACKED):
        reloaded.save_pretrained(tmp_path / "again")
    assert (
        load_file(tmp_path / "again/model.safetensors").keys()
        == load_file(tmp_path / "packed/model.safetensors").keys()
    )
    recipe = loaded(tmp_path / "dense", quantization_config=in_4bit())
    for stack, dense in stacks.items():
        path, _, parameter = stack.rpartition(".")
        assert torch.equal(recipe.get_parameter(stack), dense)
        replace_parameter_4bit(recipe.get_submodule(path), parameter, compress_statistics=True)
    wanted = logits(recipe)
    assert torch.equal(logits(model), wanted) and torch.equal(logits(reloaded), wanted)
    for dequantized in (model, reloaded):  # a dense model, saved under the names of the original
        with nf4_patch.enabled(**PACKED):
            dequantized.dequantize(torch.bfloat16).save_pretrained(tmp_path / "again")
        names, original = (load_file(tmp_path / part / "model.safetensors").keys() for part in ("again", "dense"))
        assert names == original
        again = loaded(tmp_path / "again")
        for stack in stacks:
            wanted = getattr(recipe.get_submodule(stack.rpartition(".")[0]), stack.rpartition(".")[2])
            assert torch.equal(dequantized.get_parameter(stack), wanted) and torch.equal(
                again.get_parameter(stack), wanted
            )


DTYPES = ((torch.bfloat16, torch.uint8), (torch.float16, torch.uint8), (torch.float16, torch.bfloat16))


@pytest.mark.every(2)
@pytest.mark.parametrize(("dtypes", "how"), crossed(DTYPES, itertools.product(("nf4", "fp4"), (True, False))), ids=str)
def test_the_configuration_decides(qwen3, tmp_path, dtypes, how):
    """For FSDP, packed bytes must be stored in a dtype other than uint8, for every dtype of the model."""
    (dtype, storage), (quant_type, nested) = dtypes, how
    folder, stacks = qwen3
    config, places = in_4bit(quant_type, nested, bnb_4bit_quant_storage=storage), "auto" if nested else {"": "cpu"}
    model, reloaded = packed_and_reloaded(folder, tmp_path, config, dtype=dtype, device_map=places)
    stacks = {name: dense.to(dtype) for name, dense in stacks.items()}
    for each in (model, reloaded):
        same_stacks(each, stacks, quant_type, nested, quant_storage=storage)
    equal_state_dicts(model, reloaded)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("skipped", "unpacked"),
    [("model.layers.0", "layers.0."), ("model.layers.0.mlp.experts", "layers.0."), ("experts", "experts"),
     (r"model\.layers\.\d\.mlp\.experts\.down_proj", "down_proj"), ("lm_head", "nothing")],
)  # fmt: skip
def test_skipped_modules_stay_in_16_bits(qwen3, tmp_path, skipped, unpacked):
    folder, stacks = qwen3
    for each in packed_and_reloaded(folder, tmp_path, in_4bit(llm_int8_skip_modules=[*SKIPPED, skipped])):
        for name, dense in stacks.items():
            if unpacked in name:
                assert torch.equal(each.get_parameter(name), dense)
            else:
                same_stack(each, name, dense)


def test_what_was_saved_packed_is_packed_whatever_is_skipped_now(qwen3, tmp_path):
    folder, stacks = qwen3
    with nf4_patch.enabled(**PACKED):
        loaded(folder, quantization_config=in_4bit()).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["llm_int8_skip_modules"] += ["experts"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = loaded(tmp_path)
    same_stacks(model, stacks)


def test_a_sharded_checkpoint(tmp_path):
    """The checkpoint spreads a layer's experts over several files."""
    stacks = saved(random_model("qwen3"), tmp_path / "dense", max_shard_size="60KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 4
    for each in packed_and_reloaded(tmp_path / "dense", tmp_path / "packed", shards="60KB"):
        same_stacks(each, stacks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_packed_checkpoint_takes_the_dtype_that_it_is_loaded_in(qwen3, tmp_path, dtype):
    """Loading with another dtype keeps the packed bytes and decodes them in that dtype, like dense stacks."""
    folder, stacks = qwen3
    packed_and_reloaded(folder, tmp_path)
    with nf4_patch.enabled(**PACKED):
        model = loaded(tmp_path, dtype=dtype)
    for name, dense in stacks.items():
        same_stack(model, name, dense.to(dtype))
        assert model.get_submodule(name.rpartition(".")[0]).down_proj.dtype is dtype


def test_a_model_without_its_head_reads_what_one_with_a_head_saved(qwen3, tmp_path):
    from transformers import AutoModel

    folder, stacks = qwen3
    with nf4_patch.enabled(**PACKED):
        loaded(folder, quantization_config=in_4bit()).save_pretrained(tmp_path / "head")
        model = AutoModel.from_pretrained(tmp_path / "head", dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "no-head")
        reloaded = loaded(tmp_path / "no-head")
    same_stacks(model, {name.removeprefix("model."): dense for name, dense in stacks.items()})
    same_stacks(reloaded, stacks)


# --- a checkpoint whose experts were packed one by one ---


def packed_one_by_one(folder, experts=lambda key: ".experts." in key, rename=lambda key: key, **options):
    """Write a 4-bit checkpoint whose experts are packed one by one, as transformers 4 does. Return the decoded weights."""
    loaded(folder, quantization_config=in_4bit()).save_pretrained(folder)
    weights, decoded = load_file(folder / "model.safetensors"), {}
    for key in [key for key in weights if experts(key)]:
        dense = weights.pop(key)
        packed, state = F.quantize_4bit(dense, quant_type="nf4", **{"compress_statistics": True} | options)
        weights[rename(key)] = packed
        weights |= {f"{rename(key)}.{field}": value for field, value in state.as_dict(packed=True).items()}
        decoded[key] = F.dequantize_4bit(packed, state)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return decoded


ONE_BY_ONE = {"nested": {}, "flat": {"compress_statistics": False}, "in bf16": {"quant_storage": torch.bfloat16}}


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "options"), crossed(("qwen3", "mixtral"), ONE_BY_ONE))
def test_experts_that_were_packed_one_by_one_are_one_stack(name, options, tmp_path):
    """The joined stack decodes bit-identically to the single experts, and is saved as a packed checkpoint."""
    dense = tmp_path / "dense"
    stacks = saved(random_model(name, num_experts=12, num_local_experts=12), dense)  # 10 after 2
    decoded = packed_one_by_one(dense, **ONE_BY_ONE[options])
    with nf4_patch.enabled(), pytest.raises(ValueError, match=r"packed in 4 bits .* call nf4_patch\.enable"):
        loaded(dense)
    with nf4_patch.enabled(**PACKED):
        model = loaded(dense)
        model.save_pretrained(tmp_path / "packed")
        again = loaded(tmp_path / "packed")
    equal_state_dicts(model, again)
    parts = {"gate_up_proj": ("w1", "w3") if name == "mixtral" else ("gate_proj", "up_proj"),
             "down_proj": ("w2" if name == "mixtral" else "down_proj",)}  # fmt: skip
    for path, of_stack in ((stack.rpartition(".")[0], parts[stack.rpartition(".")[2]]) for stack in stacks):
        layer = path.split(".")[2]
        rows = [
            torch.cat([d for key, d in decoded.items() if re.search(rf"layers\.{layer}\..*experts\.{e}\.{part}\.", key)])
            for e in range(12) for part in of_stack
        ]  # fmt: skip
        experts = model.get_submodule(path)
        found = experts.gate_up_proj if len(of_stack) == 2 else experts.down_proj
        assert torch.equal(found, torch.cat(rows).view(found.shape))
        assert type(parametrization(model, f"{path}.down_proj")[0]).__name__ == "Params4bit"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("options", "found"),
    [({"blocksize": 4096}, "an expert does not consist of whole blocks of 4096"),
     ({"experts": lambda key: ".experts." in key and "experts.3.up_proj" not in key}, "the stack has .* the packed experts have"),
     ({"rename": lambda key: re.sub("_proj", "_projs", key)}, "such as .*_projs.*, for which")],
    ids=["blocks", "some in 16 bits", "unknown names"],
)  # fmt: skip
def test_experts_that_cannot_be_joined_are_named(options, found, tmp_path):
    saved(random_model("qwen3", moe_intermediate_size=32), tmp_path)
    packed_one_by_one(tmp_path, **options)
    with nf4_patch.enabled(**PACKED), pytest.raises(ValueError, match=f"experts.*{found}"):
        loaded(tmp_path)


# --- memory ---


class Alive(TorchDispatchMode):
    """Dispatch mode that records the peak of bytes in 16-bit tensors that were alive at the same time."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        inputs = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.device.type != "meta" and tensor.dtype is torch.bfloat16:
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: value for key, value in self.made.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return result


@pytest.mark.full
def test_two_stacks_in_16_bits_at_a_time_and_no_more(tmp_path):
    """At most one stack is dense at a time, plus an eighth for all other weights. Without the option all stacks are dense, which checks the measurement."""
    stacks = saved(random_model("qwen3", num_hidden_layers=4, num_experts=32), tmp_path)
    largest = max(stack.nbytes for stack in stacks.values())
    peaks = {}
    for option in ("4bit", "off"):
        with nf4_patch.enabled(experts=option), Alive() as alive:
            loaded(tmp_path, quantization_config=in_4bit())
        peaks[option] = alive.peak / largest
    assert peaks["4bit"] <= 2.125 and peaks["off"] > 5


# --- what is refused, and what is said ---


def test_without_the_option_packed_experts_are_an_error_that_names_the_line_to_add(qwen3, tmp_path):
    folder, stacks = qwen3
    with nf4_patch.enabled(**PACKED):
        loaded(folder, quantization_config=in_4bit()).save_pretrained(tmp_path)
    message = rf"{re.escape(str(tmp_path))} holds .*\(model.layers.0.mlp.experts.* and {len(stacks) - 1} more\)"
    with nf4_patch.enabled(), pytest.raises(ValueError, match=message + r'.* call nf4_patch.enable\(experts="4bit"\)'):
        loaded(tmp_path)


def shortened(tensor):
    return tensor[:-1].clone()


@pytest.mark.parametrize(
    ("field", "damage"),
    [*itertools.product(("absmax", "nested_absmax", "nested_quant_map"), (None, shortened)), ("quant_map", None),
     ("quant_state", shortened)],
)  # fmt: skip
def test_a_damaged_packed_checkpoint_is_refused(field, damage, qwen3, tmp_path):
    """bitsandbytes would read 8-bit absmax as numbers, or decode past the end."""
    folder, _ = qwen3
    with nf4_patch.enabled(**PACKED):
        loaded(folder, quantization_config=in_4bit()).save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        (key, *_) = [key for key in weights if f"down_proj.{field}" in key]
        part = weights.pop(key)
        weights |= {key: damage(part)} if damage else {}
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match="packed experts are damaged"):
            loaded(tmp_path)


@pytest.mark.parametrize(
    ("places", "mesh", "found"),
    [({"": "disk"}, None, "with disk"), ({"model": 0, "model.layers.1": "cpu"}, None, "with cpu"),
     ({"": 0}, "a mesh", "parallelism"), ({"": 0}, None, ""), ({"": "cpu"}, None, ""), (None, None, ""),
     ({"model": 0, "lm_head": "cpu"}, None, ""), ({"model": 0, "model.layers.1": 1}, None, "")],
    ids=lambda value: str(value),
)  # fmt: skip
def test_offloading_and_parallelism_are_refused(places, mesh, found):
    quantizer = SimpleNamespace(param_needs_quantization=is_stack_of)
    config = SimpleNamespace(hf_quantizer=quantizer, device_map=places, device_mesh=mesh)
    model = random_model("qwen3")
    if found:
        with pytest.raises(ValueError, match=f"Found .*{found}. Change this, or keep the experts in 16 bits"):
            loading.device_of_stacks(model, config)
    else:
        assert len(loading.device_of_stacks(model, config)) == 4


def is_stack_of(model, name):
    return is_stack(name, model.get_parameter(name))


def test_a_stack_that_was_left_in_16_bits_is_named_and_packed(qwen3, tmp_path, caplog):
    """transformers quantizes nothing in a checkpoint that it saved in 4 bits, so experts in it that stayed in 16 bits are packed afterwards."""
    folder, stacks = qwen3
    loaded(folder, quantization_config=in_4bit()).save_pretrained(tmp_path)
    with nf4_patch.enabled(**PACKED), caplog.at_level(logging.WARNING, "nf4_patch"):
        model = loaded(tmp_path)
    (message,) = [
        record.getMessage() for record in caplog.records if "packed only after loading" in record.getMessage()
    ]
    assert message.startswith("nf4_patch: 4 stacks of experts were packed only after") and all(
        name in message for name in stacks
    )
    same_stacks(model, stacks)


@pytest.mark.parametrize("skips", [False, True])
def test_experts_that_load_in_4bit_leaves_in_16_bits_are_named(skips, qwen3, caplog):
    """A user who does not name the option hears of it, unless the experts are not wanted in 4 bits."""
    folder, stacks = qwen3
    with nf4_patch.enabled(), caplog.at_level(logging.WARNING, "nf4_patch"):
        loaded(folder, quantization_config=in_4bit(llm_int8_skip_modules=[*SKIPPED, "experts"] if skips else SKIPPED))
    messages = [record.getMessage() for record in caplog.records if loading.ENABLE in record.getMessage()]
    assert len(messages) == (not skips)
    size = sum(stack.nbytes for stack in stacks.values())
    assert skips or f"{size / 1e9:.2g} GB in total" in messages[0]


def test_a_release_with_another_signature_packs_nothing_and_says_so(qwen3, monkeypatch):
    monkeypatch.setattr(Bnb4BitHfQuantizer, "_dequantize", lambda self, model: model)
    with pytest.raises(RuntimeError, match=r"cannot replace .*Quantizer\._dequantize"):
        packed_of(qwen3[0])


@pytest.mark.every(2)
@pytest.mark.parametrize("option", [None, "4bit"])
def test_other_models_are_loaded_as_they_are(option, tmp_path):
    """Load a dense model in 4 bits, a mixture in 16 bits, and, without the option, a mixture in 4 bits with experts in 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1})
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    stacks = saved(random_model("qwen3"), tmp_path / "qwen3")
    for name, config in (("llama", in_4bit()), ("qwen3", None), ("qwen3", None if option else in_4bit())):
        wanted = loaded(tmp_path / name, quantization_config=config)
        with nf4_patch.enabled(experts=option):
            model = loaded(tmp_path / name, quantization_config=config)
        equal_state_dicts(model, wanted)
    assert all(torch.equal(model.get_parameter(name), dense) for name, dense in stacks.items())


# --- what is made of a loaded model ---


@pytest.mark.full
@pytest.mark.parametrize("storage", thinned((torch.uint8, torch.float16, torch.bfloat16), 2), ids=str)
def test_packed_bytes_are_no_numbers(qwen3, storage):
    """Preparing for k-bit training and casting keep the packed bytes. Each byte counts as two weights."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    folder, stacks = qwen3
    # bitsandbytes' own linears do not survive a cast
    only_experts = in_4bit(bnb_4bit_quant_storage=storage, **SKIPS_LINEARS)

    def trained(config, prepared=True):
        model = loaded(folder, quantization_config=config)
        model = prepare_model_for_kbit_training(model) if prepared else model
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))

    with nf4_patch.enabled(**PACKED):
        model, unprepared = (trained(in_4bit(bnb_4bit_quant_storage=storage), prepared) for prepared in (True, False))
        for each in (model, unprepared):
            same_stacks(each.base_model.model, stacks, quant_storage=storage)
        in_bytes = trained(in_4bit())
        assert torch.equal(logits(model), logits(in_bytes))  # of the same model with bytes that no cast reaches
        assert torch.allclose(logits(model), logits(unprepared).float(), atol=0.05)
        cast, unstored = (trained(config).to(torch.float32) for config in (only_experts, in_4bit(**SKIPS_LINEARS)))
        assert torch.equal(logits(cast), logits(unstored))
        for way in (cast.half, cast.bfloat16, cast.double, cast.float):
            same_stacks(way().base_model.model, stacks, quant_storage=storage)
    dense = trained(in_4bit())
    for each in (model, unprepared, cast):
        assert each.get_nb_trainable_parameters() == dense.get_nb_trainable_parameters()
        assert each.base_model.model.num_parameters() == dense.base_model.model.num_parameters()


def test_a_state_stays_with_its_bytes(qwen3):
    """Parameter and parametrization share one QuantState, also in a copied model and after a merge, so that both move to another device together."""
    model, merged = packed_of(qwen3[0]), packed_of(qwen3[0])
    with nf4_patch.enabled(**PACKED):
        merged = with_lora(merged).merge_and_unload()
    for each in (model, copy.deepcopy(model), merged):
        for name in qwen3[1]:
            packed, state = parametrization(each, name)
            assert packed.quant_state is state
    packed, state = parametrization(model, name)
    same_stacks(copy.deepcopy(model), qwen3[1])
    packed.to("meta")
    assert state.absmax.is_meta and state.state2.absmax.is_meta


def file_of(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def adapters_loaded(model, folder, packed):
    """Load a second adapter, and load an adapter onto a packed model with peft and with transformers."""
    model.save_pretrained(folder)
    model.load_adapter(folder, "second")
    alone, others = PeftModel.from_pretrained(packed(), folder), packed()
    others.load_adapter(folder)
    return {
        f"{index} {name}": value for index, each in enumerate((model, alone, others)) for name, value in adapters_of(each).items()
    }  # fmt: skip


def merged_and_taken_out(model, *_):
    model.merge_adapter()
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.unmerge_adapter()
    return {
        f"{index} {name}": value
        for index, each in enumerate((model, copied))
        for name, value in each.state_dict().items()
    }


# What is done with a packed model after its training; each returns tensors by name.
AFTERWARDS = {
    "saved": lambda model, folder, _: file_of(model.unload(), folder),
    "merged": lambda model, folder, _: file_of(model.merge_and_unload(), folder),
    "merged and taken out": merged_and_taken_out,
    "copied": lambda model, folder, _: file_of(copy.deepcopy(model).unload(), folder),
    "state dict": lambda model, folder, _: (torch.save(model.state_dict(), folder / "a"), torch.load(folder / "a"))[-1],
    "dequantized": lambda model, folder, _: file_of(model.unload().dequantize(torch.bfloat16), folder),
    "adapters": adapters_loaded,
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("off", "name"), crossed(("after the block", "after disable()"), AFTERWARDS, every=3))
def test_what_was_packed_is_saved_and_merged_while_the_option_is_off(name, off, qwen3, tmp_path):
    """A state_dict has the same names and bytes whether the option is on or off."""
    packed = functools.partial(packed_of, qwen3[0])

    def trained():
        model = with_lora(packed(), std=0.1)
        logits(model)
        return model

    folders = [tmp_path / each for each in ("on", "off")]
    for folder in folders:
        folder.mkdir()
    with nf4_patch.enabled(**PACKED):
        want, model = AFTERWARDS[name](trained(), folders[0], packed), trained()
    if off == "after disable()":
        nf4_patch.enable(**PACKED)
        model = trained()
        nf4_patch.disable()
    found = AFTERWARDS[name](model, folders[1], packed)
    assert found.keys() == want.keys() and len(want) > 8 and not nf4_patch.is_enabled()
    assert all(torch.equal(found[key], want[key]) for key in want)


@pytest.mark.full
def test_peft_is_imported_after_the_block(qwen3, tmp_path):
    """peft imported after the ``enabled()`` block that loaded the model still gets the replacements for packed experts."""
    program("experts_after_the_block", qwen3[0], tmp_path)


@pytest.mark.full
def test_a_trainer_resumes_from_its_checkpoint(qwen3, tmp_path):
    """Four steps give the same result as two steps, a checkpoint, and two more steps, with adapters on the attention."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    def train(steps, resume=None):
        model = get_peft_model(packed_of(qwen3[0]), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        arguments = TrainingArguments(
            tmp_path, max_steps=steps, per_device_train_batch_size=1, save_steps=2, logging_steps=1, report_to="none",
            use_cpu=True, lr_scheduler_type="constant", learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(8, 12) * 5 % 96]
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    losses, adapters = train(4)
    again, resumed = train(4, str(tmp_path / "checkpoint-2"))
    assert losses == again and len(set(losses)) == 4
    assert adapters.keys() == resumed.keys() and all(torch.equal(adapters[name], resumed[name]) for name in adapters)


# --- gpt-oss as it is published ---


@pytest.fixture
def mxfp4(tmp_path):
    return tmp_path, saved_in_mxfp4(tmp_path)


def test_gpt_oss_in_mxfp4_is_decoded_and_packed_stack_by_stack(mxfp4, tmp_path):
    folder, stacks = mxfp4
    with nf4_patch.enabled(**PACKED), Alive() as alive:
        model = loaded(folder, quantization_config=in_4bit())
    assert alive.peak <= 2.5 * max(stack.nbytes for stack in stacks.values())
    same_stacks(model, stacks)
    equal_state_dicts(*packed_and_reloaded(folder, tmp_path / "packed"))
    with nf4_patch.enabled(), pytest.raises(ValueError, match="quantized with Mxfp4Config but you are passing"):
        loaded(folder, quantization_config=in_4bit())


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "before"),
    [((), ""), ((), "import trl"), (("-m", "nf4_patch", "run"), "")],
    ids=["transformers", "trl", "run"],
)
def test_gpt_oss_in_mxfp4_by_variables_alone(mxfp4, words, before, tmp_path):
    """transformers chooses the quantizer before anything imports bitsandbytes, so torch loads the entry point."""
    if not (words or importlib.metadata.entry_points(group="torch.backends", name="nf4_patch")):
        assert not os.environ.get("CI"), "the installed package has no such entry point: install it again"
        pytest.skip("nf4_patch is not installed, or without this entry point")
    folder, stacks = mxfp4
    script = Path(__file__).parents[1] / "programs" / "experts_by_environment.py"
    (tmp_path / "train.py").write_text(f"{before}\n{script.read_text()}")
    variables = {"NF4_PATCH_EXPERTS": "4bit"} | ({} if words else {"NF4_PATCH": "1"})
    done = completed((sys.executable, *words, tmp_path / "train.py", folder), tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(len(stacks))


@pytest.mark.parametrize(("storage", "elements"), [(torch.bfloat16, 1026), (torch.float32, 1028)])
def test_a_storage_that_the_packed_bytes_do_not_fill_is_refused(storage, elements):
    """On a GPU, bitsandbytes would write past the end of its result."""
    config = in_4bit(bnb_4bit_quant_storage=storage)
    with pytest.raises(ValueError, match=rf"{elements // 2} packed bytes .* whole elements of .*{storage}"):
        loading.quantize_stack(torch.ones(1, 1, elements), config)
    assert loading.quantize_stack(torch.ones(1, 1, 1024), config).nbytes == 512
