"""LoRA on experts, packed and in 16 bits, gives peft's files and results, and is computed as a separate product."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import re
import sys
import types
from pathlib import Path

import peft
import pytest
import torch
from accelerate import cpu_offload
from alternation import alternating, crossed
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from subprocess_python import EVERY_KERNEL, program
from tiny_experts import (
    ARCHITECTURES,
    CHECKPOINTING,
    CONFIGS,
    DEVICE,
    LAYERS,
    STACKS,
    adapters_of,
    architectures,
    bytes_of,
    chains_of,
    config_of,
    dense_of,
    experts_of,
    hits,
    ids_of,
    in_4bit,
    is_parametrized,
    loaded,
    model_of,
    random_model,
    reasons,
    same,
    saved,
    step,
    with_lora,
)
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

import nf4_patch
from benchmarks.products import error
from nf4_patch.cache.store import cache
from nf4_patch.libraries.bitsandbytes import packed
from nf4_patch.libraries.bitsandbytes.packed import Merged, hash_of
from nf4_patch.patching.counters import counters
from nf4_patch.patching.reasons import Reason

ON = {"experts": "4bit"}


@pytest.fixture(autouse=True)
def option(patched):
    return patched


@pytest.fixture
def stock(option):
    """Run another model with the same adapters and the patch off."""

    def stocked(model, run=step, **changes):
        option.disable()
        result = run(with_lora(model, **changes))
        option.enable(experts="4bit")
        return result

    return stocked


def apart(found, want) -> float:
    """Return the largest error of the tensors in ``found``, which must have the same names and order as ``want``."""
    assert list(found) == list(want)
    return max(error(found[key], want[key].double()) for key in want)


def logits(model, tokens: int = 24) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids_of(tokens)).logits


# --- the numbers ---


@pytest.mark.parametrize("name", architectures())
def test_frozen_experts_are_the_same_to_the_bit(name, option):
    """With frozen experts, nf4_patch's forward in PyTorch is bit-identical to transformers'."""
    model = model_of(name, lora=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
    ours = step(model)
    assert hits() >= 3 * LAYERS and not reasons()
    option.disable()
    assert same(ours, step(model))


@pytest.mark.every(2)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="on an H200 they are: up to 1.09 times on average")
@pytest.mark.parametrize("name", architectures())
def test_errors_are_no_larger_than_pefts(name, stock):
    """Compare loss and gradients with the same formula in fp64, on packed experts and on experts in 16 bits. peft's
    errors are those on experts in 16 bits.
    """
    model = model_of(name, lora=False)
    dense, exact = dense_of(model), dense_of(model, torch.float64)
    exact.set_experts_implementation("eager")
    exact, in_16_bits = stock(exact), step(with_lora(copy.deepcopy(dense)))
    assert not hits()
    packed, peft = step(with_lora(model)), stock(dense)
    assert hits()
    for ours in (packed, in_16_bits):
        assert ours.keys() == peft.keys() == exact.keys() and len(ours) > 4 * LAYERS
        ratios = {key: error(ours[key], exact[key]) / error(peft[key], exact[key]) for key in exact if "experts" in key}
        assert len(ratios) == 4 * LAYERS
        assert sum(ratios.values()) <= len(ratios) and max(ratios.values()) < 1.25, ratios
        assert error(ours["loss"], exact["loss"]) < 2**-9


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "how"), alternating(CONFIGS, ("reentrant", "recomputed", "cached", "accumulated", "autocast"))
)
def test_a_step_is_the_same_however_it_is_run(name, how, option):
    model = with_lora(model_of(name, lora=False))
    model.enable_input_require_grads()
    plain = step(model)
    if how in CHECKPOINTING:
        model.gradient_checkpointing_enable(CHECKPOINTING[how])
    if how == "cached":
        option.enable(experts="4bit", cache="1GiB")
        assert same(step(model), plain) and cache.misses
    if how == "accumulated":
        model.zero_grad()
        for _ in range(2):
            (model(input_ids=ids_of(), labels=ids_of()).loss / 2).backward()
        assert all(error(p.grad, plain[key].double()) < 2**-7 for key, p in adapters_of(model).items())
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=how == "autocast"):
        again = step(model)
    assert how == "autocast" or same(again, step(model))
    assert apart(again, plain) < (2**-5 if how == "autocast" else 1e-12)
    assert not reasons()


def test_experts_without_tokens_have_no_gradient(stock):
    def used(model) -> list[list[bool]]:
        model(input_ids=ids_of(1), labels=ids_of(1).flip(0)).logits.float().square().sum().backward()
        a = [p.grad.view(6, -1) for name, p in adapters_of(model).items() if "experts" in name and "lora_A" in name]
        b = [p.grad.view(-1, 6).mT for name, p in adapters_of(model).items() if "experts" in name and "lora_B" in name]
        return [gradient.ne(0).any(dim=1).tolist() for gradient in a + b]

    model = model_of("qwen3", lora=False)
    dense = dense_of(model)
    ours = used(with_lora(model))
    assert ours == stock(dense, run=used) and len(ours) == 4 * LAYERS
    assert all(1 < sum(experts) < 6 for experts in ours)


# --- files ---


@pytest.mark.full
@pytest.mark.skipif(DEVICE.type == "cuda", reason="peft alone loads onto the CPU")
def test_files_are_pefts(option, tmp_path):
    """Adapters saved with the patch load with peft alone onto experts in 16 bits, and vice versa, whichever stack is packed first."""
    models = {}
    for order in (STACKS, STACKS[::-1]):
        folder = tmp_path / order[0]
        packed = model_of("qwen3", lora=False, stacks=order)
        dense = dense_of(packed)
        dense.save_pretrained(folder / "dense")
        option.enable(experts="4bit")
        models[folder] = ours = with_lora(packed, std=0.1)
        ours.save_pretrained(folder / "ours")
        option.disable()
        with_lora(dense, std=0.1).save_pretrained(folder / "stock")
        files = [load_file(folder / who / "adapter_model.safetensors") for who in ("ours", "stock")]
        assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    program("stock_peft", *(folder / name for folder in models for name in ("dense", "ours", "alone")))
    option.enable(experts="4bit")
    for folder, ours in models.items():
        loss, alone = torch.load(folder / "alone")
        mine = logits(ours)
        assert error(step(ours)["loss"], loss.double()) < 2**-8 and error(mine, alone.double()) < 2**-5
        base = ours.unload()
        assert error(logits(base), alone.double()) > 4 * error(mine, alone.double())
        assert torch.equal(logits(PeftModel.from_pretrained(base, folder / "stock")), mine)


SQUARE = {"qwen3": {"moe_intermediate_size": 32}, "gpt-oss": {"intermediate_size": 32}}  # gate_up_proj


@pytest.mark.parametrize(
    ("version", "of"), crossed(({"peft_version": "0.18.1"}, {}), itertools.product(CONFIGS, STACKS)), ids=str
)
def test_an_adapter_of_peft_before_0_19(of, version, tmp_path):
    """peft 0.17 writes no version into the file.

    Such an adapter has A and B swapped. Square experts are refused, because no shape shows the swap. Transposed stacks
    were never swapped.
    """
    name, stack = of

    def packed():
        model = random_model(name, device=DEVICE, **SQUARE[name])
        for module in experts_of(model):
            replace_parameter_4bit(module, stack)
        return model

    model = with_lora(packed(), target_parameters=[f"experts.{stack}"])
    want = model(input_ids=ids_of(4)).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(PeftModel.from_pretrained(packed(), tmp_path)(input_ids=ids_of(4)).logits, want)
    file = tmp_path / "adapter_config.json"
    written = {key: value for key, value in json.loads(file.read_text()).items() if key != "peft_version"}
    file.write_text(json.dumps(written | version))
    if (name, stack) == ("qwen3", "gate_up_proj"):
        found = version.get("peft_version", "0.17").replace(".", r"\.")
        with pytest.raises(ValueError, match=rf"peft {found} wrote .*gate_up_proj, \[6, 64, 64\]"):
            PeftModel.from_pretrained(packed(), tmp_path)
        with pytest.raises(ValueError, match=rf"peft {found} wrote"):
            packed().load_adapter(tmp_path)
    else:
        assert torch.equal(PeftModel.from_pretrained(packed(), tmp_path)(input_ids=ids_of(4)).logits, want)


GROUPED, RANK_MAJOR = {"lora_B_layout": "grouped_by_expert"}, {"lora_B_layout": "rank_major"}
BY_UNSLOTH = {"base_model_class": "Qwen3MoeForCausalLM", "parent_library": "transformers", "unsloth_fixed": True}


def of_each(up, down):
    """Return Unsloth's configuration entry with a layout for each stack."""
    parameters = {stack: {"num_experts": 6} | layout for stack, layout in zip(STACKS, (up, down), strict=True)}
    return {"unsloth_fused_expert_lora": {"lora_A_layout": "grouped_by_expert", "parameters": parameters}}


# What Unsloth wrote into adapter_config.json, and for which stack that is refused.
LAYOUTS = {
    "grouped": (GROUPED, "(gate_up|down)_proj"),
    "grouped, and each": (GROUPED | of_each(GROUPED, GROUPED), "(gate_up|down)_proj"),
    "one of them": (of_each(RANK_MAJOR, GROUPED), "down_proj"),
    "mixed": (of_each({"lora_B_layout": "mixed"}, RANK_MAJOR), "gate_up_proj"),
    "copied": ({"auto_mapping": BY_UNSLOTH | of_each(GROUPED, GROUPED)}, "(gate_up|down)_proj"),
    "of before the record": ({"auto_mapping": BY_UNSLOTH}, "(gate_up|down)_proj"),
    "rank major": (RANK_MAJOR | of_each(RANK_MAJOR, RANK_MAJOR) | {"auto_mapping": BY_UNSLOTH}, None),
    "rank major, copied": ({"auto_mapping": BY_UNSLOTH | of_each(RANK_MAJOR, RANK_MAJOR)}, None),
    "rank major, written by hand": ({"auto_mapping": BY_UNSLOTH} | RANK_MAJOR, None),
    "peft's": ({}, None),
}


def by_peft(model, folder):
    return PeftModel.from_pretrained(model, folder)


def by_transformers(model, folder):
    model.load_adapter(folder)
    return model


def beside_another(model, folder):
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    model.load_adapter(folder, "second")
    model.set_adapter("second")
    return model


@pytest.mark.every(3)
@pytest.mark.parametrize(("load", "said"), crossed((by_peft, by_transformers, beside_another), LAYOUTS, every=2))
def test_an_adapter_of_unsloth(load, said, tmp_path, option, monkeypatch):
    """An adapter with another order of lora_B than peft's is refused. Packed experts refuse it even with the option off."""
    model = with_lora(model_of("qwen3", lora=False), target_modules=[])
    want = logits(model, 4)
    model.save_pretrained(tmp_path)
    file, (marks, refused) = tmp_path / "adapter_config.json", LAYOUTS[said]
    file.write_text(json.dumps(json.loads(file.read_text()) | marks))
    for kind in ("packed", "packed, off", "dense"):
        other = model_of("qwen3", lora=False)
        if kind == "dense":
            other = dense_of(other)
        if kind == "packed, off":
            with_lora(other, r=1).unload()  # what we put adapters on
            option.disable()
        if refused is None:
            assert error(logits(load(other, tmp_path), 4), want.double()) < 2**-5
        else:
            with pytest.raises(ValueError, match=f"Unsloth wrote this adapter with lora_B_layout .* for {refused}, "):
                load(other, tmp_path)
        option.enable(experts="4bit")
    monkeypatch.setitem(sys.modules, "unsloth", types.ModuleType("unsloth"))  # converts what is loaded, itself
    load(model_of("qwen3", lora=False), tmp_path)


def test_the_layout_of_unsloth_reordered(tmp_path):
    """The code in docs/notes/older-unsloth-adapter.md moves column expert * rank + j to j * experts + expert."""
    model = with_lora(model_of("qwen3", lora=False))
    want = logits(model)
    model.save_pretrained(tmp_path)
    file, columns = tmp_path / "adapter_model.safetensors", torch.arange(6 * 4).view(4, 6).T.flatten()
    tensors = load_file(file)
    grouped = {
        key: b[:, columns].contiguous() if ".experts." in key and "lora_B" in key else b for key, b in tensors.items()
    }
    assert sum(not torch.equal(grouped[key], tensors[key]) for key in tensors) == 2 * LAYERS
    save_file(grouped, file)
    page = (Path(__file__).parents[2] / "docs/notes/older-unsloth-adapter.md").read_text()
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "lora_B" in block]
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | LAYOUTS["copied"][0]))
    with pytest.raises(ValueError, match="Unsloth wrote this adapter with lora_B_layout grouped_by_expert"):
        PeftModel.from_pretrained(model_of("qwen3", lora=False), tmp_path)
    exec(lines.replace("my-adapter", str(tmp_path)), {})
    assert all(torch.equal(value, tensors[key]) for key, value in load_file(file).items())
    assert torch.equal(logits(PeftModel.from_pretrained(model.unload(), tmp_path)), want)


def test_a_version_is_filled_in_as_peft_does(tmp_path):
    """A new adapter, and a file without experts, get the version of the peft that is installed."""
    square = random_model("qwen3", device=DEVICE, **SQUARE["qwen3"])
    model = with_lora(square)  # a new adapter on square experts is not refused
    assert model.peft_config["default"].peft_version == peft.__version__
    for config, version in (
        (LoraConfig(target_modules=["q_proj"]), peft.__version__),
        (model.peft_config["default"], "0.17"),
    ):
        config.save_pretrained(tmp_path)
        file = tmp_path / "adapter_config.json"
        written = json.loads(file.read_text())
        assert written.pop("peft_version") == peft.__version__
        file.write_text(json.dumps(written))
        for kind in (PeftConfig, LoraConfig):
            found = kind.from_pretrained(tmp_path)
            assert type(found) is LoraConfig and found.peft_version == version


@pytest.mark.parametrize("packed", [True, False])
def test_an_adapter_of_another_kind(packed):
    """An adapter without target_parameters, such as IA3, works."""
    model = model_of("qwen3", lora=False)
    model = get_peft_model(
        model if packed else dense_of(model), IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    assert step(model)


def test_experts_define_what_goes_down_last():
    """``seen_dense`` relies on this order in all classes of experts."""
    for name in ARCHITECTURES:
        model = AutoModelForCausalLM.from_config(config_of(name))
        for module in experts_of(model):
            names = list(module._parameters)
            assert names == sorted(names, key=lambda name: name.startswith("down")), type(module)


def test_a_module_is_as_it_was_after_adapters_were_put_on_it():
    model = model_of("gpt-oss", lora=False)
    before = [list(module.state_dict(keep_vars=True)) for module in experts_of(model)]
    kinds = [type(module) for module in experts_of(model)]
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        with_lora(model, lora_dropout=0.5)
    after = [module for module in model.modules() if hasattr(module, "parametrizations")]
    assert [type(module) for module in after] == kinds
    assert [list(module.state_dict(keep_vars=True)) for module in after] == before


# --- adapters ---


def second(model):
    """Add a second adapter with another rank."""
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], target_parameters=SUFFIXES)
    model.add_adapter("second", config)
    generator = torch.Generator().manual_seed(5)
    for name, value in adapters_of(model).items():
        if "second" in name:
            value.data = torch.empty(value.shape).normal_(0, 0.05, generator=generator).to(value)
    return model


COPIED = {
    "experts": ({"modules_to_save": ["experts"]}, "modules_to_save names 'experts'.*target_parameters="),
    "a parent": (
        {"modules_to_save": ["norm", "layers.1.mlp"]},
        r"'layers\.1\.mlp', but the experts in .*layers\.1\.mlp",
    ),
    "replicated": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication.*llm_int8_skip_modules"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("how", COPIED)
@pytest.mark.parametrize("second", [False, True])
def test_a_copy_of_packed_experts_is_refused(how, second):
    """peft would copy the placeholders that it sees in place of the packed stacks."""
    changes, message = COPIED[how]
    model = model_of("qwen3", lora=False)
    before, kinds = bytes_of(model), [type(module) for module in experts_of(model)]
    config = LoraConfig(r=2, target_modules=["q_proj"], **changes)
    model = with_lora(model) if second else model
    want = logits(model)
    with pytest.raises(ValueError, match=message):
        model.add_adapter("second", config) if second else get_peft_model(model, config)
    assert [type(module) for module in experts_of(model) if is_parametrized(module)] == kinds
    assert all(map(torch.equal, bytes_of(model), before)) and torch.equal(logits(model), want)


@pytest.mark.every(2)
@pytest.mark.parametrize("how", COPIED)
def test_a_copy_of_experts_in_16_bits_is_pefts(how, stock):
    """Other modules may be copied beside packed experts, too."""
    changes = {**COPIED[how][0], "target_parameters": None}
    dense = dense_of(model_of("qwen3", lora=False))
    assert same(step(with_lora(copy.deepcopy(dense), **changes)), stock(dense, **changes))
    model = model_of("qwen3", lora=False)
    changes = {"modules_to_save": ["norm", "lm_head"], "target_parameters": None}
    assert any("modules_to_save" in name for name in step(with_lora(model, **changes)))


def test_a_mixed_batch_is_pefts():
    """peft refuses ``adapter_names`` for adapters on experts."""
    model = with_lora(model_of("qwen3", lora=False)).eval()
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    x, experts = torch.randn(4, model.config.hidden_size), torch.zeros(4, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="mixed adapter batches"):
        wrapper(x.to(DEVICE), experts.to(DEVICE), torch.ones(4, 1, device=DEVICE), adapter_names=["default"] * 4)


def test_experts_that_run_before_others_are_asked():
    """A hook on the experts runs another model without adapters. The first model's waiting adapters do not apply to it."""
    model, other, found = with_lora(model_of("qwen3", lora=False)), model_of("qwen3", lora=False), []
    want, wanted = logits(model), logits(other)
    handle = experts_of(model)[0].register_forward_pre_hook(lambda *_: found.append(logits(other)))
    assert torch.equal(logits(model), want) and torch.equal(found[0], wanted) and not torch.equal(want, wanted)
    handle.remove()


@pytest.mark.parametrize(("safe", "nested"), [(False, True), (True, False)], ids=["nested", "safe and flat"])
def test_merging_packs_the_sum(safe, nested):
    model = with_lora(model_of("qwen3", nested=nested, lora=False), lora_alpha=12)
    with model.disable_adapter():
        base = logits(model)
    adapted = logits(model)
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    want = getattr(experts, name) + wrapper.get_delta_weight("default")
    model.merge_adapter(safe_merge=safe)
    merged = getattr(experts, name)
    assert float((merged - want).abs().max()) <= 0.16 * float(want.abs().max())  # half of NF4's widest step
    assert error(logits(model), adapted.double()) < error(base, adapted.double())
    state = experts.parametrizations[name][0].quant_state
    assert state.nested == nested and state.dtype == torch.bfloat16 and merged.shape == want.shape
    model.unmerge_adapter()
    assert error(logits(model), adapted.double()) < error(base, adapted.double())
    kept = model.merge_and_unload()
    assert not adapters_of(kept) and experts_of(kept)[0].parametrizations[name].original.dtype == torch.uint8


# --- which modules get LoRA ---

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SUFFIXES = [f"experts.{stack}" for stack in STACKS]
# By the tutorials' names, which are also those of packed stacks, or by the stacks' own.
SAID = {
    "rank 3": {"r": 3},
    "rslora": {"use_rslora": True, "r": 5},
    "patterns": {"rank_pattern": {".*gate_up_proj": 2}, "alpha_pattern": {".*down_proj": 9}},
    "one stack": {"target_parameters": ["mlp.experts.down_proj"]},
    "more of the model": {"modules_to_save": ["lm_head"]},
    "with parameters": {"target_modules": USUAL},
    **{name: {"target_parameters": None} | options for name, options in {
        "usual": {"target_modules": USUAL},
        "all linear": {"target_modules": "all-linear"},
        "regex": {"target_modules": r".*(q_proj|gate_proj|up_proj|down_proj)"},
        "excluded": {"target_modules": USUAL, "exclude_modules": ["k_proj"]},
        "one layer": {"target_modules": USUAL, "layers_to_transform": [1]},
    }.items()},
}  # fmt: skip
OF_ONE = {  # a bias, which peft parametrizes while the experts run, and a stack of one expert
    "bias": ("gpt-oss", {}, {"target_parameters": [*SUFFIXES, "experts.gate_up_proj_bias"]}, Reason.HOOKED),
    "one expert": ("qwen3", {"num_experts": 1, "num_experts_per_tok": 1}, {}, Reason.SECOND_PARAMETRIZATION),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "said"),
    [*crossed(("gpt-oss", "mixtral", "glm4"), SAID, every=2), *((OF_ONE[each][0], each) for each in OF_ONE)],
)
def test_a_configuration_does_what_it_does_on_dense_experts(name, said, stock):
    """Packed experts get the same adapters in the same order as dense experts. In fp32, all steps differ from peft's only by rounding."""
    _, changes, options, reason = OF_ONE.get(said) or (name, {}, SAID[said], None)
    model = model_of(name, torch.float32, lora=False, **changes)
    want = stock(dense_of(model), **options)
    ours = with_lora(model, **options)
    for _ in range(2):
        assert apart(step(ours), want) < 1e-5
    assert set(reasons()) <= {reason}


@pytest.mark.parametrize(
    "modules", [["q_proj", *USUAL[4:]], r".*\.(q_proj|gate_proj|up_proj|down_proj)"], ids=["list", "regex"]
)
def test_an_adapter_of_transformers_4(modules, stock, tmp_path):
    """The file has one module per expert. peft converts them to parameters, as for experts in 16 bits."""
    model, rank = model_of("qwen3", torch.float32, lora=False), 4
    config, generator = model.config, torch.Generator().manual_seed(3)
    hidden, inner, tensors = config.hidden_size, config.moe_intermediate_size, {}
    for layer in range(LAYERS):
        sizes = {"self_attn.q_proj": (hidden, 64)} | {
            f"mlp.experts.{expert}.{name}": (inner, hidden) if name == "down_proj" else (hidden, inner)
            for expert in range(config.num_experts) for name in ("gate_proj", "up_proj", "down_proj")
        }  # fmt: skip
        for name, (of_x, of_y) in sizes.items():
            for part, shape in (("A", (rank, of_x)), ("B", (of_y, rank))):
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"
                tensors[key] = torch.empty(shape).normal_(0, 0.1, generator=generator)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    LoraConfig(r=rank, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM").save_pretrained(tmp_path)

    def run(adapted):
        return step(PeftModel.from_pretrained(adapted, tmp_path, is_trainable=True).train())

    dense = dense_of(model)
    nf4_patch.disable()
    want = run(dense)
    nf4_patch.enable(experts="4bit")
    found = run(model)
    assert apart(found, want) < 1e-5 and len(want) == 1 + LAYERS * 2 * 3


# --- what does not use the factors ---


def test_generation_with_the_adapters_on(stock):
    """Generation with adapters equals peft's. A training step with the generation implementation runs peft's code."""
    model = model_of("qwen3", torch.float32, lora=False).eval()
    dense = dense_of(model).eval()
    for each in (model, dense):
        each.set_experts_implementation("batched_mm")
    peft = stock(dense, run=lambda model: {"logits": logits(model, 4)} | step(model, 4))
    ours = with_lora(model)
    found = {"logits": logits(ours, 4)}
    assert hits("batched_mm") == 2 * LAYERS
    assert ours.generate(input_ids=ids_of(4), max_new_tokens=3, do_sample=False).shape == (2, 7)
    counters.reset()
    found |= step(ours, 4)
    assert reasons("batched_mm") == {Reason.BATCHED_MM_GRADIENT: LAYERS}
    assert apart(found, peft) < 1e-4


def test_hooked_experts_are_trained_too(option):
    """Experts with offloading hooks are read through the hooks."""
    model = with_lora(model_of("qwen3", lora=False))
    plain = step(model)
    for module in experts_of(model):
        if hasattr(module, "parametrizations"):
            cpu_offload(module, DEVICE, state_dict={name: tensor.clone() for name, tensor in module.named_parameters()})
    assert same(step(model), plain) and reasons() == {Reason.HOOKED: LAYERS}


def test_an_error_of_ours_is_no_silence(monkeypatch):
    model = with_lora(model_of("qwen3", lora=False))
    monkeypatch.setattr("nf4_patch.libraries.transformers.experts.stacks_of", lambda *_: 1 / 0)
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        step(model)
    monkeypatch.undo()
    counters.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_layers_run_them_eagerly():
    model = with_lora(model_of("qwen3", lora=False))
    want = step(model)
    for layer in model.base_model.model.model.layers:
        layer.compile(backend="eager")
    assert same(step(model), want) and not reasons()


MODES = {
    "on": lambda option: None,
    "cache": lambda option: option.enable(cache="1GiB"),
    "off": lambda option: option.enable(experts="off"),
    "disabled": lambda option: option.disable(),
}


def evaluated_without(model):
    with model.disable_adapter():
        logits(model)


def merged_and_taken_out(model):
    model.merge_adapter()
    logits(model)
    model.unmerge_adapter()


def read_once(model):
    with model.disable_adapter():
        want = logits(model)
    with parametrize.cached():
        step(model)
        with model.disable_adapter():
            assert error(logits(model), want.double()) < 1e-5  # in here another forward reads the stack


def in_bf16(model):
    with torch.autocast(DEVICE.type, torch.bfloat16):
        step(model)


def generated(model):
    with torch.inference_mode():
        model.generate(input_ids=ids_of(4), max_new_tokens=2, do_sample=False)


# What people do between two steps; the adapters of the step after it are the same, or those of another model to which it is done.
BETWEEN = {
    "evaluated": logits, "evaluated without": evaluated_without, "merged": merged_and_taken_out, "cached": read_once,
    "autocast": in_bf16, "generated": generated, "copied": copy.deepcopy,
    "second": lambda model: model.set_adapter("second"),
    "both": lambda model: model.base_model.set_adapter(["default", "second"]),
    "first": lambda model: model.set_adapter("default"),
    "loops": lambda model: model.set_experts_implementation("eager"),
    "reentrant": lambda model: model.gradient_checkpointing_enable(CHECKPOINTING["reentrant"]),
    "recomputed": lambda model: model.gradient_checkpointing_enable(CHECKPOINTING["recomputed"]),
    "batched": lambda model: model.set_experts_implementation("batched_mm"),
    "grouped": lambda model: model.set_experts_implementation("grouped_mm"),
}  # fmt: skip
ADAPTERS = ("second", "both", "first")


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), crossed(CONFIGS, MODES, every=3))
def test_a_step_after_what_people_do_between_two(name, mode, option):
    """Losses and gradients equal peft's on dense experts after every switch, in every order."""
    model = model_of(name, torch.float32, lora=False)
    dense = dense_of(model)
    ours = second(with_lora(model))
    ours.enable_input_require_grads()
    option.disable()
    stock, wants = second(with_lora(dense)), {}
    for adapters in ADAPTERS:
        BETWEEN[adapters](stock)
        wants[adapters] = step(stock, 8)
    option.enable(experts="4bit")
    BETWEEN["loops"](stock)
    assert apart(step(stock, 8), wants["first"]) < 1e-5 and not hits("eager")
    BETWEEN["first"](ours)
    MODES[mode](option)
    active = "first"
    for each, change in BETWEEN.items():
        active = each if each in ADAPTERS else active
        result = change(ours)
        ours = result if each == "copied" else ours
        assert apart(step(ours, 8), wants[active]) < 1e-5, each
        assert not parametrize._cache_enabled and not parametrize._cache, each
    with ours.disable_adapter(), stock.disable_adapter():
        assert error(logits(ours), logits(stock).double()) < 1e-5
    ours.delete_adapter("second")
    option.enable(experts="4bit", cache="off")
    counters.reset()
    assert apart(step(ours, 8), wants[active]) < 1e-5 and hits() and not reasons()


@pytest.mark.parametrize("way", ["packed", "loaded"])
def test_a_recompute_that_ends_early_keeps_no_stack(way, monkeypatch, tmp_path):
    """bitsandbytes 0.49 hooks the experts without ``always_call``.

    So an aborted recompute would leave PyTorch's parametrize cache on.
    """
    register = torch.nn.Module.register_forward_hook
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "register_forward_hook", lambda self, hook, **_: register(self, hook))
        if way == "packed":
            model = model_of("qwen3", lora=False)
        else:
            saved(random_model("qwen3"), tmp_path)
            model = loaded(tmp_path, quantization_config=in_4bit(), device_map={"": DEVICE}).train()
    model = with_lora(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(CHECKPOINTING["recomputed"])
    for _ in range(2):
        step(model)
        assert not parametrize._cache_enabled and not parametrize._cache


@pytest.mark.full
@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.full)], ids=["nested", "flat"])
def test_taken_out_as_it_was_merged(nested, option):
    """Merge and unmerge two adapters five times while they change, as GRPO with vLLM does.

    Each time, also do so with the patch off.
    """
    model = with_lora(model_of("qwen3", nested=nested, lora=False), lora_alpha=12)
    model.add_adapter("other", LoraConfig(r=2, target_parameters=SUFFIXES, init_lora_weights=False))
    before, results = bytes_of(model), []
    for _ in range(5):
        for switch in (option.enable, option.disable):
            switch()
            model.merge_adapter(["default"])
            results.append(bytes_of(model))
            model.merge_adapter(["other"])
            model.unmerge_adapter()
            assert all(map(torch.equal, bytes_of(model), before))
        assert all(map(torch.equal, *results[-2:]))
        for parameter in adapters_of(model).values():
            parameter.data.mul_(1.5)
    assert not any(all(map(torch.equal, one, before)) for one in results)


def test_host_memory_holds_it_as_long_as_it_is_merged():
    def held() -> int:
        gc.collect()
        return sum(type(each) is Merged for each in gc.get_objects())

    for unload in ("merge_and_unload", "unload"):
        model = with_lora(model_of("qwen3", lora=False))
        model.merge_adapter()
        assert held() == 2 * LAYERS
        model.unmerge_adapter()
        assert not held()
        if unload == "unload":
            model.merge_adapter()
        base = getattr(model, unload)()
        del model
        assert not held() and not adapters_of(base)


@pytest.mark.parametrize("around", [parametrize.cached, torch.inference_mode])
def test_merged_within(around):
    """Inside the context, reads see a merge at once, and unmerging restores the bytes.

    Only experts have LoRA, because peft's unmerge rounds other layers.
    """
    model = with_lora(model_of("qwen3", lora=False), lora_alpha=12, target_modules=[])
    before, plain = bytes_of(model), step(model)
    model.merge_adapter()
    merged, want = bytes_of(model), logits(model)
    model.unmerge_adapter()
    with around():
        logits(model)
        model.merge_adapter()
        assert all(map(torch.equal, bytes_of(model), merged))
        assert error(logits(model), want.double()) < 2**-7  # in here another forward may read the stack, in bf16
    model.unmerge_adapter()
    assert all(map(torch.equal, bytes_of(model), before)) and same(step(model), plain)


def test_a_broken_adapter_is_merged_no_further():
    """peft stops at the broken adapter. The adapters before it are merged, and can be unmerged."""
    model = second(with_lora(model_of("qwen3", lora=False), lora_alpha=12))
    before = bytes_of(model)
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    wrapper.merge(adapter_names=["default"])
    want = getattr(experts, name)
    wrapper.unmerge()
    for key, value in adapters_of(model).items():
        if "second" in key:
            value.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="second seems to be broken"):
        wrapper.merge(safe_merge=True, adapter_names=["default", "second"])
    assert wrapper.merged_adapters == ["default"] and torch.equal(getattr(experts, name), want)
    wrapper.unmerge()
    assert all(map(torch.equal, bytes_of(model), before))


def there_and_back(model):
    """Move the model to the CPU and back. Without a GPU, give every stack new memory with the same bytes."""
    for device in ("cpu", DEVICE) if DEVICE.type == "cuda" else ():
        model.to(device)
        for chain in chains_of(model):
            chain[0].quant_state.to(device)
    for chain in chains_of(model) if DEVICE.type == "cpu" else ():
        chain.original.data = chain.original.data.clone()
        chain[0].quant_state = copy.deepcopy(chain[0].quant_state)
    return model


def with_other_parameters(model):
    """Replace every parameter, as ``module.to`` does with torch.__future__.set_overwrite_module_params_on_conversion."""
    for chain in chains_of(model):
        chain.original = torch.nn.Parameter(chain.original.data.clone(), requires_grad=False)
    return model


COPIES = {
    "copied": copy.deepcopy,
    "copied twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "moved": there_and_back,
    "replaced": with_other_parameters,
    "read in": lambda model: [chain.original.copy_(chain.original.clone()) for chain in chains_of(model)] and model,
}


@pytest.mark.every(3)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_taken_out_as_it_was_merged(way, option):
    """Unmerging restores the original bytes in a copy of a merged model, and in the model itself."""
    model = with_lora(model_of("qwen3", lora=False), lora_alpha=12)
    before = bytes_of(model)
    model.merge_adapter()
    merged = bytes_of(model)
    copied = COPIES[way](model)
    assert all(map(torch.equal, bytes_of(copied), merged)) and not all(map(torch.equal, merged, before))
    for each in {id(each): each for each in (copied, model)}.values():
        each.unmerge_adapter()
        assert all(map(torch.equal, bytes_of(each), before))
    copied.merge_adapter()
    assert all(map(torch.equal, bytes_of(copied), merged))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_a_hash_sees_every_byte(dtype):
    """The hash depends on every byte and its position. Also try several parts with a last part that is shorter than a word."""
    tensor = torch.arange(20).repeat(5).to(torch.uint8).view(dtype)
    found = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "PART", 32)
        for place in range(100):
            for change in (1, 128, 255):
                changed = tensor.clone()
                changed.view(torch.uint8)[place] ^= change
                found.add(hash_of(changed))
        found |= {hash_of(tensor), hash_of(tensor.flip(0)), hash_of(tensor.view(torch.uint8)), hash_of(tensor[:-1])}
        assert hash_of(tensor) == hash_of(tensor.clone()) and len(found) == 303 + (dtype is not torch.uint8)


@pytest.mark.parametrize("way", ["bytes", "state", "scales"])
def test_what_was_changed_after_merging_is_kept(way):
    model = with_lora(model_of("qwen3", lora=False), lora_alpha=12)
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    model.merge_adapter()
    chain = experts.parametrizations[name]
    if way == "bytes":
        with torch.no_grad():
            chain.original.fill_(0x88)  # NF4's 8: 0.0796
    elif way == "scales":
        chain[0].quant_state.offset.mul_(2)
    else:
        chain[0].quant_state = copy.deepcopy(chain[0].quant_state)
        chain[0].quant_state.offset.zero_()
    want = getattr(experts, name) - wrapper.get_delta_weight("default")
    model.unmerge_adapter()
    assert float((getattr(experts, name) - want).abs().max()) <= 0.16 * float(want.abs().max())


# --- in a training ---


@pytest.mark.full
@pytest.mark.timeout(600)
def test_thirty_steps_of_trl(tmp_path):
    """Train with TRL, save, and evaluate with peft alone on experts in 16 bits."""
    program("experts_trl", tmp_path, cwd=tmp_path, fresh=True, **EVERY_KERNEL)
    program("stock_peft", tmp_path / "dense", tmp_path / "adapters", tmp_path / "alone")
    (ours, mine), (loss, alone) = torch.load(tmp_path / "ours"), torch.load(tmp_path / "alone")
    assert error(ours, loss.double()) < 2**-8 and error(mine, alone.double()) < 2**-4
